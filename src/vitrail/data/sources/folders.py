"""A folder of images with one sub-folder per class."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.index_files import Progress
from vitrail.data.sources.labels import Faults, report_faults
from vitrail.data.sources.source import Labels, SkippedFile, read_file, stamp_file
from vitrail.data.sources.tree import Listing, list_images
from vitrail.text import printable_path


@dataclass(frozen=True, eq=False)
class Folder:
    """Images in class folders. The class of an image is its top-level sub-folder; it may be at any depth below it."""

    root: str
    listing: Listing
    classes: tuple[str, ...]
    labels: Labels
    indices: NDArray[np.int64] | None = None
    """Indices into the listing; None: all."""
    loose: NDArray[np.int64] | None = None
    """Indices of the images outside of class folders, which are not part of this source."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def _path(self, index: int) -> bytes:
        """Return the path of a file relative to the root."""
        return self.listing.path(index if self.indices is None else self.indices.item(index))

    @property
    def ignored(self) -> int:
        """Number of files in the folder that are not used, without hidden ones."""
        return len(self.listing.others) + (0 if self.loose is None else len(self.loose))

    def skipped(self) -> Iterator[SkippedFile]:
        """Yield the files without an image suffix."""
        for number in range(len(self.listing.others)):
            path = os.path.join(os.fsencode(self.root), self.listing.other_path(number))
            yield SkippedFile(printable_path(path), path)

    def outside(self) -> Iterator[str]:
        """Yield the paths of the images outside of class folders, in readable form."""
        numbers = () if self.loose is None else self.loose.tolist()
        return (printable_path(os.path.join(os.fsencode(self.root), self.listing.path(number))) for number in numbers)

    def key(self, index: int) -> str:
        """Return the path of a file relative to the root."""
        return self._path(index).decode("utf-8", "backslashreplace")

    def name(self, index: int) -> str:
        """Return the path of a file."""
        return printable_path(os.path.join(os.fsencode(self.root), self._path(index)))

    def read(self, index: int) -> bytes:
        """Return the content of a file."""
        return read_file(os.path.join(os.fsencode(self.root), self._path(index)), self.name(index))

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the size of a file and the time of its last change."""
        return stamp_file(os.path.join(os.fsencode(self.root), self._path(index)), self.name(index))


def open_folder(
    root: str | os.PathLike[str],
    *,
    unlabelled: bool = False,
    faults: Faults | None = None,
    on_progress: Progress | None = None,
) -> Folder:
    """Open a folder with one sub-folder per class.

    With `unlabelled`, images outside of class folders are included with label -1, and a folder without images is not a
    class; otherwise such images are skipped, and an empty class folder is a fault. With `faults`, unusable items are
    skipped and named there.
    """
    root = os.fspath(root)
    listing = list_images(root, on_progress=on_progress)
    class_folders, number_of_folder = _class_folders(listing)
    labels = number_of_folder[listing.folder_of]
    filled = np.bincount(labels[labels >= 0], minlength=len(class_folders)) > 0
    _check_any(root, listing, class_folders, int((labels < 0).sum()), unlabelled=unlabelled)
    messages = list(listing.faults)
    if not unlabelled:
        messages += _empty_classes(root, listing, class_folders, filled, number_of_folder)
    messages += [text for folder in class_folders for text in _wrong_name(root, folder)]
    report_faults(messages, printable_path(root), faults)
    classes = tuple(
        folder.decode("utf-8", "backslashreplace") for folder, some in zip(class_folders, filled, strict=True) if some
    )
    labels = np.append(np.where(filled, np.cumsum(filled) - 1, -1), -1)[labels]
    if unlabelled or (labels >= 0).all():
        return Folder(root, listing, classes, labels)
    indices = np.flatnonzero(labels >= 0)
    return Folder(root, listing, classes, labels[indices], indices, np.flatnonzero(labels < 0))


def _class_folders(listing: Listing) -> tuple[list[bytes], Labels]:
    """Return the names of the top-level folders, and for every folder the index of its top-level folder, or -1."""
    names: list[bytes] = []
    numbers = np.full(len(listing.folders), -1, np.int64)
    for folder in range(1, len(numbers)):
        top = listing.folders[folder].split(b"/", 1)[0]
        if not names or names[-1] != top:  # folders are listed depth first, so those of a class are consecutive
            names.append(top)
        numbers[folder] = len(names) - 1
    return names, numbers


def _check_any(root: str, listing: Listing, class_folders: list[bytes], loose: int, *, unlabelled: bool) -> None:
    """Raise if nothing in a folder can be used."""
    wrong = None
    if not len(listing.files):
        what = "images" if unlabelled else "one sub-folder of images per class"
        wrong = f"{printable_path(root)} has no images; use a folder with {what}"
    elif not unlabelled and not class_folders:
        wrong = (
            f"{printable_path(root)} has {loose} images but no class folders; "
            "put the images of each class in their own folder, or use a manifest with labels"
        )
    elif not unlabelled and loose == len(listing.files):
        wrong = (
            f"{printable_path(root)} has no images in its class folders; move the {loose:,} images next to them there"
        )
    if wrong is not None:
        report_faults([*listing.faults, wrong], printable_path(root), None)


def _empty_classes(
    root: str, listing: Listing, class_folders: list[bytes], filled: NDArray[np.bool_], class_of: Labels
) -> list[str]:
    """Report class folders without images, and what they contain instead."""
    texts = []
    for number in np.flatnonzero(~filled).tolist():
        path = printable_path(os.path.join(os.fsencode(root), class_folders[number]))
        others = np.flatnonzero(class_of[listing.other_of] == number)
        instead = ""
        if len(others):
            files = "1 file" if len(others) == 1 else f"{len(others):,} files"
            instead = f" ({files}, such as {printable_path(listing.others[others.item(0)])}, without an image suffix)"
        texts.append(f"the class folder {path} has no images{instead}; add some, or remove the folder")
    return texts


def _wrong_name(root: str, folder: bytes) -> list[str]:
    try:
        folder.decode("utf-8")
    except UnicodeDecodeError:
        return [f"the name of the class folder {folder!r} in {printable_path(root)} is not UTF-8; rename it"]
    return []
