"""Tar shards in WebDataset layout: files with one key are an image and its label. Indexed once for random access."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitrail.data.remote.block_cache import block_cache
from vitrail.data.remote.filesystems import MissingFileError, Status, is_remote, path_in, public_url
from vitrail.data.remote.stored_files import RemoteFile, StoredFile, open_stored, read_at
from vitrail.data.sources.cells import Reading, cell_of, check_cell
from vitrail.data.sources.index_files import (
    Names,
    NamesBuilder,
    Progress,
    index_file,
    load_index,
    now_ns,
    save_index,
    settled,
)
from vitrail.data.sources.kinds import decide
from vitrail.data.sources.labelled import CellColumn, Labelled, targets_in
from vitrail.data.sources.labels import label_text, order_classes
from vitrail.data.sources.source import (
    SUFFIXES,
    Labels,
    SkippedFile,
    names_in_common_folder,
    reason_of,
    stamp_file,
)
from vitrail.data.sources.tar import Member, members
from vitrail.data.sources.targets import AUTOMATIC, Labelling, Targets, check_no_columns
from vitrail.errors import DataError, StorageError
from vitrail.io import ContentError, read_text
from vitrail.text import printable_path

T = TypeVar("T")
CLASSES_FILE = "classes.txt"
REQUESTS = 8
"""Number of remote shards that are indexed at a time."""
LABEL_SUFFIXES = (b"cls", b"json", b"txt")
"""Suffixes of label files; the first one that a key has is used."""
_IMAGES = frozenset(suffix.encode() for suffix in SUFFIXES)
_INDEX = (
    "stamps", "shard_of", "starts", "sizes", "names", "name_ends", "codes", "label_names", "others", "other_ends",
    "other_places",
)  # fmt: skip
_WHOLE_NUMBER = re.compile(rb"\s*[+-]?[0-9]{1,18}\s*")


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The offsets and labels of the images in shards."""

    stamps: NDArray[np.int64]
    """Size and change time of every shard; of a remote one, size and version."""
    shard_of: NDArray[np.int32]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    names: Names
    codes: NDArray[np.int64]
    """For every image, the index of its label in `label_names`, or -1."""
    label_names: list[str]
    others: Names
    """Unused files."""
    other_places: NDArray[np.int64]
    """(3, files): shard, offset and size of each; size 0 if its content should not be sniffed."""


