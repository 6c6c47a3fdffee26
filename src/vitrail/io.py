"""File helpers: read regular files only, write atomically, lock, compute digests.

Errors are an `OSError` from the system, or a `ContentError` if the content is invalid; callers turn them into a
`VitrailError`. Only stdout is known here, so `writing_to_stdout` raises a `DataError` itself.
"""

import errno
import functools
import hashlib
import io
import json
import os
import stat
import tempfile
import tomllib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from vitrail.errors import DataError

MAX_TEXT = 1 << 30
"""The largest text file that is read at once, in bytes; the split.json of ten million images is smaller."""
MAX_NESTING = 100
"""The deepest nesting of a JSON or TOML file: far above any config, far below Python's recursion limit."""
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK)
"""Errors of a file system without locks."""
PARTIAL = ".part"
"""The suffix of files that are being written."""
DIGEST = "sha256"
"""The fastest cryptographic hash in the standard library on CPUs with SHA instructions (docs/results.md); `sha256sum`
can verify it."""


# Without O_NONBLOCK, opening a pipe would block until it has a writer. Windows has neither, but needs O_BINARY.
_OPEN_FLAGS = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))


class ContentError(ValueError):
    """The content of a file is invalid."""


def full_disk_hint(error: Exception, then: str = "rerun the same command") -> str:
    """Return what to do about a full disk, to append to a message; "" for any other error."""
    code = getattr(error, "errno", None)
    # safetensors and torch report it as text only.
    full = code in (errno.ENOSPC, errno.EDQUOT) or (code is None and os.strerror(errno.ENOSPC) in str(error))
    return f"; free some space and {then}" if full else ""


@contextmanager
def writing_to_stdout() -> Iterator[None]:
    """Turn an error of writing to stdout into a `DataError` that names it; a reader that closes the pipe is none."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        hint = "; free some space, or write elsewhere" if full_disk_hint(error) else ""
        raise DataError(f"stdout could not be written: {error.strerror or error}{hint}") from None


def open_regular(path: str | bytes | os.PathLike[str]) -> io.FileIO:
    """Open a regular file for reading; a pipe might block forever, a device might never end."""
    handle = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    try:
        check_regular(os.fstat(handle).st_mode)
    except BaseException:  # close the file on any error, also Ctrl-C
        os.close(handle)
        raise
    return io.FileIO(handle, "rb")


def open_text(path: str | os.PathLike[str], *, newline: str | None = None) -> io.TextIOWrapper:
    """Open a text file for reading line by line; skips a byte order mark."""
    return io.TextIOWrapper(io.BufferedReader(open_regular(path)), encoding="utf-8-sig", newline=newline)


def check_regular(mode: int) -> None:
    """Raise `OSError` if the mode is not that of a regular file."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a regular file")


def check_is_regular(path: str | bytes | os.PathLike[str]) -> None:
    """Raise `OSError` if the path is not a regular file, before a library opens it."""
    check_regular(os.stat(path).st_mode)


def read_text(path: str | os.PathLike[str], *, limit: int = MAX_TEXT) -> str:
    """Return the content of a text file."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit >> 20} MB")
        content = file.readall()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContentError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; invalid or too deeply nested JSON is a `ContentError`."""
    try:
        content = json.loads(text)
    except RecursionError:
        _raise_nesting()
    except ValueError as error:  # also a number with more digits than Python parses
        raise ContentError(f"is not JSON ({error})") from None
    return _check_nesting(content)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a TOML file."""
    return parse_toml(read_text(path))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; invalid TOML is a `ContentError`."""
    try:
        content = tomllib.loads(text)
    except RecursionError:
        _raise_nesting()
    except ValueError as error:
        raise ContentError(f"is not TOML ({error})") from None
    return dict(_check_nesting(content))


def _check_nesting(content: Any) -> Any:
    """Raise if the content is nested too deeply to traverse or write back."""
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(MAX_NESTING):
        inner = [value for outer in level for value in (outer.values() if isinstance(outer, dict) else outer)]
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        _raise_nesting()
    return content


def _raise_nesting() -> NoReturn:
    raise ContentError(f"is nested more than {MAX_NESTING} levels deep") from None


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the hex digest of a file's content."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, DIGEST).hexdigest()


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path; on success, rename it to `path` with default permissions."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        follow_umask(temporary)
        temporary.replace(path)
    except BaseException:  # also Ctrl-C: leave no partial file behind
        with suppress(OSError):
            temporary.unlink()
        raise


def remove_partial_files(folder: Path) -> None:
    """Remove what `atomic_write` left in a folder when a process was killed; no other process may be writing there."""
    for file in folder.glob(f".*{PARTIAL}"):
        with suppress(OSError):
            file.unlink()


@contextmanager
def lock_file(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file; if another process holds it, wait or raise `BlockingIOError`.

    The file stays. Forked workers do not keep the lock: they outlive a killed process for some seconds. A file system
    without locks locks nothing.
    """
    from filelock import FileLock, Timeout

    path.touch()
    lock = FileLock(path, timeout=-1 if wait else 0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(errno.EAGAIN, "it is in use by another process") from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


def try_lock(file: io.FileIO) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock.

    Forked workers close the file, so that they do not keep the lock. On a file system without locks, nothing is locked.
    """
    from filelock import lock_descriptor

    _files_closed_in_workers().add(file)
    try:
        return lock_descriptor(file.fileno(), blocking=False)
    except OSError:
        return True


@functools.cache
def _files_closed_in_workers() -> weakref.WeakSet[io.FileIO]:
    files: weakref.WeakSet[io.FileIO] = weakref.WeakSet()

    def close() -> None:
        for file in list(files):
            file.close()

    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=close)
    return files


def follow_umask(*paths: Path) -> None:
    """Set default permissions by the umask; some libraries create files for the owner only."""
    mask = os.umask(0)
    os.umask(mask)
    for path in paths:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def flush(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
