"""A folder of pictures with a sub-folder for each class."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from vitrail.data.sources.source import SUFFIXES, Labels, read_file, reason_of, stamp_file
from vitrail.errors import DataError

PROGRESS_EVERY = 10_000
_SUFFIXES = frozenset(suffix.encode() for suffix in SUFFIXES)
_INDEX = ("folder_names", "folder_ends", "stamps", "folder_of", "file_names", "file_ends", "ignored")


@dataclass(frozen=True, eq=False)
class Listing:
    """The pictures in a folder and all that lie inside it, each as the number of its folder and its file's name."""

    folders: Names
    """Relative to the root, which is the first, with an empty name; each comes after the one that it lies in."""
    stamps: NDArray[np.int64]
    """Of every folder, the time of its last change and its number in the file system."""
    folder_of: NDArray[np.int32]
    files: Names
    ignored: int
    """How many files were passed over because they are no pictures."""


@dataclass(frozen=True, eq=False)
class Folder:
    """Pictures in folders. The class of a picture is the sub-folder of the root that it lies in, at any depth."""

    root: str
    listing: Listing
    classes: tuple[str, ...]
    labels: Labels
    indices: NDArray[np.int64] | None = None
    """Which pictures of the listing these are, where not all."""
    ignored: int = 0
    """How many files in the folder are not among these pictures, hidden ones not counted."""

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.labels)

    def _path(self, index: int) -> bytes:
        """Return the path of a file relative to the root."""
        place = index if self.indices is None else self.indices.item(index)
        folder = self.listing.folders[self.listing.folder_of.item(place)]
        return folder + b"/" + self.listing.files[place] if folder else self.listing.files[place]

    def key(self, index: int) -> str:
        """Return the path of a file relative to the root."""
        return self._path(index).decode("utf-8", "backslashreplace")

    def name(self, index: int) -> str:
        """Return the path of a file."""
        return shown(os.path.join(os.fsencode(self.root), self._path(index)))

    def read(self, index: int) -> bytes:
        """Return the content of a file."""
        return read_file(os.path.join(os.fsencode(self.root), self._path(index)), self.name(index))

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the size of a file and the time of its last change."""
        return stamp_file(os.path.join(os.fsencode(self.root), self._path(index)), self.name(index))


def open_folder(
    root: str | os.PathLike[str], *, unlabelled: bool = False, on_progress: Progress | None = None
) -> Folder:
    """Open a folder with a sub-folder for each class.

    With `unlabelled`, pictures that lie in no class folder are taken too, with label -1, and a folder without pictures
    is no class; else such pictures are passed over, and such a folder is refused.
    """
    root = os.fspath(root)
    listing = list_pictures(root, on_progress=on_progress)
    class_folders, number_of_folder = _class_folders(listing)
    labels = number_of_folder[listing.folder_of]
    counts = np.bincount(labels[labels >= 0], minlength=len(class_folders))
    if not unlabelled:
        _check_classes(root, class_folders, counts, loose=int((labels < 0).sum()))
    elif not len(labels):
        raise DataError(f"{shown(root)} has no pictures; give a folder with some")
    filled = counts > 0
    classes = tuple(
        _class_name(root, folder) for folder, some in zip(class_folders, filled, strict=True) if some or not unlabelled
    )
    if unlabelled:
        renumbered = np.append(np.where(filled, np.cumsum(filled) - 1, -1), -1)
        return Folder(root, listing, classes, renumbered[labels], ignored=listing.ignored)
    if (labels >= 0).all():
        return Folder(root, listing, classes, labels, ignored=listing.ignored)
    indices = np.flatnonzero(labels >= 0)
    ignored = listing.ignored + len(labels) - len(indices)
    return Folder(root, listing, classes, labels[indices], indices, ignored)


def _class_folders(listing: Listing) -> tuple[list[bytes], Labels]:
    """Return the names of the folders at the top, and for every folder the number of the one it lies in, or -1."""
    names: list[bytes] = []
    numbers = np.full(len(listing.folders), -1, np.int64)
    for folder in range(1, len(numbers)):
        top = listing.folders[folder].split(b"/", 1)[0]
        if not names or names[-1] != top:  # folders are listed depth first, so those of a class follow each other
            names.append(top)
        numbers[folder] = len(names) - 1
    return names, numbers


def _check_classes(root: str, class_folders: list[bytes], counts: NDArray[np.int64], *, loose: int) -> None:
    if not class_folders and loose:
        raise DataError(
            f"{shown(root)} has {loose} pictures but no class folders; "
            "put the pictures of each class in a folder of its own, or give a manifest with their labels"
        )
    if not counts.any():
        raise DataError(f"{shown(root)} has no pictures; give a folder with a sub-folder of pictures for each class")
    for folder, count in zip(class_folders, counts, strict=True):
        if not count:
            path = shown(os.path.join(os.fsencode(root), folder))
            raise DataError(f"the class folder {path} has no pictures; add some, or remove the folder")


def _class_name(root: str, folder: bytes) -> str:
    try:
        return folder.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"the name of the class folder {folder!r} in {shown(root)} is not UTF-8; rename it") from None


def list_pictures(root: str, *, on_progress: Progress | None = None) -> Listing:
    """List all pictures below a folder, or take the list from the index where no folder has changed since.

    Files that change without their folder changing (a link's target, say) are noticed when they are read.
    """
    path = index_file("folder", [root])
    arrays = load_index(path, _INDEX)
    if arrays is not None and (listing := _unchanged(root, arrays)) is not None:
        if on_progress is not None:
            on_progress(len(listing.files))
        return listing
    began = now_ns()
    listing = _walk(root, on_progress)
    if settled(listing.stamps[:, 0], began):
        folders, files = listing.folders, listing.files
        ignored = np.array(listing.ignored)
        values = (folders.buffer, folders.ends, listing.stamps, listing.folder_of, files.buffer, files.ends, ignored)
        save_index(path, dict(zip(_INDEX, values, strict=True)))
    return listing


def _unchanged(root: str, arrays: dict[str, NDArray[Any]]) -> Listing | None:
    """Return the listing of an index if every folder is as it was."""
    folders = Names(arrays["folder_names"], arrays["folder_ends"])
    for number, stamp in enumerate(arrays["stamps"].tolist()):
        try:
            status = os.stat(os.path.join(os.fsencode(root), folders[number]))
        except OSError:
            return None
        if list(_stamp(status)) != stamp:
            return None
    files = Names(arrays["file_names"], arrays["file_ends"])
    return Listing(folders, arrays["stamps"], arrays["folder_of"], files, int(arrays["ignored"]))


def _stamp(status: os.stat_result) -> tuple[int, int]:
    # Some file systems count inodes up to 2**64, of which an array of signed numbers holds half.
    return status.st_mtime_ns, status.st_ino % 2**63


class _Open(NamedTuple):
    """A folder that is still to be listed."""

    path: bytes
    """Relative to the root."""
    around: frozenset[tuple[int, int]]
    """The folders it lies in, by device and inode: meeting one of them again inside is a loop."""


def _walk(root: str, on_progress: Progress | None) -> Listing:
    """List the pictures of a tree, depth first, in the order of the names."""
    folders: list[bytes] = []
    stamps: list[tuple[int, int]] = []
    counts: list[int] = []
    files = NamesBuilder()
    ignored = total = 0
    waiting = [_Open(b"", frozenset())]
    while waiting:
        folder = waiting.pop()
        path = os.path.join(os.fsencode(root), folder.path) if folder.path else os.fsencode(root)
        try:
            status = os.stat(path)
            pictures, inner, others = _scan(path, total, on_progress)
        except OSError as fault:
            raise DataError(f"{shown(path)} cannot be read: {reason_of(fault)}") from None
        identity = (status.st_dev, status.st_ino)
        if identity in folder.around:
            raise DataError(f"{shown(path)} is a link to a folder that it lies in; remove the link")
        folders.append(folder.path)
        stamps.append(_stamp(status))
        counts.append(len(pictures))
        files.extend(sorted(pictures))
        total, ignored = total + len(pictures), ignored + others
        around = folder.around | {identity}
        waiting += [_Open(os.path.join(folder.path, name), around) for name in sorted(inner, reverse=True)]
    if on_progress is not None:
        on_progress(total)
    folder_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return Listing(Names.of(folders), np.array(stamps, np.int64), folder_of, Names(*files.arrays()), ignored)


def _scan(path: bytes, total: int, on_progress: Progress | None) -> tuple[list[bytes], list[bytes], int]:
    """Return the pictures and the folders in one folder, and how many other files it has."""
    pictures: list[bytes] = []
    inner: list[bytes] = []
    others = 0
    with os.scandir(path) as entries:
        for entry in _visible(entries):
            name = entry.name
            if entry.is_symlink():
                _check_link(entry)
            if entry.is_dir():
                inner.append(name)
            elif name[name.rfind(b".") + 1 :].lower() in _SUFFIXES and b"." in name and entry.is_file():
                pictures.append(name)
                if on_progress is not None and not (total + len(pictures)) % PROGRESS_EVERY:
                    on_progress(total + len(pictures))
            else:
                others += 1
    return pictures, inner, others


def _visible(entries: Iterator[os.DirEntry[bytes]]) -> Iterator[os.DirEntry[bytes]]:
    return (entry for entry in entries if not entry.name.startswith(b".") and entry.name != b"__MACOSX")


def _check_link(entry: os.DirEntry[bytes]) -> None:
    try:
        entry.stat()  # remembered by the entry: telling file from folder asks no more
    except OSError as fault:
        if fault.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise DataError(f"{shown(entry.path)} cannot be read: {reason_of(fault)}") from None
        what = (
            "in a circle" if fault.errno == errno.ELOOP else f"to {shown(os.readlink(entry.path))}, which is not there"
        )
        raise DataError(f"{shown(entry.path)} is a link {what}; correct or remove the link") from None
