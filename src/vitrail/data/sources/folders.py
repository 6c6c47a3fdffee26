"""A folder of images with a sub-folder for each class."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.faults import Faults, settle
from vitrail.data.sources.index_files import Progress, shown
from vitrail.data.sources.source import Labels, SkippedFile, read_file, stamp_file
from vitrail.data.sources.tree import Listing, list_images


@dataclass(frozen=True, eq=False)
class Folder:
    """Images in folders. The class of an image is the sub-folder of the root that it lies in, at any depth."""

    root: str
    listing: Listing
    classes: tuple[str, ...]
    labels: Labels
    indices: NDArray[np.int64] | None = None
    """Which images of the listing these are, where not all."""
    loose: NDArray[np.int64] | None = None
    """Which images of the listing lie in no class folder and are not among these."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def _path(self, index: int) -> bytes:
        """Return the path of a file relative to the root."""
        return self.listing.path(index if self.indices is None else self.indices.item(index))

    @property
    def ignored(self) -> int:
        """How many files in the folder are not among these images, hidden ones not counted."""
        return len(self.listing.others) + (0 if self.loose is None else len(self.loose))

    def skipped(self) -> Iterator[SkippedFile]:
        """Give the files whose names do not end as an image's."""
        for number in range(len(self.listing.others)):
            path = os.path.join(os.fsencode(self.root), self.listing.other_path(number))
            yield SkippedFile(shown(path), path)

    def outside(self) -> Iterator[str]:
        """Give the paths of the images that lie in no class folder, as a person reads them."""
        numbers = () if self.loose is None else self.loose.tolist()
        return (shown(os.path.join(os.fsencode(self.root), self.listing.path(number))) for number in numbers)

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
    root: str | os.PathLike[str],
    *,
    unlabelled: bool = False,
    faults: Faults | None = None,
    on_progress: Progress | None = None,
) -> Folder:
    """Open a folder with a sub-folder for each class.

    With `unlabelled`, images that lie in no class folder are taken too, with label -1, and a folder without images
    is no class; else such images are passed over, and such a folder is refused. With `faults`, what cannot be used is
    left out and named there.
    """
    root = os.fspath(root)
    listing = list_images(root, on_progress=on_progress)
    class_folders, number_of_folder = _class_folders(listing)
    labels = number_of_folder[listing.folder_of]
    filled = np.bincount(labels[labels >= 0], minlength=len(class_folders)) > 0
    _check_any(root, listing, class_folders, int((labels < 0).sum()), unlabelled=unlabelled)
    found = list(listing.faults)
    if not unlabelled:
        found += _empty_classes(root, listing, class_folders, filled, number_of_folder)
    found += [text for folder in class_folders for text in _wrong_name(root, folder)]
    settle(found, shown(root), faults)
    classes = tuple(
        folder.decode("utf-8", "backslashreplace") for folder, some in zip(class_folders, filled, strict=True) if some
    )
    labels = np.append(np.where(filled, np.cumsum(filled) - 1, -1), -1)[labels]
    if unlabelled or (labels >= 0).all():
        return Folder(root, listing, classes, labels)
    indices = np.flatnonzero(labels >= 0)
    return Folder(root, listing, classes, labels[indices], indices, np.flatnonzero(labels < 0))


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


def _check_any(root: str, listing: Listing, class_folders: list[bytes], loose: int, *, unlabelled: bool) -> None:
    """Refuse a folder of which nothing can be used."""
    wrong = None
    if not len(listing.files):
        what = "some" if unlabelled else "a sub-folder of images for each class"
        wrong = f"{shown(root)} has no images; give a folder with {what}"
    elif not unlabelled and not class_folders:
        wrong = (
            f"{shown(root)} has {loose} images but no class folders; "
            "put the images of each class in a folder of its own, or give a manifest with their labels"
        )
    elif not unlabelled and loose == len(listing.files):
        wrong = f"{shown(root)} has no images in its class folders; move the {loose:,} that lie beside them there"
    if wrong is not None:
        settle([*listing.faults, wrong], shown(root), None)


def _empty_classes(
    root: str, listing: Listing, class_folders: list[bytes], filled: NDArray[np.bool_], class_of: Labels
) -> list[str]:
    """Say which class folders have no images, and what they have instead."""
    texts = []
    for number in np.flatnonzero(~filled).tolist():
        path = shown(os.path.join(os.fsencode(root), class_folders[number]))
        others = np.flatnonzero(class_of[listing.other_of] == number)
        instead = ""
        if len(others):
            files = "1 file" if len(others) == 1 else f"{len(others):,} files"
            instead = (
                f" ({files}, such as {shown(listing.others[others.item(0)])}, whose names do not end as an image's)"
            )
        texts.append(f"the class folder {path} has no images{instead}; add some, or remove the folder")
    return texts


def _wrong_name(root: str, folder: bytes) -> list[str]:
    try:
        folder.decode("utf-8")
    except UnicodeDecodeError:
        return [f"the name of the class folder {folder!r} in {shown(root)} is not UTF-8; rename it"]
    return []
