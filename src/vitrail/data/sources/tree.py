"""List the images below a folder, the other files, and what cannot be listed."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from vitrail.data.sources.source import SUFFIXES, reason_of
from vitrail.errors import DataError
from vitrail.text import printable_path

PROGRESS_EVERY = 10_000
_SUFFIXES = frozenset(suffix.encode() for suffix in SUFFIXES)
_INDEX = ("folder_names", "folder_ends", "stamps", "folder_of", "file_names", "file_ends")
_INDEX_OF_OTHERS = ("other_of", "other_names", "other_ends")


@dataclass(frozen=True, eq=False)
class Listing:
    """The images below a folder, each as the index of its folder and its file name."""

    folders: Names
    """Relative to the root, which is first, with an empty name; parents precede their sub-folders."""
    stamps: NDArray[np.int64]
    """Modification time and inode of every folder."""
    folder_of: NDArray[np.int32]
    files: Names
    other_of: NDArray[np.int32]
    others: Names
    """Skipped entries: without an image suffix, or not regular files."""
    faults: tuple[str, ...] = ()
    """What could not be listed, and why."""

    def path(self, number: int) -> bytes:
        """Return the path of an image relative to the root."""
        return _joined(self.folders[self.folder_of.item(number)], self.files[number])

    def other_path(self, number: int) -> bytes:
        """Return the path of a skipped file relative to the root."""
        return _joined(self.folders[self.other_of.item(number)], self.others[number])


def _joined(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name


def list_images(root: str, *, on_progress: Progress | None = None) -> Listing:
    """List all images below a folder, or load the listing from the index if no folder has changed.

    A file that changes without its folder changing (such as a link's target) is noticed when it is read.
    """
    path = index_file("folder", [root])
    arrays = load_index(path, (*_INDEX, *_INDEX_OF_OTHERS))
    if arrays is not None and (listing := _unchanged(root, arrays)) is not None:
        if on_progress is not None:
            on_progress(len(listing.files))
        return listing
    began = now_ns()
    listing = _walk(root, on_progress)
    if settled(listing.stamps[:, 0], began) and not listing.faults:
        folders, files, others = listing.folders, listing.files, listing.others
        values = (folders.buffer, folders.ends, listing.stamps, listing.folder_of, files.buffer, files.ends)
        of_others = (listing.other_of, others.buffer, others.ends)
        save_index(path, dict(zip((*_INDEX, *_INDEX_OF_OTHERS), (*values, *of_others), strict=True)))
    return listing


def _unchanged(root: str, arrays: dict[str, NDArray[Any]]) -> Listing | None:
    """Return the listing of an index if no folder has changed."""
    folders = Names(arrays["folder_names"], arrays["folder_ends"])
    for number, stamp in enumerate(arrays["stamps"].tolist()):
        try:
            status = os.stat(os.path.join(os.fsencode(root), folders[number]))
        except OSError:
            return None
        if list(_stamp(status)) != stamp:
            return None
    files, others = (Names(arrays[f"{kind}_names"], arrays[f"{kind}_ends"]) for kind in ("file", "other"))
    return Listing(folders, arrays["stamps"], arrays["folder_of"], files, arrays["other_of"], others)


def _stamp(status: os.stat_result) -> tuple[int, int]:
    # Some file systems have inodes up to 2**64, beyond the range of int64.
    return status.st_mtime_ns, status.st_ino % 2**63


class _Open(NamedTuple):
    """A folder still to be listed."""

    path: bytes
    """Relative to the root."""
    around: frozenset[tuple[int, int]]
    """Its parent folders, by device and inode: meeting one of them again is a loop."""


class _Tree:
    """The result of a walk so far."""

    def __init__(self) -> None:
        self.folders: list[bytes] = []
        self.stamps: list[tuple[int, int]] = []
        self.files, self.others = NamesBuilder(), NamesBuilder()
        self.counts: list[tuple[int, int]] = []
        """Number of images and other files of every folder."""
        self.faults: list[str] = []

    def add(self, path: bytes, status: os.stat_result, entries: "_Entries") -> None:
        self.folders.append(path)
        self.stamps.append(_stamp(status))
        self.counts.append((len(entries.images), len(entries.others)))
        self.files.extend(sorted(entries.images))
        self.others.extend(sorted(entries.others))
        self.faults += sorted(entries.faults)

    def listing(self) -> Listing:
        counts = np.array(self.counts, np.int64).reshape(-1, 2)
        numbers = np.arange(len(counts), dtype=np.int32)
        of_files, of_others = (np.repeat(numbers, counts[:, kind]) for kind in (0, 1))
        names, stamps = Names.of(self.folders), np.array(self.stamps, np.int64).reshape(-1, 2)
        files, others = Names(*self.files.arrays()), Names(*self.others.arrays())
        return Listing(names, stamps, of_files, files, of_others, others, tuple(self.faults))


def _walk(root: str, on_progress: Progress | None) -> Listing:
    """List the images of a tree, depth first, sorted by name."""
    tree = _Tree()
    total = 0
    waiting = [_Open(b"", frozenset())]
    while waiting:
        folder = waiting.pop()
        path = os.path.join(os.fsencode(root), folder.path) if folder.path else os.fsencode(root)
        try:
            status = os.stat(path)
            identity = (status.st_dev, status.st_ino)
            if identity in folder.around:
                tree.faults.append(f"{printable_path(path)} is a link to a folder that contains it; remove the link")
                continue
            entries = _scan(path, total, on_progress)
        except OSError as fault:
            wrong = f"{printable_path(path)} cannot be read: {reason_of(fault)}"
            if not folder.path:
                raise DataError(wrong) from None
            tree.faults.append(wrong)
            continue
        tree.add(folder.path, status, entries)
        total += len(entries.images)
        around = folder.around | {identity}
        waiting += [_Open(os.path.join(folder.path, name), around) for name in sorted(entries.folders, reverse=True)]
    if on_progress is not None:
        on_progress(total)
    return tree.listing()


class _Entries(NamedTuple):
    """The entries of one folder."""

    images: list[bytes]
    folders: list[bytes]
    others: list[bytes]
    faults: list[str]


def _scan(path: bytes, total: int, on_progress: Progress | None) -> _Entries:
    """Scan one folder."""
    scanned = _Entries([], [], [], [])
    with os.scandir(path) as entries:
        for entry in _visible(entries):
            name = entry.name
            if entry.is_symlink() and (wrong := _wrong_link(entry)) is not None:
                scanned.faults.append(wrong)
            elif entry.is_dir():
                scanned.folders.append(name)
            elif name[name.rfind(b".") + 1 :].lower() in _SUFFIXES and b"." in name and entry.is_file():
                scanned.images.append(name)
                if on_progress is not None and not (total + len(scanned.images)) % PROGRESS_EVERY:
                    on_progress(total + len(scanned.images))
            else:
                scanned.others.append(name)
    return scanned


def _visible(entries: Iterator[os.DirEntry[bytes]]) -> Iterator[os.DirEntry[bytes]]:
    return (entry for entry in entries if not entry.name.startswith(b".") and entry.name != b"__MACOSX")


def _wrong_link(entry: os.DirEntry[bytes]) -> str | None:
    """Return what is wrong with a link, if anything."""
    try:
        entry.stat()  # cached by the entry: is_dir and is_file need no further call
    except OSError as fault:
        if fault.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return f"{printable_path(entry.path)} cannot be read: {reason_of(fault)}"
        target = printable_path(os.readlink(entry.path))
        what = "a circular link" if fault.errno == errno.ELOOP else f"a link to {target}, which does not exist"
        return f"{printable_path(entry.path)} is {what}; correct or remove the link"
    return None
