"""Files that lie among the images and are not used: by their content some are images all the same."""

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from vitrail.data.checking.findings import Finding, them
from vitrail.data.sniffing import ENDINGS, HEAD, sniff
from vitrail.data.sources.folders import Folder
from vitrail.data.sources.listing import shown
from vitrail.data.sources.splits import Parts


class Skipped(NamedTuple):
    """Files that are not used."""

    misnamed: list[tuple[str, str]]
    """Images whose names do not say so, each with its kind."""
    outside: list[str]
    """Images that lie in no class folder."""
    others: list[str]
    """Whatever else lies there."""


def find_skipped(parts: Parts, *, most: int | None = None) -> Skipped:
    """Look into the files that are not used; with `most`, into so many."""
    found = Skipped([], [], [])
    sniffed = 0
    for folder in _folders(parts):
        found.outside.extend(folder.outside())
        for path in folder.skipped():
            kind = _kind(path) if most is None or sniffed < most else None
            sniffed += 1
            if kind is not None:
                found.misnamed.append((shown(path), kind))
            else:
                found.others.append(shown(path))
    return found


def _folders(parts: Parts) -> Iterator[Folder]:
    """Give every folder that parts come from, once."""
    seen: set[int] = set()
    for part in (parts.train, parts.val, parts.test):
        whole: object = part
        while not isinstance(whole, Folder) and hasattr(whole, "whole"):
            whole = whole.whole
        if isinstance(whole, Folder) and id(whole) not in seen:
            seen.add(id(whole))
            yield whole


def _kind(path: bytes) -> str | None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading from a pipe might never end
            return None
        with open(path, "rb", buffering=0) as file:
            return sniff(file.read(HEAD))
    except OSError:
        return None


def skipped_findings(found: Skipped) -> list[Finding]:
    """Say which files are not used, and what to do about those that should be."""
    findings = []
    if count := len(found.misnamed):
        text = (
            f"{_files(count)} {'is an image' if count == 1 else 'are images'} by content but not by name, "
            f"and {'is' if count == 1 else 'are'} not used"
        )
        lines = tuple(f"{name}: a {kind}; rename it to {_renamed(name, kind)}" for name, kind in found.misnamed)
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


def _renamed(name: str, kind: str) -> str:
    return f"{os.path.splitext(os.path.basename(name))[0]}.{ENDINGS[kind]}"
