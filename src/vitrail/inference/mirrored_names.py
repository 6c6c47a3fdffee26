"""Names of files that mirror the paths of images: `a/b` for images/a/b.jpg."""

import hashlib
import os
import re
from collections.abc import Sequence

from vitrail.data.remote.filesystems import is_remote, public_url
from vitrail.data.sources.huggingface import is_saved
from vitrail.data.sources.source import SUFFIXES
from vitrail.inference.listing import STDIN

LONGEST = 255 - len(".png")
"""Bytes of a file's name without its suffix, on most file systems."""
_MAGIC = re.compile(r"[*?\[{]")


class MirroredNames:
    """Give every image of a job a name, which no other has: its path without suffix, relative to where it was found.

    That is the folder or shard on the command line; of a file, its folder; of several places, the folder that contains
    all of them. The names follow from the images and their order, so a resumed job gives the same ones.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self.anchor = _common([_anchor(place) for place in places])
        self._taken: set[bytes] = set()

    def of(self, image: bytes) -> str:
        """Return the name of the next image, with "/" between its parts."""
        parts = self._relative(image)
        stem, suffix = os.path.splitext(parts[-1])
        whole = "/".join(parts)
        short = "/".join([*parts[:-1], stem]) if suffix[1:].lower() in SUFFIXES else whole
        for name in (short, whole):
            if _fits(name) and self._take(name):
                return name
        if not _fits(f"{whole}-{10**9}"):
            whole = "/".join([*parts[:-1], hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()])
        number = 2
        while not self._take(f"{whole}-{number}"):
            number += 1
        return f"{whole}-{number}"

    def _take(self, name: str) -> bool:
        # A digest, because a job may have millions of names; of what a file system that ignores case distinguishes.
        digest = hashlib.blake2b(name.casefold().encode(), digest_size=8).digest()
        free = digest not in self._taken
        self._taken.add(digest)
        return free

    def _relative(self, image: bytes) -> list[str]:
        """Return the parts of an image's path after the anchor; of an image elsewhere, of its whole path."""
        parts = _parts(os.fsdecode(image))
        count = len(self.anchor)
        if parts[:count] == self.anchor:
            parts = parts[count:]
        # Names of files have to be text in rows and on every file system.
        named = [os.fsencode(part).decode("utf-8", "backslashreplace").replace("\0", "") for part in parts]
        return [part for part in named if part not in ("", ".", "..")] or ["image"]


def _fits(name: str) -> bool:
    """Whether the last part of a name is short enough for a file."""
    return len(name.rpartition("/")[2].encode()) <= LONGEST


def _anchor(place: str) -> list[str]:
    """Return the folder, as the parts of its path, that the images of a place are named relative to."""
    if place == STDIN:
        return _parts(os.curdir)
    parts = _parts(place)
    if is_remote(place):
        magic = next((number for number, part in enumerate(parts) if re.search(r"[*\[{]", part)), None)
        if magic is not None:
            return parts[:magic]
        return parts if parts[-1].lower().endswith(".tar") else parts[:-1]
    if not os.path.lexists(place):
        magic = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), None)
        return parts if magic is None else parts[:magic]  # without one it is the word digits
    if is_saved(place):
        return parts[:-1]
    return parts if os.path.isdir(place) or place.lower().endswith(".tar") else parts[:-1]


def _parts(path: str) -> list[str]:
    if is_remote(path):
        return public_url(path).split("/")
    return os.path.abspath(path).split(os.sep)


def _common(paths: Sequence[list[str]]) -> list[str]:
    """Return the parts that all paths start with."""
    first, last = min(paths), max(paths)
    count = 0
    while count < min(len(first), len(last)) and first[count] == last[count]:
        count += 1
    return first[:count]
