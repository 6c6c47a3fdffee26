"""Unused files among the images; by content some of them may be images."""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from vitrail.data.checking.findings import Finding, them
from vitrail.data.file_types import ENDINGS, HEAD, sniff_file
from vitrail.data.sources.folders import Folder
from vitrail.data.sources.shards import Shards
from vitrail.data.sources.source import SkippedFile, Source


class UnusedFiles(NamedTuple):
    """Files that are not used."""

    misnamed: list[str]
    """Images without an image suffix, each with its type and the name it should have."""
    outside: list[str]
    """Images outside of class folders."""
    others: list[str]
    """All other files."""
    unlisted: int = 0
    """Number of further files, which were not read."""


def find_skipped(sources: Iterable[Source | None], *, most: int | None = None) -> UnusedFiles:
    """Sniff the unused files among the images of some sources, at most `most` of them.

    Shards may hold several of them for each image.
    """
    unused = UnusedFiles([], [], [])
    looked = unlisted = 0
    for base in _bases(sources):
        if isinstance(base, Folder):
            unused.outside.extend(base.outside())
        there = len(base.listing.others if isinstance(base, Folder) else base.index.others)
        taken = there if most is None else min(there, most - looked)
        looked, unlisted = looked + taken, unlisted + there - taken
        for file in islice(base.skipped(), taken):
            kind = kind_of_skipped(file)
            if kind is not None:
                unused.misnamed.append(f"{file.name}: a {kind}; rename it to {_renamed(file, kind)}")
            else:
                unused.others.append(file.name)
    return unused._replace(unlisted=unlisted)


def _bases(sources: Iterable[Source | None]) -> Iterator[Folder | Shards]:
    """Yield every folder and set of shards that sources come from, once."""
    seen: set[int] = set()
    waiting: list[object] = list(sources)
    while waiting:
        source = waiting.pop(0)
        if isinstance(source, Folder | Shards):
            if id(source) not in seen:
                seen.add(id(source))
                yield source
        else:
            waiting += [getattr(source, "base", None)] if hasattr(source, "base") else getattr(source, "sources", ())


def kind_of_skipped(file: SkippedFile) -> str | None:
    """Return the kind of image that a skipped file is by its content, or None."""
    return None if file.size == 0 else sniff_file(file.path, file.start or 0, HEAD if file.size is None else file.size)


def skipped_findings(unused: UnusedFiles) -> list[Finding]:
    """Report unused files, and what to do about those that should be used."""
    findings = []
    if count := len(unused.misnamed):
        text = (
            f"{_files(count)} {'is an image' if count == 1 else 'are images'} by content but not by name, "
            f"and {'is' if count == 1 else 'are'} not used"
        )
        lines = tuple(unused.misnamed)
        advice = f"give {'it' if count == 1 else 'each'} the suffix of its content"
        findings.append(Finding("misnamed", count, f"{_files(count)} misnamed", text, advice, lines, grave=True))
    if count := len(unused.outside):
        images, are = ("image is", "is") if count == 1 else ("images are", "are")
        text = f"{count:,} {images} outside of class folders and {are} not used"
        advice = f"move {them(count)} into the {'folder of its class' if count == 1 else 'folders of their classes'}"
        lines = tuple(unused.outside)
        findings.append(
            Finding("outside", count, f"{count:,} outside of class folders", text, advice, lines, grave=True)
        )
    if count := len(unused.others) + unused.unlisted:
        text = f"{_files(count)} {'was' if count == 1 else 'were'} skipped: no image suffix"
        endings = ", ".join(f".{ending}" for ending in ENDINGS.values())
        advice = (
            f"nothing, unless {'it is an image' if count == 1 else 'they are images'}: image files end in {endings}"
        )
        findings.append(Finding("skipped", count, f"{_files(count)} skipped", text, advice, tuple(unused.others)))
    return findings


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _renamed(file: SkippedFile, kind: str) -> str:
    stem = os.path.splitext(os.path.basename(file.name))[0]
    if file.start is not None and "." in stem:
        return f"{stem.replace('.', '_')}.{ENDINGS[kind]} (in a shard the suffix starts at the first dot)"
    return f"{stem}.{ENDINGS[kind]}"
