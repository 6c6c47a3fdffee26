"""Tar shards: patterns such as train-{000..127}.tar, and reading the members of an archive."""

import glob
import os
import re
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from vitrail.data.remote.filesystems import is_remote, matches, path_in
from vitrail.data.remote.stored_files import StoredFile, read_at, size_of
from vitrail.errors import DataError
from vitrail.text import printable_path

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


# ── patterns ──


def is_pattern(place: str) -> bool:
    """Return whether a path is a pattern."""
    return _has_wildcard(place) or RANGE.search(place) is not None


def _has_wildcard(place: str) -> bool:
    """Return whether a path has a wildcard. In a URL, "?" is none: it starts the query; a folder's URL ends in "/"."""
    return place.endswith("/") or "*" in place or "[" in place if is_remote(place) else glob.has_magic(place)


def expand_pattern(pattern: str) -> list[str]:
    """Return the files that match a pattern such as "train-{000..127}.tar" or "train-*.parquet", in order."""
    pieces = RANGE.split(pattern)  # text, first, last, text, first, last, text
    ranges = [_numbers(first, last) for first, last in zip(pieces[1::3], pieces[2::3], strict=True)]
    paths: list[str] = []
    for numbers in product(*ranges):
        filled = "".join(text + number for text, number in zip(pieces[::3], [*numbers, ""], strict=True))
        found = _matches(filled)
        if not found:
            what = (
                f"{printable_path(filled)}, which is part of {printable_path(pattern)},"
                if ranges
                else f"a file that matches {printable_path(pattern)}"
            )
            raise DataError(f"{what} does not exist; correct the pattern")
        paths += found
    kind = ".parquet" if path_in(paths[0]).lower().endswith(".parquet") else ".tar"
    wrong = next((path for path in paths if not path_in(path).lower().endswith(kind)), None)
    if wrong is not None:
        kinds = "only tar shards, or only Parquet files"
        raise DataError(
            f"{printable_path(pattern)} also matches {printable_path(wrong)}; a pattern should match {kinds}"
        )
    return paths


def _matches(filled: str) -> list[str]:
    if not is_remote(filled):
        return sorted(glob.glob(filled)) if glob.has_magic(filled) else [filled] if os.path.exists(filled) else []
    if not _has_wildcard(filled):
        return [filled]  # whether it exists is asked once, with its size
    found = matches(filled)
    return [url for url in found if url.lower().endswith((".tar", ".parquet"))] if filled.endswith("/") else found


def _numbers(first: str, last: str) -> list[str]:
    if not 0 <= int(last) - int(first) < 1_000_000:
        raise DataError(
            f"the pattern {{{first}..{last}}} is not an increasing range of at most a million numbers; correct it"
        )
    width = len(first) if first.startswith("0") else 0
    return [str(number).zfill(width) for number in range(int(first), int(last) + 1)]


# ── members ──

BLOCK = 512
WINDOW = 4096
"""Bytes read at once: several headers if files are small, little waste otherwise."""
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"PK\x03\x04")
# Member types, from the header's byte 156.
_FILES = (b"0", b"\0", b"7")
_FOLDER = b"5"
_WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_ABOUT_NEXT = (b"L", b"K", b"x", b"g")  # GNU long names, POSIX extended headers
_NOTHING: dict[bytes, bytes] = {}
_LONGEST_EXTRA = 1 << 20
"""A longer name or extended header means that the file is corrupt."""


class Member(NamedTuple):
    """A file in a tar."""

    name: bytes
    start: int
    """Offset of its content."""
    size: int
    is_file: bool
    """False for links, sparse files and devices."""


class _Reader:
    """Reads small pieces of a file through a window."""

    def __init__(self, file: StoredFile) -> None:
        self.file, self.size = file, size_of(file)
        self._window, self._start = b"", 0

    def read(self, start: int, size: int) -> bytes:
        at = start - self._start
        if at < 0 or at + size > len(self._window):
            self._window, self._start = read_at(self.file, max(size, WINDOW), start), start
            at = 0
        return self._window[at : at + size]


