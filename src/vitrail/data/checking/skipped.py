"""Files that lie among the images and are not used: by their content some are images all the same."""

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vitrail.data.checking.findings import Finding, them
from vitrail.data.file_types import ENDINGS, HEAD, sniff_file
from vitrail.data.sources.folders import Folder
from vitrail.data.sources.shards import Shards
from vitrail.data.sources.source import SkippedFile, Source


class UnusedFiles(NamedTuple):
    """Files that are not used."""

    misnamed: list[str]
    """Images whose names do not say so, each with its kind and the name it should have."""
    outside: list[str]
    """Images that lie in no class folder."""
    others: list[str]
    """Whatever else lies there."""


def find_skipped(sources: Iterable[Source | None], *, most: int | None = None) -> UnusedFiles:
    """Look into the files beside the images of some sources that are not used; with `most`, into so many."""
    found = UnusedFiles([], [], [])
    sniffed = 0
    for whole in _wholes(sources):
        if isinstance(whole, Folder):
            found.outside.extend(whole.outside())
        for file in whole.skipped():
            kind = kind_of_skipped(file) if most is None or sniffed < most else None
            sniffed += 1
            if kind is not None:
                found.misnamed.append(f"{file.name}: a {kind}; rename it to {_renamed(file, kind)}")
            else:
                found.others.append(file.name)
    return found


def _wholes(sources: Iterable[Source | None]) -> Iterator[Folder | Shards]:
    """Give every folder and every set of shards that sources come from, once."""
    seen: set[int] = set()
    waiting: list[object] = list(sources)
    while waiting:
        source = waiting.pop(0)
        if isinstance(source, Folder | Shards):
            if id(source) not in seen:
                seen.add(id(source))
                yield source
        else:
            waiting += [getattr(source, "whole", None)] if hasattr(source, "whole") else getattr(source, "sources", ())


def kind_of_skipped(file: SkippedFile) -> str | None:
    """Return the kind of image that a skipped file is by its content, or None."""
    return sniff_file(file.path, file.start or 0, HEAD if file.size is None else file.size)


def skipped_findings(found: UnusedFiles) -> list[Finding]:
    """Say which files are not used, and what to do about those that should be."""
    findings = []
    if count := len(found.misnamed):
        text = (
            f"{_files(count)} {'is an image' if count == 1 else 'are images'} by content but not by name, "
            f"and {'is' if count == 1 else 'are'} not used"
        )
        lines = tuple(found.misnamed)
        advice = f"give {'it' if count == 1 else 'each'} a name that ends as its content says"
        findings.append(Finding("misnamed", count, f"{_files(count)} misnamed", text, advice, lines, grave=True))
    if count := len(found.outside):
        lie, are = ("image lies", "is") if count == 1 else ("images lie", "are")
        text = f"{count:,} {lie} in no class folder and {are} not used"
        advice = f"move {them(count)} into the {'folder of its class' if count == 1 else 'folders of their classes'}"
        lines = tuple(found.outside)
        findings.append(Finding("outside", count, f"{count:,} outside of the classes", text, advice, lines, grave=True))
    if count := len(found.others):
        text = f"{_files(count)} {'was' if count == 1 else 'were'} skipped, because the name does not end as an image's"
        endings = ", ".join(f".{ending}" for ending in ENDINGS.values())
        advice = f"nothing, unless {'it is an image' if count == 1 else 'they are images'}: names end in {endings}"
        findings.append(Finding("skipped", count, f"{_files(count)} skipped", text, advice, tuple(found.others)))
    return findings


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _renamed(file: SkippedFile, kind: str) -> str:
    stem = os.path.splitext(os.path.basename(file.name))[0]
    if file.start is not None and "." in stem:
        return f"{stem.replace('.', '_')}.{ENDINGS[kind]} (in a shard the suffix begins at the first dot)"
    return f"{stem}.{ENDINGS[kind]}"
