"""Compact storage of many image names, and the index on disk that saves listing them again."""

import contextlib
import hashlib
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vitrail.data.remote.filesystems import is_remote
from vitrail.io import atomic_write, open_regular

Progress = Callable[[int], None]
"""Called with the number of images found so far."""
VERSION = 1
"""Version of the index on disk; a new version invalidates all earlier files."""
YOUNG_NS = 2_000_000_000
"""After a change this recent, another change could get the same timestamp and go unnoticed."""


@dataclass(frozen=True, eq=False)
class Names:
    """Many names in one buffer: a million Python strings would take ten times the memory and seconds to copy."""

    buffer: NDArray[np.uint8]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, names: Iterable[bytes]) -> Self:
        """Create from an iterable of names."""
        builder = NamesBuilder()
        builder.extend(list(names))
        return cls(*builder.arrays())

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> bytes:
        if index < 0:
            index += len(self.ends)
        if not 0 <= index < len(self.ends):
            raise IndexError(f"name {index} of {len(self.ends)}")
        start = self.ends.item(index - 1) if index else 0
        return self.buffer[start : self.ends.item(index)].tobytes()


class NamesBuilder:
    """Collects names."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._lengths: list[NDArray[np.int64]] = []

    def extend(self, names: list[bytes]) -> None:
        """Append names."""
        self._buffer += b"".join(names)
        self._lengths.append(np.fromiter(map(len, names), np.int64, len(names)))

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the two arrays of a `Names`."""
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        return np.frombuffer(bytes(self._buffer), np.uint8), np.cumsum(lengths)


def cache_folder() -> Path:
    """Return Vitrail's cache folder: $VITRAIL_CACHE, or the one in the user's cache folder."""
    if own := os.environ.get("VITRAIL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "vitrail"


def index_file(kind: str, places: Iterable[str]) -> Path:
    """Return the index file of these files or folders, which may not exist."""
    digest = hashlib.sha256(kind.encode())
    for place in places:
        digest.update(b"\0" + os.fsencode(place if is_remote(place) else os.path.abspath(place)))
    return cache_folder() / "index" / f"{digest.hexdigest()[:32]}.npz"


def load_index(path: Path, names: Iterable[str] | None = None) -> dict[str, NDArray[Any]] | None:
    """Return the named arrays, or all, written by `save_index`; None if some are missing or corrupt."""
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            if any(member.compress_type != zipfile.ZIP_STORED for member in arrays.zip.infolist()):
                return None  # not written here: a few bytes could fill the memory
            chosen = set(arrays.files) - {"version"} if names is None else names
            return {name: arrays[name] for name in chosen} if int(arrays["version"]) == VERSION else None
    except Exception:  # whatever is wrong with the file: list again
        return None


def save_index(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays for `load_index`, atomically. Failure is ignored: it only costs time later."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, version=np.array(VERSION), **arrays)


def settled(times_ns: NDArray[np.int64], began_ns: int) -> bool:
    """Return whether all changes are old enough that any later change gets another timestamp."""
    return not len(times_ns) or int(times_ns.max()) < began_ns - YOUNG_NS


def now_ns() -> int:
    """Return the time as file systems record it."""
    return time.time_ns()
