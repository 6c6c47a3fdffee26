"""Files: only regular ones are read, whole ones are written, and what was written is known again by its digest.

Whatever is wrong with a file is an `OSError`, where the system refuses it, or a `ContentError`, where its content is
not what it should be; whoever reads it says so in its own words, through the `VitrailError` tree.
"""

import errno
import hashlib
import io
import json
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

MOST_TEXT = 1 << 30
"""Bytes of the longest text we read at once; split.json of ten million images is shorter."""
MOST_NESTED = 100
"""How deep a JSON or TOML file may be nested: far more than any config, far less than what Python can walk through."""
DIGEST = "sha256"
"""The fastest cryptographic hash of the standard library where the CPU has instructions for it (docs/results.md), and
one that people can check with `sha256sum`."""


class ContentError(ValueError):
    """A file holds something else than it should."""


def open_regular(path: str | bytes | os.PathLike[str]) -> io.FileIO:
    """Open a file to be read: a regular one, because a pipe may never answer and a device never end."""
    # Without O_NONBLOCK the call itself would wait until somebody writes to a pipe.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        check_regular(os.fstat(handle).st_mode)
    except BaseException:  # whatever happened, the file is not left open
        os.close(handle)
        raise
    return io.FileIO(handle, "rb")


def open_text(path: str | os.PathLike[str], *, newline: str | None = None) -> io.TextIOWrapper:
    """Open a text file to be read line by line; a mark of the byte order at its start is passed over."""
    return io.TextIOWrapper(io.BufferedReader(open_regular(path)), encoding="utf-8-sig", newline=newline)


def check_regular(mode: int) -> None:
    """Refuse what is not a regular file, by its mode, as the system refuses a folder."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, and not a regular file")


def check_is_regular(path: str | bytes | os.PathLike[str]) -> None:
    """Refuse what is not a regular file, before a library opens it by its name."""
    check_regular(os.stat(path).st_mode)


def read_text(path: str | os.PathLike[str], *, most: int = MOST_TEXT) -> str:
    """Return the text of a file."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it is longer than {most >> 20} MB")
        content = file.readall()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContentError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return what a JSON file holds."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Any:
    """Return what JSON says; what is not JSON, or nothing that a person would write, is a `ContentError`."""
    try:
        content = json.loads(text)
    except RecursionError:
        _refuse_nesting()
    except ValueError as error:  # also a number of more digits than Python reads
        raise ContentError(f"is not JSON ({error})") from None
    return _not_too_deep(content)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the table of a TOML file."""
    return parse_toml(read_text(path))


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table that TOML says; what is not TOML is a `ContentError`."""
    try:
        content = tomllib.loads(text)
    except RecursionError:
        _refuse_nesting()
    except ValueError as error:
        raise ContentError(f"is not TOML ({error})") from None
    return dict(_not_too_deep(content))


def _not_too_deep(content: Any) -> Any:
    """Refuse what can be read but not be walked through or written again."""
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(MOST_NESTED):
        inner = [value for outer in level for value in (outer.values() if isinstance(outer, dict) else outer)]
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        _refuse_nesting()
    return content


def _refuse_nesting() -> NoReturn:
    raise ContentError(f"is nested more than {MOST_NESTED} deep") from None


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the digest of a file's content, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, DIGEST).hexdigest()


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give another name to write a file under; it gets its own, and the usual permissions, when it is whole."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        yield temporary
        follow_umask(temporary)
        temporary.replace(path)
    except BaseException:  # whatever happened, also Ctrl-C: nothing half-written is left behind
        with suppress(OSError):
            temporary.unlink()
        raise


def follow_umask(*paths: Path) -> None:
    """Give files and folders the permissions that others made now would have: libraries make theirs for one user."""
    mask = os.umask(0)
    os.umask(mask)
    for path in paths:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def flush(path: Path) -> None:
    """Make sure that a file or folder is on the disk and not only on its way there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
