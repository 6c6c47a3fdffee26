"""The pixel cache: images decoded and downscaled once, in one memory-mapped file.

    pixels.bin   the pixels of every image, concatenated
    table.npz    for every image: offset, size and checksum of its pixels, and the stamp of its file

Opening the cache decodes images whose files have changed. Training then reads pixels at memory speed. The cost: crops
are taken from the downscaled image, so a small crop is less sharp.
"""

import hashlib
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from vitrail.data.decode import extent, open_image
from vitrail.data.preprocess import resized_size
from vitrail.data.sources.index_files import Progress, cache_folder, load_index, save_index
from vitrail.data.sources.source import Pixels, Source, Wrapped
from vitrail.data.sources.targets import kind_of_labels
from vitrail.errors import ConfigError, DataError, StorageError
from vitrail.io import lock_file

FORMAT = 1
SAVE_EVERY = 10.0
"""Seconds between two writes of the table: how much work an interruption can lose."""
_MISSING = -1


class CacheSize(NamedTuple):
    """The size of cached images."""

    short_side: int
    """Larger images are downscaled to this shorter side; smaller ones stay as they are."""
    channels: int = 3


@dataclass(frozen=True, eq=False)
class _Table:
    """Where every image's pixels are."""

    offsets: NDArray[np.int64]
    """-1 for an image that is not cached or cannot be decoded."""
    shapes: NDArray[np.int32]
    checksums: NDArray[np.uint32]
    stamps: NDArray[np.int64]

    @classmethod
    def empty(cls, images: int) -> "_Table":
        return cls(
            np.full(images, _MISSING, np.int64),
            np.zeros((images, 2), np.int32),
            np.zeros(images, np.uint32),
            np.full((images, 2), _MISSING, np.int64),
        )

    @classmethod
    def load(cls, file: Path, images: int) -> "_Table | None":
        names = ("offsets", "shapes", "checksums", "stamps")
        arrays = load_index(file, names)
        if arrays is None or any(len(array) != images for array in arrays.values()):
            return None
        return cls(*(arrays[name] for name in names))

    def save(self, file: Path) -> None:
        save_index(file, vars(self))

    def fits(self, size: int, channels: int) -> bool:
        """Whether a file of this size holds all pixels and is not mostly stale data."""
        present = self.offsets != _MISSING
        lengths = self.shapes[present].astype(np.int64).prod(axis=1) * channels
        ends = self.offsets[present] + lengths
        return bool(ends.max(initial=0) <= size <= 3 * lengths.sum() + (1 << 20))


@dataclass(frozen=True, eq=False)
class Cached(Wrapped):
    """A source that reads images from the cache, or from their files if they are not cached."""

    folder: Path
    size: CacheSize
    table: _Table
    _opened: dict[int, NDArray[np.uint8]] = field(default_factory=dict, repr=False)
    _checked: dict[int, NDArray[np.bool_]] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, object]:
        """Pickle without the mapping; each process opens its own."""
        return {**vars(self), "_opened": {}, "_checked": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)

    def read(self, index: int) -> bytes | Pixels:
        """Return the pixels of an image; the first read in a process verifies the checksum."""
        offset = int(self.table.offsets[index])
        if offset == _MISSING:
            return self.base.read(index)
        height, width = map(int, self.table.shapes[index])
        pixels = self._mapped()[offset : offset + height * width * self.size.channels]
        checked = self._checked[os.getpid()]
        if not checked[index]:
            if zlib.crc32(pixels.data) != self.table.checksums[index]:
                raise DataError(f"its pixels in the cache {self.folder} are corrupt; delete that folder to rebuild it")
            checked[index] = True
        return pixels.reshape(height, width, self.size.channels)

    def _mapped(self) -> NDArray[np.uint8]:
        process = os.getpid()  # after a fork, leave the parent's mapping alone
        if process not in self._opened:
            self._opened[process] = np.memmap(self.folder / "pixels.bin", np.uint8, mode="r")
            self._checked[process] = np.zeros(len(self), bool)
        return self._opened[process]


