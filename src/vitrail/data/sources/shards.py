"""Tar shards in WebDataset layout: files with one key are a picture and its label. Indexed once, then read anywhere."""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.labels import check_classes, label_text, order_classes
from vitrail.data.sources.listing import (
    Names,
    NamesBuilder,
    Progress,
    index_file,
    load_index,
    now_ns,
    save_index,
    settled,
    shown,
)
from vitrail.data.sources.source import SUFFIXES, Labels, reason_of, stamp_file
from vitrail.data.sources.tar import Member, members
from vitrail.errors import DataError
from vitrail.io import ContentError, open_regular, read_text

CLASSES_FILE = "classes.txt"
LABEL_SUFFIXES = (b"cls", b"json", b"txt")
"""Where a label may be; the first of them that a key has holds."""
_PICTURES = frozenset(suffix.encode() for suffix in SUFFIXES)
_INDEX = ("stamps", "shard_of", "starts", "sizes", "names", "name_ends", "codes", "found")
_WHOLE_NUMBER = re.compile(rb"\s*[+-]?[0-9]{1,18}\s*")
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass(frozen=True, eq=False)
class Index:
    """Where the pictures of some shards lie, and what their labels are."""

    stamps: NDArray[np.int64]
    """Of every shard, its size and the time of its last change."""
    shard_of: NDArray[np.int32]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    names: Names
    codes: NDArray[np.int64]
    """Of every picture, the place of its label in `found`, or -1."""
    found: list[str]


