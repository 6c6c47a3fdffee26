"""`Source`: the protocol of a labelled image dataset; datasets in memory, and the digits included in the package."""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vitrail.data.remote.filesystems import differ_by_query, is_remote, public_url, status
from vitrail.data.remote.stored_files import read_remote
from vitrail.errors import DataError, InputError
from vitrail.io import open_regular

if TYPE_CHECKING:
    from vitrail.data.sources.targets import Targets

Pixels = NDArray[Any]
"""A decoded image: (height, width, channels) or (height, width)."""
Labels = NDArray[np.int64]
SUFFIXES = frozenset(
    {"jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "npy", "heic", "heif", "hif", "avif"}
)
"""Suffixes of image files, without the dot; case is ignored.

HEIC is included even if pillow-heif is not installed, so that a folder has the same images everywhere."""
SUPPORTED_DATA = (
    "a folder with one sub-folder per class, a manifest (.csv, .jsonl, .parquet), tar shards, or the word digits"
)
"""Supported datasets, for messages."""


class SkippedFile(NamedTuple):
    """A file without an image suffix, which is not used."""

    name: str
    """In readable form."""
    path: bytes
    """The file itself, or the shard it is in."""
    start: int | None = None
    """Its offset in a shard; None for a file of its own."""
    size: int | None = None
    """Its size in the shard; 0 if its content should not be sniffed."""


class Source(Protocol):
    """Images by index, readable from any process.

    A source is cheap to pickle (it holds names, not images) and keeps no file open across a fork.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, by class index."""

    @property
    def labels(self) -> Labels:
        """The class index of every image; -1 if unknown."""

    def __len__(self) -> int:
        """Return the number of images."""

    def name(self, index: int) -> str:
        """Return a readable name of an image: its file path, or its position in a file."""

    def read(self, index: int) -> bytes | Pixels:
        """Return an image as stored: the bytes of its file, or its pixels if it has no file."""

    def stamp(self, index: int) -> tuple[int, int]:
        """Return two integers that change when the stored image changes, without reading it."""


@runtime_checkable
class Keyed(Protocol):
    """A source whose images have keys: names that stay the same when the dataset is moved."""

    def key(self, index: int) -> str:
        """Return a name that is unique within the source."""


@dataclass(frozen=True, eq=False)
class Subset:
    """A subset of a source, for example the training split."""

    base: Source
    indices: NDArray[np.int64]

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the whole source's classes."""
        return self.base.classes

    @cached_property
    def labels(self) -> Labels:
        """The class of every image."""
        return self.base.labels[self.indices]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.indices)

    def name(self, index: int) -> str:
        """Return a readable name of an image."""
        return self.base.name(int(self.indices[index]))

    def read(self, index: int) -> bytes | Pixels:
        """Return an image as it is stored."""
        return self.base.read(int(self.indices[index]))

    def stamp(self, index: int) -> tuple[int, int]:
        """Return two numbers that change when the stored image does."""
        return self.base.stamp(int(self.indices[index]))


@dataclass(frozen=True, eq=False)
class Wrapped:
    """The images of a source, in its order; subclasses change how they are named or read."""

    base: Source

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.base.classes

    @property
    def labels(self) -> Labels:
        """The class of every image."""
        return self.base.labels

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.base)

    def name(self, index: int) -> str:
        """Return a readable name of an image."""
        return self.base.name(index)

    def read(self, index: int) -> bytes | Pixels:
        """Return an image as it is stored."""
        return self.base.read(index)

    def stamp(self, index: int) -> tuple[int, int]:
        """Return two numbers that change when the stored image does."""
        return self.base.stamp(index)


def base_of(source: Source) -> Source:
    """Return the source behind subsets and wrappers."""
    while (base := getattr(source, "base", None)) is not None:
        source = base
    return source


@dataclass(frozen=True)
class Arrays:
    """Images in memory: (images, height, width) or (images, height, width, channels)."""

    images: Pixels
    labels: Labels
    classes: tuple[str, ...]
    targets: "Targets | None" = None

    def __post_init__(self) -> None:
        if self.images.ndim not in (3, 4):
            raise DataError(
                f"images in memory should have shape (images, height, width[, channels]), found {self.images.shape}"
            )
        if len(self.images) != len(self.labels):
            raise DataError(f"{len(self.images)} images with {len(self.labels)} labels; give one label per image")
        check_labels(self.labels, self.classes)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def name(self, index: int) -> str:
        """Return a readable name of an image."""
        return f"image {index}"

    def read(self, index: int) -> Pixels:
        """Return the pixels of an image."""
        return np.asarray(self.images[index])

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the index and a checksum of an image."""
        return index, zlib.crc32(np.ascontiguousarray(self.images[index]).data)


def place_of(data: str | bytes | os.PathLike[str]) -> str:
    """Return the path of a dataset as text; raise if it is empty."""
    place = os.fsdecode(data)
    if not place:
        raise DataError(f"the data path is empty; give {SUPPORTED_DATA}")
    return place


def check_source(source: object) -> None:
    """Raise if an object is not a source, for example a path."""
    if not all(hasattr(source, name) for name in ("classes", "labels", "read", "name")):
        raise InputError(
            f"expected a source of images, found {type(source).__name__}; open a path with open_source(path) "
            "from vitrail.data.sources.opening"
        )


def check_labels(labels: Labels, classes: Sequence[str]) -> None:
    """Raise unless every label is a class index, or -1."""
    if len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise DataError(f"labels range from {labels.min()} to {labels.max()}, but there are {len(classes)} classes")


def reason_of(fault: OSError | ValueError) -> str:
    """Return the system's reason for an error."""
    return (fault.strerror if isinstance(fault, OSError) else None) or str(fault) or type(fault).__name__


def names_in_common_folder(paths: Sequence[str]) -> list[str]:
    """Return paths or URLs relative to their common folder: the names of files wherever the dataset is."""
    hashed = differ_by_query(paths)
    whole = [os.path.abspath(public_url(path, hashed=hashed)) for path in paths]
    home = os.path.commonpath([os.path.dirname(path) for path in whole])
    return [os.path.relpath(path, home) for path in whole]


def read_file(path: str | bytes, name: str) -> bytes:
    """Return the bytes of a file; `name` is for messages."""
    if is_remote(path):
        return read_remote(os.fsdecode(path))
    try:
        with open_regular(path) as file:
            return file.readall()
    except (OSError, ValueError) as fault:
        raise DataError(f"{name} cannot be read: {reason_of(fault)}") from None


def stamp_file(path: str | bytes, name: str) -> tuple[int, int]:
    """Return the size and change time of a file; `name` is for messages.

    The change time is ctime: unlike mtime it cannot be set back, and a file that replaces another gets a new one.
    Of a remote file it is a hash of its version.
    """
    if is_remote(path):
        return status(os.fsdecode(path))
    try:
        found = os.stat(path)
    except (OSError, ValueError) as fault:
        raise DataError(f"{name} cannot be read: {reason_of(fault)}") from None
    return found.st_size, found.st_ctime_ns


def digits() -> Arrays:
    """Return scikit-learn's 1,797 handwritten digits, 8×8 pixels in grey, rescaled from 0…16 to 0…255."""
    with files("vitrail.data.sources").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    return Arrays(images, labels, tuple(str(digit) for digit in range(10)))