def cached(
    source: Source,
    size: CacheSize,
    *,
    folder: Path | None = None,
    workers: int = 0,
    on_progress: Progress | None = None,
) -> Cached:
    """Open the cache of a source, after decoding what is new or has changed.

    It is in `folder`, by default next to the other caches, under a hash of the images' names and the size.
    """
    if kind_of_labels(source) == "masks":
        raise ConfigError("images with masks cannot be cached: a mask has the size of its image, not of a smaller one")
    place = (cache_folder() / "pixels" if folder is None else folder) / _cache_key(source, size)
    file, pixels = place / "table.npz", place / "pixels.bin"
    stamps = np.array([_stamp(source, i) for i in range(len(source))], np.int64).reshape(-1, 2)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with lock_file(place / "lock", wait=True):  # the other processes wait and find the cache up to date
            table = _Table.load(file, len(source)) if pixels.is_file() else None
            if table is None or not table.fits(pixels.stat().st_size, size.channels):
                table = _Table.empty(len(source))
                pixels.unlink(missing_ok=True)  # not truncated: another process may have it mapped
                pixels.touch()
            stale = np.flatnonzero((table.stamps != stamps).any(axis=1))
            _fill(source, size, table, stale, stamps, place, workers, on_progress)
    except OSError as error:
        raise DataError(
            f"the cache {place} could not be written: {error.strerror or error}; train without a cache, or set "
            f"another location with VITRAIL_CACHE"
        ) from None
    return Cached(source, place, size, table)


def _fill(
    source: Source,
    size: CacheSize,
    table: _Table,
    stale: NDArray[np.int64],
    stamps: NDArray[np.int64],
    place: Path,
    workers: int,
    on_progress: Progress | None,
) -> None:
    """Decode stale images and append their pixels; the table is written after them, so it never points past the end."""
    if not len(stale):
        return
    saved = time.monotonic()
    with (place / "pixels.bin").open("ab") as file:
        for done, (index, pixels) in enumerate(_decoded(source, size, stale, workers), start=1):
            table.stamps[index] = stamps[index]
            table.offsets[index] = _MISSING
            if pixels is not None:
                table.shapes[index] = pixels.shape[:2]
                table.checksums[index] = zlib.crc32(pixels.data)
                table.offsets[index] = file.tell()
                file.write(pixels.data)
            if on_progress is not None:
                on_progress(done)
            if done == len(stale) or time.monotonic() - saved > SAVE_EVERY:
                file.flush()
                os.fsync(file.fileno())
                table.save(place / "table.npz")
                saved = time.monotonic()


def _decoded(
    source: Source, size: CacheSize, indices: NDArray[np.int64], workers: int
) -> Iterator[tuple[int, Pixels | None]]:
    """Yield every image, decoded and downscaled; None for one that cannot be decoded.

    If remote storage fails, that is raised: without its pixels in the cache, an image would be used in its full size.
    """
    loader = DataLoader(
        _Small(source, size), batch_size=None, sampler=indices.tolist(), num_workers=workers, collate_fn=_return_item
    )
    for index, made in zip(indices.tolist(), loader, strict=True):
        if isinstance(made, StorageError):
            raise made
        yield index, made


@dataclass(frozen=True)
class _Small(Dataset["Pixels | StorageError | None"]):
    """Decoded and downscaled images, by index."""

    source: Source
    size: CacheSize

    def __getitem__(self, index: int) -> Pixels | StorageError | None:
        try:
            image = open_image(self.source.read(index))
            short = min(image.height, image.width)
            pixels = image.pixels(self.size.channels, scale=min(1.0, self.size.short_side / short))
        except StorageError as error:
            return error  # not raised here: a worker would add its traceback to the message
        except DataError:
            return None
        if min(pixels.shape[:2]) > self.size.short_side:
            side = self.size.short_side
            covered = extent(image.width, pixels.shape[1]), extent(image.height, pixels.shape[0])
            target = resized_size((image.width, image.height), (side, side), "cover")
            pixels = _smaller(pixels, target, covered)
        return np.ascontiguousarray(pixels)


def _smaller(pixels: Pixels, target: tuple[int, int], covered: tuple[float, float]) -> Pixels:
    """Resize to (width, height); channel by channel, unless the image is RGB."""
    box = (0.0, 0.0, *covered)
    if pixels.shape[2] == 3:
        return np.asarray(Image.fromarray(pixels).resize(target, Image.Resampling.BICUBIC, box=box))
    layers = (Image.fromarray(np.ascontiguousarray(layer)) for layer in pixels.transpose(2, 0, 1))
    return np.stack([np.asarray(layer.resize(target, Image.Resampling.BICUBIC, box=box)) for layer in layers], axis=2)


def _return_item(made: Any) -> Any:
    return made


def _cache_key(source: Source, size: CacheSize) -> str:
    """Return the cache key of these images at this size."""
    digest = hashlib.blake2b(f"{FORMAT} {size}".encode(), digest_size=12)
    digest.update(os.getcwdb())  # names may be relative
    for index in range(len(source)):
        digest.update(source.name(index).encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def _stamp(source: Source, index: int) -> tuple[int, int]:
    """Return an image's stamp; a missing file is reported later, when it is read."""
    try:
        return source.stamp(index)
    except StorageError:
        raise
    except DataError:
        return _MISSING - 1, _MISSING - 1
