"""`Source`: images with labels, by number. Every kind of data is one: folders, manifests, shards, arrays."""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import DataError, InputError
from vitrail.io import open_regular

Pixels = NDArray[Any]
"""A decoded image: (height, width, channels) or (height, width)."""
Labels = NDArray[np.int64]
SUFFIXES = frozenset(
    {"jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "npy", "heic", "heif", "hif", "avif"}
)
"""What the names of image files end with, after the dot and without regard to case.

HEIC is listed also where pillow-heif is not installed, so that a folder has the same images everywhere."""


class SkippedFile(NamedTuple):
    """A file among the images that is not used, because its name does not end as an image's."""

    name: str
    """As a person reads it."""
    path: bytes
    """The file that it is, or lies in."""
    start: int | None = None
    """Where in a shard it begins; None where it is a file itself."""
    size: int | None = None
    """How long it is in the shard; 0 where its content need not be looked at."""


class Source(Protocol):
    """Images that can be asked for by number, from any process.

    A source is cheap to copy to another process (it holds names, not images) and keeps no file open across a fork.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their numbers."""

    @property
    def labels(self) -> Labels:
        """The class of every image, by number; -1 where it is not known."""

    def __len__(self) -> int:
        """Return the number of images."""

    def name(self, index: int) -> str:
        """Return what a person would call an image: the path of its file, or where in a file it is."""

    def read(self, index: int) -> bytes | Pixels:
        """Return an image as it is stored: the content of its file, or its pixels where it has no file."""

    def stamp(self, index: int) -> tuple[int, int]:
        """Return two numbers that change when the stored image does, without reading it."""


@runtime_checkable
class Keyed(Protocol):
    """A source whose images have keys: names that stay the same when the data as a whole lies elsewhere."""

    def key(self, index: int) -> str:
        """Return a text that no other image of the source has."""


@dataclass(frozen=True, eq=False)
class Subset:
    """Some images of a source, as a source: the part for training, for instance."""

    whole: Source
    indices: NDArray[np.int64]

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the whole source's classes."""
        return self.whole.classes

    @cached_property
    def labels(self) -> Labels:
        """The class of every image."""
        return self.whole.labels[self.indices]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.indices)

    def name(self, index: int) -> str:
        """Return what a person would call an image."""
        return self.whole.name(int(self.indices[index]))

    def read(self, index: int) -> bytes | Pixels:
        """Return an image as it is stored."""
        return self.whole.read(int(self.indices[index]))

    def stamp(self, index: int) -> tuple[int, int]:
        """Return two numbers that change when the stored image does."""
        return self.whole.stamp(int(self.indices[index]))


@dataclass(frozen=True)
class Arrays:
    """Images that lie in memory: (images, height, width) or (images, height, width, channels)."""

    images: Pixels
    labels: Labels
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.ndim not in (3, 4):
            raise DataError(
                f"images in memory have axes (images, height, width[, channels]), found {self.images.shape}"
            )
        if len(self.images) != len(self.labels):
            raise DataError(f"{len(self.images)} images with {len(self.labels)} labels; give one for each")
        check_labels(self.labels, self.classes)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def name(self, index: int) -> str:
        """Return what a person would call an image."""
        return f"image {index}"

    def read(self, index: int) -> Pixels:
        """Return the pixels of an image."""
        return np.asarray(self.images[index])

    def stamp(self, index: int) -> tuple[int, int]:
        """Return where the image is, and a checksum of it: nothing else tells one array from another."""
        return index, zlib.crc32(np.ascontiguousarray(self.images[index]).data)


KINDS = "a folder with a sub-folder for each class, a manifest (.csv, .jsonl, .parquet), tar shards, or the word digits"
"""What data can be."""


def place_of(data: object) -> str:
    """Return the path that somebody gave as data; anything that is not a path is refused in words."""
    if isinstance(data, str | bytes | os.PathLike):
        place = os.fsdecode(data)
        if not place:
            raise DataError(f"the path of the data is empty; give {KINDS}")
        return place
    kind = type(data)
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__.partition('.')[0]}."
    raise InputError(
        f"the data is of type {home}{kind.__name__}, which is not supported yet; give a path: {KINDS}; images in "
        "memory can be written to files, or their bytes to a Parquet file (docs/guides/data.md)"
    )


def check_source(source: object) -> None:
    """Refuse what is not a source of images, such as a path, where a source is asked for."""
    if not all(hasattr(source, name) for name in ("classes", "labels", "read", "name")):
        raise InputError(
            f"expected a source of images, found {type(source).__name__}; open a path with open_source(path) "
            "from vitrail.data.sources.opening"
        )


def check_labels(labels: Labels, classes: Sequence[str]) -> None:
    """See to it that every label is the number of a class, or -1."""
    if len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise DataError(f"labels go from {labels.min()} to {labels.max()}, but there are {len(classes)} classes")


def reason_of(fault: OSError | ValueError) -> str:
    """Say in a few words why the system refused a file."""
    return (fault.strerror if isinstance(fault, OSError) else None) or str(fault) or type(fault).__name__


def read_file(path: str | bytes, name: str) -> bytes:
    """Return the content of a file; `name` is what messages call it."""
    try:
        with open_regular(path) as file:
            return file.readall()
    except (OSError, ValueError) as fault:
        raise DataError(f"{name} cannot be read: {reason_of(fault)}") from None


def stamp_file(path: str | bytes, name: str) -> tuple[int, int]:
    """Return the size and the time of the last change of a file; `name` is what messages call it.

    The change time (ctime) is taken: unlike the time of the last write it cannot be set back, and a file that takes
    another one's name gets a new one.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as fault:
        raise DataError(f"{name} cannot be read: {reason_of(fault)}") from None
    return status.st_size, status.st_ctime_ns
