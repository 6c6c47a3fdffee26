"""A bounded cache of blocks of remote files on the local disk, shared by all processes.

    remote/<hash of URL and version>/<number>   one block of a file
    remote/locks/<number>                       held while a block is downloaded

A new version of a file has another hash, so a block is never stale; files without a version are not stored. Blocks
appear by renaming, so a block is complete.
If the disk is full, reading continues without the cache.
"""

import functools
import multiprocessing
import os
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vitrail.data.remote.filesystems import positive_setting
from vitrail.data.sources.index_files import cache_folder
from vitrail.io import PARTIAL, atomic_write, full_disk_hint, lock_file

BLOCK = 4 << 20
"""Bytes of a block: a request's latency is small compared to its transfer."""
DEFAULT_LIMIT_GB = 20.0
LOCKS = 64
ATTEMPTS = 5
ABANDONED = 3600.0
"""Seconds after which a block that is still being written belongs to a process that was killed."""
KEEP = 0.9
"""Fraction of the limit that remains after blocks are removed."""
TOUCH_EVERY = 60.0
"""Seconds between two updates of a block's time of last use."""


_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class BlockCache:
    """Blocks of remote files, least recently used ones removed above `limit` bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.usable = limit >= BLOCK
        """False if the disk cannot be written; then nothing more is stored by this process."""
        self._unchecked = limit  # bytes written since the last removal: check on the first write

    def read(self, key: str, number: int, length: int, start: int, size: int, download: Callable[[], bytes]) -> bytes:
        """Return `size` bytes at `start` of a block of `length` bytes; `download` returns a missing block."""
        path = f"{self.folder}{os.sep}{key}{os.sep}{number}"  # a Path would cost more than the read
        content = _read_block(path, length, start, size)
        if content is not None:
            return content
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            with lock_file(self.folder / "locks" / str(zlib.crc32(path.encode()) % LOCKS), wait=True):
                content = _read_block(path, length, start, size)  # another process may have stored it
                if content is not None:
                    return content
                block = download()
                self._store(Path(path), block)
        except OSError as error:
            self._give_up(error)
            block = download()
        return block[start : start + size]

    def _store(self, path: Path, block: bytes) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path) as temporary:
                    temporary.write_bytes(block)
                break
            except OSError as error:
                # Another process may remove a folder while it is still empty.
                if isinstance(error, FileNotFoundError) and attempt < ATTEMPTS:
                    continue
                self._give_up(error)
                return
        self._unchecked += len(block)
        if self._unchecked > self.limit // 100:
            self._unchecked = 0
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Remove the least recently used blocks, if there are too many, and what killed processes left behind."""
        for path in self.folder.glob(f"*/.*{PARTIAL}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    path.unlink()
        blocks = []
        for path in self.folder.glob("*/[!.]*"):
            with suppress(OSError):
                status = path.stat()
                blocks += [(status.st_mtime, status.st_size, path)] if path.parent.name != "locks" else []
        excess = sum(size for _, size, _ in blocks)
        if excess <= self.limit:
            return
        excess -= int(self.limit * KEEP)
        for _, size, path in sorted(blocks):
            if excess <= 0:
                break
            excess -= size
            with suppress(OSError):  # another process may have removed it
                path.unlink()
                path.parent.rmdir()  # fails unless it was the last block

    def _give_up(self, error: OSError) -> None:
        self.usable = False
        if _first_to_say(self.folder):
            hint = "; free some space" if full_disk_hint(error) else ""
            print(
                f"the cache of remote files, {self.folder}, could not be written: {error.strerror or error}; reading "
                f"continues without it{hint}, or set another folder with VITRAIL_CACHE",
                file=sys.stderr,
                flush=True,
            )


def block_cache() -> BlockCache:
    """Return the cache: in Vitrail's cache folder, of $VITRAIL_REMOTE_CACHE_GB, by default 20 GB; 0 for none."""
    return _cache(*map(os.environ.get, ("VITRAIL_REMOTE_CACHE_GB", "VITRAIL_CACHE", "XDG_CACHE_HOME", "HOME")))


@functools.cache
def _cache(*_: str | None) -> BlockCache:
    """Return the cache for these settings, which are read here once."""
    limit = int(positive_setting("VITRAIL_REMOTE_CACHE_GB", DEFAULT_LIMIT_GB) * 1e9)
    return BlockCache(cache_folder() / "remote", limit)


def _read_block(path: str, length: int, start: int, size: int) -> bytes | None:
    """Return bytes of a stored block; None if it is missing or has another length."""
    try:
        handle = os.open(path, _OPEN_FLAGS)
    except OSError:
        return None
    try:
        status = os.fstat(handle)
        content = os.pread(handle, size, start) if status.st_size == length else b""
    except OSError:
        return None
    finally:
        os.close(handle)
    if len(content) != size:
        return None
    if time.time() - status.st_mtime > TOUCH_EVERY:
        with suppress(OSError):
            os.utime(path)
    return content


@functools.cache
def _first_to_say(folder: Path) -> bool:
    """Whether this process is the first of a command and its workers to print a message."""
    parent = multiprocessing.parent_process()
    mark = folder / "locks" / f"said-{os.getpid() if parent is None else parent.pid}"
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return time.time() - mark.stat().st_mtime > 24 * 3600  # of an earlier process with the same number
    except OSError:
        return True
    return True