def members(path: str, file: StoredFile) -> Iterator[Member]:
    """Iterate over the files of an uncompressed tar, without folders. `path` is for messages."""
    reader = _Reader(file)
    _check_kind(path, reader)
    place = 0
    common: dict[bytes, bytes] = {}
    extra: dict[bytes, bytes] = {}  # extended headers of the next file
    while place < reader.size:
        header = reader.read(place, BLOCK)
        if not header.strip(b"\0"):
            _check_end(path, reader, place)
            return
        kind, size = _check_header(path, reader, header, place)
        start = place + BLOCK
        if kind in _ABOUT_NEXT:
            place = _after(path, reader, start, size)
            try:
                _add_properties(kind, _read_extra(reader, start, size), common, extra)
            except ValueError:
                raise DataError(f"{printable_path(path)} is corrupt at byte {start}; create it again") from None
            continue
        here = {**common, **extra} if common or extra else _NOTHING
        if kind in _WITHOUT_CONTENT:
            size = 0
        elif b"size" in here:
            size = int(here[b"size"])
        place = _after(path, reader, start, size)
        name = here.get(b"path") or _header_name(header)
        extra.clear()
        # Old tars mark a folder by a trailing slash.
        if kind != _FOLDER and not name.endswith(b"/"):
            sparse = bool(here) and any(key.startswith(b"GNU.sparse") for key in here)
            yield Member(name, start, size, kind in _FILES and not sparse)
    raise _truncated(path, reader)  # a complete tar ends with zero blocks


def _check_kind(path: str, reader: _Reader) -> None:
    if not reader.size:
        raise DataError(f"{printable_path(path)} is empty; create the tar again")
    if reader.read(0, 8).startswith(_COMPRESSED):
        raise DataError(f"{printable_path(path)} is compressed, which prevents random access; decompress it")


def _check_header(path: str, reader: _Reader, header: bytes, place: int) -> tuple[bytes, int]:
    """Return the type of a member and the size of its content."""
    if len(header) < BLOCK:
        raise _truncated(path, reader)
    total = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    signed = total - 256 * sum(byte > 127 for byte in header) if not header.isascii() else total
    try:
        if _number(header[148:156]) in (total, signed):
            kind = header[156:157]
            if kind == b"S":
                raise DataError(
                    f"{printable_path(path)} has a sparse file, {printable_path(_header_name(header))}; store "
                    "complete files"
                )
            return kind, _number(header[124:136])
    except ValueError:
        pass
    what = f"is corrupt at byte {place}; create it again" if place else "is not a tar file; use one, or another suffix"
    raise DataError(f"{printable_path(path)} {what}")


def _number(field: bytes) -> int:
    """Parse a number field: octal digits, or binary after a marker byte for large numbers."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    value = int(field.partition(b"\0")[0].strip() or b"0", 8)
    if value < 0:
        raise ValueError(value)
    return value


def _header_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    # Only the POSIX format has the prefix of long names here; GNU's has timestamps.
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _after(path: str, reader: _Reader, start: int, size: int) -> int:
    """Return the offset of the next header, after content of this size."""
    if start + size > reader.size:
        raise _truncated(path, reader, start + size)
    return start + -(-size // BLOCK) * BLOCK


def _read_extra(reader: _Reader, start: int, size: int) -> bytes:
    if size > _LONGEST_EXTRA:
        raise ValueError(size)
    return reader.read(start, size)


def _add_properties(kind: bytes, content: bytes, common: dict[bytes, bytes], extra: dict[bytes, bytes]) -> None:
    """Store the properties of the next member, or of all following members."""
    if kind == b"L":
        extra[b"path"] = content.partition(b"\0")[0]
    elif kind == b"K":
        extra[b"linkpath"] = b""  # unused, but a member must follow
    else:
        (common if kind == b"g" else extra).update(_pax(content))


def _pax(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Parse records "length key=value\\n", where the length is that of the whole record."""
    while content.strip(b"\0"):
        digits = content.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        key, equals, value = content[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or length > len(content) or (key == b"size" and not value.isdigit()):
            raise ValueError(content)
        yield key, value
        content = content[length:]


def _check_end(path: str, reader: _Reader, place: int) -> None:
    """Raise unless only zeros follow the end: of two concatenated tars, the second would be lost."""
    while place < reader.size:
        piece = read_at(reader.file, 1 << 20, place)
        rest = piece.lstrip(b"\0")
        if rest:
            at = place + len(piece) - len(rest)
            raise DataError(f"{printable_path(path)} has more data at byte {at} after its end; split concatenated tars")
        place += len(piece) or reader.size


def _truncated(path: str, reader: _Reader, expected: int | None = None) -> DataError:
    missing = "" if expected is None else f", at least {expected - reader.size} bytes too early"
    return DataError(
        f"the tar {printable_path(path)} is truncated: it ends at byte {reader.size}{missing}; copy or create it again"
    )