@dataclass(frozen=True, eq=False)
class Shards:
    """Images in tar files. No file stays open: opening one is cheap compared to decoding an image."""

    paths: tuple[str, ...]
    index: ShardIndex
    classes: tuple[str, ...]
    labels: Labels
    targets: Targets | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def _path(self, index: int) -> str:
        return self.paths[int(self.index.shard_of[index])]

    def key(self, index: int) -> str:
        """Return the path of the shard relative to the shards' common folder, and the path inside."""
        shard = self._shard_names[int(self.index.shard_of[index])]
        return os.path.join(os.fsencode(shard), self.index.names[index]).decode("utf-8", "backslashreplace")

    @cached_property
    def _shard_names(self) -> list[str]:
        return names_in_common_folder(self.paths)

    def name(self, index: int) -> str:
        """Return the path of the shard and the path inside."""
        return _inside(self._path(index), self.index.names[index])

    def skipped(self) -> Iterator[SkippedFile]:
        """Yield the files that are neither images nor labels."""
        for number, (shard, start, size) in enumerate(self.index.other_places.T.tolist()):
            path = self.paths[shard]
            yield SkippedFile(_inside(path, self.index.others[number]), os.fsencode(path), start, size)

    def read(self, index: int) -> bytes:
        """Return the content of an image's file."""
        size = int(self.index.sizes[index])
        try:
            with self._open(int(self.index.shard_of[index])) as file:
                content = read_at(file, size, int(self.index.starts[index]))
        except OSError as fault:
            raise DataError(f"{self.name(index)} cannot be read: {reason_of(fault)}") from None
        if len(content) < size:
            raise DataError(f"{self.name(index)} cannot be read: the shard was truncated after it was indexed")
        return content

    def _open(self, shard: int) -> StoredFile:
        path = self.paths[shard]
        if not is_remote(path):
            return open_stored(path)
        return RemoteFile(path, Status(*map(int, self.index.stamps[shard])), cached=self._fit_the_cache)

    @cached_property
    def _fit_the_cache(self) -> bool:
        """Whether all shards fit the cache of remote files.

        If not, blocks would be removed before they are read again: single images are downloaded instead.
        """
        return int(self.index.stamps[:, 0].sum()) <= block_cache().limit

    def stamp(self, index: int) -> tuple[int, int]:
        """Return offset and size of an image in one integer, and the change time of the shard."""
        start, size = int(self.index.starts[index]), int(self.index.sizes[index])
        path = self._path(index)
        remote = is_remote(path)  # read from the version that was indexed, or not at all
        changed = (
            int(self.index.stamps[self.index.shard_of[index], 1]) if remote else stamp_file(path, self.name(index))[1]
        )
        return ((start // 512) << 31 | size & (2**31 - 1)) & (2**63 - 1), changed


def open_shards(
    paths: Sequence[str],
    *,
    labelling: Labelling = AUTOMATIC,
    unlabelled: bool = False,
    on_progress: Progress | None = None,
) -> Shards:
    """Open tar shards as one source. With `unlabelled`, an image without a label has label -1.

    A file classes.txt next to the first shard names integer classes, one per line.
    """
    index = index_shards(paths, on_progress=on_progress)
    shown_paths = printable_path(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    if not len(index.codes):
        files = "1 other file" if len(index.others) == 1 else f"{len(index.others):,} other files"
        instead = f" ({files}, such as {printable_path(index.others[0])})" if len(index.others) else ""
        raise DataError(
            f"{shown_paths} has no images{instead}; name them with one dot and one of the suffixes "
            f"{', '.join(sorted(SUFFIXES))}"
        )
    labelled = _labelled(index, _read_classes(paths[0]), labelling, shown_paths, many=not unlabelled)
    source = Shards(tuple(paths), index, labelled.classes, labelled.labels, labelled.targets)
    if not unlabelled and (source.labels < 0).any():
        which = source.name(int(np.argmax(source.labels < 0)))
        raise DataError(
            f"{which} has no label; add a file of the same name with suffix .cls, .json or .txt to the shard"
        )
    return source


def _labelled(
    index: ShardIndex, names: Sequence[str] | None, labelling: Labelling, place: str, *, many: bool
) -> Labelled:
    """Return the classes or targets of the images in shards."""
    check_no_columns(labelling, place)
    reading, cells = Reading(), []
    if labelling.kind != "classes":
        cells = [cell_of(text, place) for text in index.label_names]
        counts = np.bincount(index.codes[index.codes >= 0], minlength=len(cells)).tolist()
        images = {cell: count for cell, count in zip(cells, counts, strict=True) if count}
        reading = decide(images, labelling, place, named=names is not None, many=many)
    if reading.kind == "classes":
        classes, lookup = order_classes(index.label_names, names, place=place)
        return Labelled(classes, lookup[index.codes])
    for cell in cells:
        check_cell(cell, reading, place, None)
    return targets_in([CellColumn("label", cells, index.codes)], reading, names, place=place)


def _read_classes(shard: str) -> list[str] | None:
    path = os.path.join(os.path.dirname(path_in(shard)), CLASSES_FILE)
    try:
        text = _read_remote_text(path) if is_remote(path) else read_text(path)
        return [line.strip() for line in text.removeprefix("\ufeff").rstrip().splitlines()]
    except (FileNotFoundError, MissingFileError):
        return None
    except StorageError as fault:
        if "denied" in str(fault):  # what S3 says of a missing file to those who may not list the bucket
            return None
        raise
    except UnicodeDecodeError:
        raise DataError(f"{printable_path(path)} is not UTF-8; save it as UTF-8") from None
    except ContentError as fault:
        raise DataError(f"{printable_path(path)} {fault}; save it as UTF-8") from None
    except OSError as fault:
        raise DataError(f"{printable_path(path)} cannot be read: {reason_of(fault)}") from None


def _read_remote_text(url: str) -> str:
    with RemoteFile(url) as file:
        return file.read_at(file.status.size, 0).decode("utf-8")


def index_shards(paths: Sequence[str], *, on_progress: Progress | None = None) -> ShardIndex:
    """Index the images in shards, or load the index from disk if no shard has changed."""
    stamps = np.array(list(_mapped(lambda path: stamp_file(path, printable_path(path)), paths)), np.int64)
    remote = is_remote(paths[0])
    kept = not remote or bool(stamps[:, 1].all())  # else a server does not tell versions apart
    place = index_file("shards", paths)
    arrays = load_index(place, _INDEX) if kept else None
    if arrays is not None and np.array_equal(arrays["stamps"], stamps):
        names = Names(arrays["names"], arrays["name_ends"])
        labels = json.loads(arrays["label_names"].tobytes())
        if on_progress is not None:
            on_progress(len(names))
        others = Names(arrays["others"], arrays["other_ends"])
        places = (arrays["shard_of"], arrays["starts"], arrays["sizes"])
        return ShardIndex(stamps, *places, names, arrays["codes"], labels, others, arrays["other_places"])
    began = now_ns()
    index = _index(paths, stamps, on_progress)
    if kept and (remote or settled(stamps[:, 1], began)):
        labels_json = np.frombuffer(json.dumps(index.label_names).encode(), np.uint8)
        names, others = index.names, index.others
        values = (
            stamps, index.shard_of, index.starts, index.sizes, names.buffer, names.ends, index.codes, labels_json,
            others.buffer, others.ends, index.other_places,
        )  # fmt: skip
        save_index(place, dict(zip(_INDEX, values, strict=True)))
    return index


def _mapped(function: Callable[[str], T], paths: Sequence[str]) -> Iterator[T]:
    """Apply a function to every shard, in order; to remote ones in parallel."""
    if not is_remote(paths[0]):
        yield from map(function, paths)
        return
    with ThreadPoolExecutor(REQUESTS) as pool:
        try:
            yield from pool.map(function, paths)
        except BaseException:  # also Ctrl-C: leaving the block would wait for every shard still to be read
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _index(paths: Sequence[str], stamps: NDArray[np.int64], on_progress: Progress | None) -> ShardIndex:
    names, others = NamesBuilder(), NamesBuilder()
    other_places: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64]] = []
    code_of: dict[str, int] = {}
    counts: list[int] = []
    for shard, contents in enumerate(_mapped(_contents, paths)):
        images, codes = [], []
        others.extend([member.name for member in contents.others])
        other_numbers = [(shard, member.start, member.size) for member in contents.others]
        other_places.append(np.array(other_numbers, np.int64).reshape(-1, 3).T)
        for image, label in contents.images:
            images.append(image)
            codes.append(-1 if label is None else code_of.setdefault(label, len(code_of)))
        names.extend([image.name for image in images])
        numbers = [[p.start for p in images], [p.size for p in images], codes]
        places.append(np.array(numbers, np.int64).reshape(3, -1))
        counts.append(len(images))
        if on_progress is not None:
            on_progress(sum(counts))
    starts, sizes, codes_of_all = np.concatenate(places, axis=1)
    shard_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return ShardIndex(
        stamps, shard_of, starts, sizes, Names(*names.arrays()), codes_of_all, list(code_of),
        Names(*others.arrays()), np.concatenate(other_places, axis=1),
    )  # fmt: skip


class _Group:
    """The files with one key."""

    __slots__ = ("image", "labels")

    def __init__(self) -> None:
        self.image: Member | None = None
        self.labels: dict[bytes, Member] = {}


class _Contents(NamedTuple):
    """The contents of a shard."""

    images: list[tuple[Member, str | None]]
    """In order, each with the text of its label."""
    others: list[Member]
    """Unused files. A file that shares its key with an image gets size 0: it is not sniffed as a misnamed image."""


def _contents(path: str) -> _Contents:
    try:
        with open_stored(path, sequential=True) as file:
            groups, others = _groups(path, file)
            images = [(group.image, _label(path, file, group)) for group in groups.values() if group.image is not None]
            alone = [member for group in groups.values() if group.image is None for member in group.labels.values()]
            return _Contents(images, sorted([*others, *alone], key=lambda member: member.start))
    except OSError as fault:
        raise DataError(f"{printable_path(path)} cannot be read: {reason_of(fault)}") from None


def _groups(path: str, file: StoredFile) -> tuple[dict[bytes, _Group], list[Member]]:
    """Return the files by key, and those that are neither images nor labels."""
    groups: dict[bytes, _Group] = {}
    others: list[tuple[bytes, Member]] = []
    for member in members(path, file):
        folder, slash, base = member.name.rpartition(b"/")
        stem, _, ending = base.partition(b".")
        suffix = ending.lower()
        if not stem or b"__MACOSX" in folder:
            continue
        if not (suffix in _IMAGES or suffix in LABEL_SUFFIXES):
            others.append((folder + slash + stem, member if member.is_file else member._replace(size=0)))
            continue
        if not member.is_file:
            raise DataError(f"{_inside(path, member.name)} is a link or a sparse file; write whole files to the shard")
        group = groups.setdefault(folder + slash + stem, _Group())
        if suffix in _IMAGES:
            if group.image is not None:
                raise DataError(
                    f"{_inside(path, member.name)} is the second image of its key, after "
                    f"{printable_path(group.image.name)}; "
                    "give every image a unique key"
                )
            group.image = member
        elif suffix in group.labels:
            raise DataError(f"{_inside(path, member.name)} occurs twice; give every image a unique key")
        else:
            group.labels[suffix] = member
    used = {key for key, group in groups.items() if group.image is not None}
    return groups, [member._replace(size=0) if key in used else member for key, member in others]


def _inside(path: str, name: bytes) -> str:
    """Return the readable name of a file in a shard."""
    return printable_path(os.path.join(os.fsencode(public_url(path)), name))


def _label(path: str, file: StoredFile, group: _Group) -> str | None:
    """Return the text of a label, or None if the key has none."""
    for suffix in LABEL_SUFFIXES:
        member = group.labels.get(suffix)
        if member is None:
            continue
        content = read_at(file, member.size, member.start)
        if suffix == b"cls" and _WHOLE_NUMBER.fullmatch(content):
            return str(int(content))
        where = _inside(path, member.name)
        try:
            text = content.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise DataError(f"{where} is not UTF-8; write the label as UTF-8") from None
        if suffix == b"cls":
            what = "a .cls file contains an integer, a .txt file a class name"
            raise DataError(f"{where} contains {text[:40]!r}; {what}")
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
                value = fields[key]
                return json.dumps(value) if isinstance(value, list) else label_text(value, where)
    return None
