"""Files on disk or at a URL, opened alike: `open_stored` for both, `read_at` for a range of bytes."""

import functools
import hashlib
import io
import os
import time
from typing import Any, Self

from vitrail.data.remote.block_cache import BLOCK, BlockCache, block_cache
from vitrail.data.remote.filesystems import MissingFileError, Status, fetch, is_remote, status
from vitrail.errors import StorageError
from vitrail.io import open_regular
from vitrail.text import printable_path

CHECK_EVERY = 1.0
"""Seconds between two checks whether a file has changed, when single ranges are read."""


class RemoteFile(io.RawIOBase):
    """A file at a URL, read by ranges.

    If `cached`, whole blocks are downloaded and kept on disk, unless the server does not tell versions apart: then
    they might be stale later. With `sequential`, the block last read stays in memory.
    The file must keep the version `expected`, by default that of its first use.
    """

    def __init__(self, url: str, expected: Status | None = None, *, sequential: bool = False, cached: bool = True):
        super().__init__()
        self.url, self.status = url, status(url) if expected is None else expected
        self._sequential, self._cached = sequential, cached and self.status.known
        self._block: tuple[int, bytes] = (-1, b"")
        self._at = 0

    def read_at(self, size: int, start: int) -> bytes:
        """Return `size` bytes at an offset, fewer at the end of the file."""
        size = max(0, min(size, self.status.size - start))
        cache = block_cache()
        if not self._sequential and not (self._cached and cache.usable):
            content = self._download(start, size)
            if time.monotonic() - _last_check(self.url, self.status)[0] > CHECK_EVERY:
                self._check_version()
            return content
        pieces = []
        while size > 0:
            number, offset = divmod(start, BLOCK)
            taken = min(size, BLOCK - offset)
            pieces.append(self._read_block(cache, number, offset, taken))
            start, size = start + taken, size - taken
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_block(self, cache: BlockCache, number: int, start: int, size: int) -> bytes:
        length = min(BLOCK, self.status.size - number * BLOCK)

        def read(start: int, size: int) -> bytes:
            if not (self._cached and cache.usable):
                return self._download_block(number, length)[start : start + size]
            return cache.read(
                _key(self.url, self.status, BLOCK),
                number,
                length,
                start,
                size,
                lambda: self._download_block(number, length),
            )

        if not self._sequential:
            return read(start, size)
        if self._block[0] != number:
            self._block = number, read(0, length)
        return self._block[1][start : start + size]

    def _download_block(self, number: int, length: int) -> bytes:
        content = self._download(number * BLOCK, length)
        self._check_version()  # after the download: a block of another version must not be stored
        return content

    def _download(self, start: int, size: int) -> bytes:
        try:
            return fetch(self.url, start, size)
        except (MissingFileError, StorageError):
            self._check_version()  # a shorter file, or none: say that it has changed
            raise

    def _check_version(self) -> None:
        try:
            now = status(self.url)
        except MissingFileError:
            raise StorageError(f"{printable_path(self.url)} was removed while it was read; restore it") from None
        if now != self.status:
            raise StorageError(
                f"{printable_path(self.url)} has changed while it was read; restore it, or rerun the command with "
                "the new files"
            )
        _last_check(self.url, self.status)[0] = time.monotonic()

    # ── as a file object ──

    def __enter__(self) -> Self:
        return self

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position."""
        self._at = offset + (0, self._at, self.status.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the position on."""
        content = self.read_at(len(buffer), self._at)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


@functools.lru_cache(maxsize=65_536)
def _key(url: str, version: Status, block: int) -> str:
    """Return the cache key of one version of a file."""
    words = f"{url}\n{version.size}\n{version.tag}\n{block}"
    return hashlib.blake2b(words.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=4096)
def _last_check(url: str, version: Status) -> list[float]:  # noqa: ARG001 - one value for each version
    return [-CHECK_EVERY]


StoredFile = io.FileIO | RemoteFile


def open_stored(path: str | bytes | os.PathLike[str], *, sequential: bool = False) -> StoredFile:
    """Open a file for reading: on disk, or at a URL."""
    if isinstance(path, str | bytes) and is_remote(path):
        return RemoteFile(os.fsdecode(path), sequential=sequential)
    return open_regular(path)


def read_at(file: StoredFile, size: int, start: int) -> bytes:
    """Return `size` bytes at an offset, fewer at the end of the file."""
    if isinstance(file, RemoteFile):
        return file.read_at(size, start)
    content = os.pread(file.fileno(), size, start)  # a single pread may return less
    while len(content) < size and (more := os.pread(file.fileno(), size - len(content), start + len(content))):
        content += more
    return content


def size_of(file: StoredFile) -> int:
    """Return the size of an open file."""
    return file.status.size if isinstance(file, RemoteFile) else os.fstat(file.fileno()).st_size


def open_stored_text(place: str, *, newline: str | None = None) -> io.TextIOWrapper:
    """Open a text file for reading line by line; skips a byte order mark."""
    raw = open_stored(place, sequential=True)
    return io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8-sig", newline=newline)


def read_remote(url: str, size: int | None = None, start: int = 0) -> bytes:
    """Return the content of a file at a URL, or a range of it; until `forget_versions`, of the version read first."""
    with RemoteFile(url, _first_status(url)) as file:
        return file.read_at(file.status.size if size is None else size, start)


def forget_versions() -> None:
    """Let `read_remote` look for new versions: call it when data is opened, as a notebook may do it again later."""
    _first_status.cache_clear()


@functools.lru_cache(maxsize=65_536)
def _first_status(url: str) -> Status:
    """Return the version of a file when this process first used it: one request less for every later read."""
    return status(url)