@dataclass(frozen=True, eq=False)
class Shards:
    """Pictures inside tar files. No file stays open: opening one costs little beside decoding a picture."""

    paths: tuple[str, ...]
    index: Index
    classes: tuple[str, ...]
    labels: Labels

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.labels)

    def _path(self, index: int) -> str:
        return self.paths[int(self.index.shard_of[index])]

    def key(self, index: int) -> str:
        """Return the name of the shard, with as many folders as tell it from the others, and the path in it."""
        shard = os.path.relpath(os.path.abspath(self._path(index)), self._home)
        return os.path.join(os.fsencode(shard), self.index.names[index]).decode("utf-8", "backslashreplace")

    @cached_property
    def _home(self) -> str:
        return os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in self.paths])

    def name(self, index: int) -> str:
        """Return the path of the shard and the path in it."""
        return shown(os.path.join(os.fsencode(self._path(index)), self.index.names[index]))

    def read(self, index: int) -> bytes:
        """Return the content of a picture's file."""
        size = int(self.index.sizes[index])
        try:
            with open_regular(self._path(index)) as file:
                content = read_at(file.fileno(), size, int(self.index.starts[index]))
        except OSError as fault:
            raise DataError(f"{self.name(index)} cannot be read: {reason_of(fault)}") from None
        if len(content) < size:
            raise DataError(f"{self.name(index)} cannot be read: the shard has become shorter since it was indexed")
        return content

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the place and the size of a picture in one number, and the time of the shard's last change."""
        start, size = int(self.index.starts[index]), int(self.index.sizes[index])
        changed = stamp_file(self._path(index), self.name(index))[1]
        return ((start // 512) << 31 | size & (2**31 - 1)) & (2**63 - 1), changed


def read_at(file: int, size: int, start: int) -> bytes:
    """Read from a place of a file; the system may give less at once than asked for."""
    content = os.pread(file, size, start)
    while len(content) < size and (more := os.pread(file, size - len(content), start + len(content))):
        content += more
    return content


def open_shards(paths: Sequence[str], *, unlabelled: bool = False, on_progress: Progress | None = None) -> Shards:
    """Open tar shards as one source. With `unlabelled`, a picture may be without a label and then has label -1.

    A file classes.txt beside the first shard names classes that are whole numbers, one on each line.
    """
    index = index_shards(paths, on_progress=on_progress)
    shown_paths = shown(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    if not len(index.codes):
        raise DataError(
            f"{shown_paths} has no pictures; give their names one dot and one of the suffixes "
            f"{', '.join(sorted(SUFFIXES))}"
        )
    names = _read_classes(paths[0])
    if names is None and not unlabelled:
        counts = np.bincount(index.codes[index.codes >= 0], minlength=len(index.found)).tolist()
        images = dict(zip(index.found, counts, strict=True))
        check_classes(images, shown_paths, f"list the classes in {CLASSES_FILE} beside the shards")
    classes, lookup = order_classes(index.found, names, place=shown_paths)
    source = Shards(tuple(paths), index, classes, lookup[index.codes])
    if not unlabelled and (source.labels < 0).any():
        which = source.name(int(np.argmax(source.labels < 0)))
        raise DataError(
            f"{which} has no label; add a file of the same name with suffix .cls, .json or .txt to the shard"
        )
    return source


def _read_classes(shard: str) -> list[str] | None:
    path = os.path.join(os.path.dirname(shard), CLASSES_FILE)
    try:
        return [line.strip() for line in read_text(path).removeprefix("\ufeff").rstrip().splitlines()]
    except FileNotFoundError:
        return None
    except ContentError as fault:
        raise DataError(f"{shown(path)} {fault}; save it as UTF-8") from None
    except OSError as fault:
        raise DataError(f"{shown(path)} cannot be read: {reason_of(fault)}") from None


def is_pattern(place: str) -> bool:
    """Tell whether a name stands for several files."""
    return glob.has_magic(place) or RANGE.search(place) is not None


def expand_pattern(pattern: str) -> list[str]:
    """Return the files that a pattern such as "train-{000..127}.tar" or "train-*.parquet" stands for, in order."""
    pieces = RANGE.split(pattern)  # text, first, last, text, first, last, text
    ranges = [_numbers(first, last) for first, last in zip(pieces[1::3], pieces[2::3], strict=True)]
    paths: list[str] = []
    for numbers in product(*ranges):
        filled = "".join(text + number for text, number in zip(pieces[::3], [*numbers, ""], strict=True))
        found = sorted(glob.glob(filled)) if glob.has_magic(filled) else [filled] if os.path.exists(filled) else []
        if not found:
            what = (
                f"{shown(filled)}, which {shown(pattern)} asks for"
                if ranges
                else f"file that {shown(pattern)} stands for"
            )
            raise DataError(f"there is no {what}; correct the pattern")
        paths += found
    kind = ".parquet" if paths[0].lower().endswith(".parquet") else ".tar"
    wrong = next((path for path in paths if not path.lower().endswith(kind)), None)
    if wrong is not None:
        kinds = "tar shards, or for Parquet files, only"
        raise DataError(f"{shown(pattern)} stands for {shown(wrong)} among others; a pattern is for {kinds}")
    return paths


def _numbers(first: str, last: str) -> list[str]:
    if not 0 <= int(last) - int(first) < 1_000_000:
        raise DataError(
            f"the pattern {{{first}..{last}}} does not count upwards to a million at most; correct the pattern"
        )
    width = len(first) if first.startswith("0") else 0
    return [str(number).zfill(width) for number in range(int(first), int(last) + 1)]


def index_shards(paths: Sequence[str], *, on_progress: Progress | None = None) -> Index:
    """Find the pictures in shards, or take the index from the disk where no shard has changed since."""
    stamps = np.array([stamp_file(path, shown(path)) for path in paths], np.int64)
    place = index_file("shards", paths)
    arrays = load_index(place, _INDEX)
    if arrays is not None and np.array_equal(arrays["stamps"], stamps):
        names = Names(arrays["names"], arrays["name_ends"])
        found = json.loads(arrays["found"].tobytes())
        if on_progress is not None:
            on_progress(len(names))
        return Index(stamps, arrays["shard_of"], arrays["starts"], arrays["sizes"], names, arrays["codes"], found)
    began = now_ns()
    index = _index(paths, stamps, on_progress)
    if settled(stamps[:, 1], began):
        found_json = np.frombuffer(json.dumps(index.found).encode(), np.uint8)
        names = index.names
        values = (stamps, index.shard_of, index.starts, index.sizes, names.buffer, names.ends, index.codes, found_json)
        save_index(place, dict(zip(_INDEX, values, strict=True)))
    return index


def _index(paths: Iterable[str], stamps: NDArray[np.int64], on_progress: Progress | None) -> Index:
    names = NamesBuilder()
    places: list[NDArray[np.int64]] = []
    code_of: dict[str, int] = {}
    counts: list[int] = []
    for path in paths:
        pictures, codes = [], []
        for picture, label in _pictures(path):
            pictures.append(picture)
            codes.append(-1 if label is None else code_of.setdefault(label, len(code_of)))
        names.extend([picture.name for picture in pictures])
        numbers = [[p.start for p in pictures], [p.size for p in pictures], codes]
        places.append(np.array(numbers, np.int64).reshape(3, -1))
        counts.append(len(pictures))
        if on_progress is not None:
            on_progress(sum(counts))
    starts, sizes, codes_of_all = np.concatenate(places, axis=1)
    shard_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return Index(stamps, shard_of, starts, sizes, Names(*names.arrays()), codes_of_all, list(code_of))


class _Group:
    """The files of one key."""

    __slots__ = ("labels", "picture")

    def __init__(self) -> None:
        self.picture: Member | None = None
        self.labels: dict[bytes, Member] = {}


def _pictures(path: str) -> Iterator[tuple[Member, str | None]]:
    """Go through the pictures of a shard, in their order, each with the text of its label."""
    try:
        with open_regular(path) as file:
            for group in _groups(path, file.fileno()).values():
                if group.picture is not None:
                    yield group.picture, _label(path, file.fileno(), group)
    except OSError as fault:
        raise DataError(f"{shown(path)} cannot be read: {reason_of(fault)}") from None


def _groups(path: str, file: int) -> dict[bytes, _Group]:
    groups: dict[bytes, _Group] = {}
    for member in members(path, file):
        folder, slash, base = member.name.rpartition(b"/")
        stem, _, ending = base.partition(b".")
        suffix = ending.lower()
        if not stem or b"__MACOSX" in folder or not (suffix in _PICTURES or suffix in LABEL_SUFFIXES):
            continue
        if not member.is_file:
            raise DataError(f"{_inside(path, member)} is a link or a sparse file; write whole files to the shard")
        group = groups.setdefault(folder + slash + stem, _Group())
        if suffix in _PICTURES:
            if group.picture is not None:
                raise DataError(
                    f"{_inside(path, member)} is the second picture of its key, after {shown(group.picture.name)}; "
                    "give every picture a key of its own"
                )
            group.picture = member
        elif suffix in group.labels:
            raise DataError(f"{_inside(path, member)} is there twice; give every picture a key of its own")
        else:
            group.labels[suffix] = member
    return groups


def _inside(path: str, member: Member) -> str:
    return shown(os.path.join(os.fsencode(path), member.name))


def _label(path: str, file: int, group: _Group) -> str | None:
    """Return the text of a label, or None where the key has none."""
    for suffix in LABEL_SUFFIXES:
        member = group.labels.get(suffix)
        if member is None:
            continue
        content = read_at(file, member.size, member.start)
        if suffix == b"cls" and _WHOLE_NUMBER.fullmatch(content):
            return str(int(content))
        where = _inside(path, member)
        try:
            text = content.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise DataError(f"{where} is not UTF-8; write the label as UTF-8") from None
        if suffix == b"cls":
            what = "a .cls file holds a whole number, a .txt file the name of a class"
            raise DataError(f"{where} holds {text[:40]!r}; {what}")
        label = _label_in_json(text, where) if suffix == b"json" else label_text(text, where)
        if label is not None:
            return label
    return None


def _label_in_json(text: str, where: str) -> str | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{where} is not JSON; correct it") from None
    if isinstance(fields, dict):
        for key in ("label", "cls", "class"):
            if key in fields:
                return label_text(fields[key], where)
    return None
