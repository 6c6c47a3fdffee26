"""Batches of items to predict: workers decode them, or read them for a decoder on a GPU. Errors are values."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrail.data.batches import Failure, empty_pixels, prefetch
from vitrail.data.decode import LazyImage
from vitrail.data.device_resize import evaluation_window
from vitrail.data.encoded import Encoded, EncodedBatch, StoredJpeg, encoded, pack_images
from vitrail.data.gpu_batches import DECODED_AT_ONCE, evaluation_output, joined, on_device
from vitrail.data.gpu_decoding import GpuDecoder, decoding_threads
from vitrail.data.inputs import Item, fitted, prepared
from vitrail.data.packing import PackedArrays
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Pixels
from vitrail.errors import StorageError, VitrailError

T = TypeVar("T")


class Decoded(NamedTuple):
    """A decoded batch."""

    pixels: Tensor
    """(B, C, H, W), uint8, of the readable images."""
    names: tuple[bytes, ...]
    errors: tuple[str | None, ...]
    """One per image; None for readable images."""

    def slices(self, size: int) -> Iterator["Decoded"]:
        """Yield the batch in slices of `size` images."""
        row = 0
        for start in range(0, len(self.names), size):
            errors = self.errors[start : start + size]
            end = row + errors.count(None)
            yield Decoded(self.pixels[row:end], self.names[start : start + size], errors)
            row = end


@dataclass(frozen=True)
class Decoding(Dataset[Any]):
    """A worker's job: images in, pixels out."""

    preprocess: Preprocess
    quick: bool = False
    """Resize with torch's kernel (`Preprocess.fit`)."""

    def __getitem__(self, items: Sequence[Item]) -> Decoded | Failure:
        """Decode images; if their storage fails, return the error, because the images may be fine."""
        pixels = empty_pixels(len(items), self.preprocess)

        def keep(row: int, item: Item) -> None:
            pixels.numpy()[row] = fitted(item, self.preprocess, quick=self.quick)

        try:
            errors = _each(items, keep)
        except StorageError as error:
            return Failure(StorageError, str(error))
        good = errors.count(None)
        return Decoded(pixels[:good].permute(0, 3, 1, 2), tuple(item.name for item in items), errors)


def checked(made: T | Failure) -> T:
    """Return a batch; raise its error if it could not be made."""
    if isinstance(made, Failure):
        raise made.kind(made.message)
    return made


def _each(items: Sequence[Item], keep: Callable[[int, Item], None]) -> tuple[str | None, ...]:
    """Call `keep(row, item)`; return the error of each item, or None. Rows count the items without one."""
    errors: list[str | None] = []
    for item in items:
        try:
            keep(errors.count(None), item)
        except StorageError:
            raise
        except VitrailError as error:
            errors.append(str(error))
        else:
            errors.append(None)
    return tuple(errors)


# ── on a GPU ──


class EncodedItems(NamedTuple):
    """A batch before it is decoded."""

    memory: Tensor
    images: EncodedBatch
    names: tuple[bytes, ...]
    errors: tuple[str | None, ...]


@dataclass(frozen=True)
class Reading(Dataset[Any]):
    """A worker's job: read images for a decoder on a GPU."""

    preprocess: Preprocess

    def __getitem__(self, items: Sequence[Item]) -> EncodedItems | Failure:
        """Read images; if their storage fails, return the error."""
        images: list[Encoded | Pixels] = []
        try:
            errors = _each(items, lambda _, item: images.append(prepared(item, self.preprocess, _read)))
        except StorageError as error:
            return Failure(StorageError, str(error))
        packed = PackedArrays()
        batch = pack_images(images, self.preprocess.size, self.preprocess.channels, packed)
        return EncodedItems(packed.memory(), batch, tuple(item.name for item in items), errors)

    def decoded(self, decoder: GpuDecoder, batch: EncodedItems) -> Decoded:
        """Decode a batch; what the GPU cannot decode is decoded here."""
        failed: dict[int, StoredJpeg] = {}
        rows = batch.images.rows.of(batch.memory)

        def fail(number: int, jpeg: StoredJpeg) -> None:
            failed[int(rows[number])] = jpeg

        pixels = decoder.pixels(batch.images, batch.memory, evaluation_output(self.preprocess), fail)
        pixels = joined(pixels, batch.images, batch.memory)
        if not failed:
            return Decoded(pixels, batch.names, batch.errors)
        places = [place for place, error in enumerate(batch.errors) if error is None]
        errors, lost = list(batch.errors), []
        for row, jpeg in sorted(failed.items()):
            try:
                made = fitted(Item(batch.names[places[row]], content=jpeg.content.tobytes()), self.preprocess)
                pixels[row] = on_device(made, pixels.device)
            except VitrailError as error:
                errors[places[row]] = str(error)
                lost.append(row)
        kept = [row for row in range(len(places)) if row not in lost]
        pixels = pixels[torch.tensor(kept, dtype=torch.int64).to(pixels.device)] if lost else pixels
        return Decoded(pixels, batch.names, tuple(errors))


def _read(image: LazyImage, preprocess: Preprocess) -> Encoded | Pixels:
    window = evaluation_window(preprocess, image.height, image.width)
    left_to_gpu = encoded(image, window, preprocess.channels)
    return preprocess.fit(image.pixels(preprocess.channels)) if left_to_gpu is None else left_to_gpu


def gpu_decoded_items(
    items: Iterator[Item], preprocess: Preprocess, device: torch.device, batch: int, workers: int
) -> Generator[Decoded, None, None]:
    """Yield items in batches of `batch`, decoded on a device."""
    together = -(-DECODED_AT_ONCE // batch) * batch
    job = Reading(preprocess)
    read = map(checked, prefetch(job, item_batches(items, together), workers=workers))
    for decoded in decoding_threads(device).map(job.decoded, read):
        if decoded.pixels.is_cuda:
            decoded.pixels.record_stream(torch.cuda.current_stream(device))
        yield from decoded.slices(batch)


def item_batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Yield items in lists of `size`."""
    while some := list(islice(items, size)):
        yield some
