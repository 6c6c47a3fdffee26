"""`MultiCropTraining`: training batches of several views per image, for self-supervised training.

The same stream as in `batches`: the batch of a step is a pure function of step, seed and files. Labels are not read.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.augmentation.multicrop import GLOBAL_VIEWS, MultiCrop, apply_views, decode_scale, plan_views
from vitrail.data.batches import (
    BadFiles,
    BadImage,
    Batch,
    BatchDataset,
    Failure,
    check_choice,
    checked_batches,
    load_readable,
)
from vitrail.data.decode import open_image
from vitrail.data.preprocess import Preprocess
from vitrail.data.slots import empty_buffer
from vitrail.data.sources.source import Source
from vitrail.data.stream import WHOLE_BATCH, RankSlice, Stream
from vitrail.errors import ConfigError, VitrailError


class ViewBatch(NamedTuple):
    """The views of a batch of images. V is the number of local views; channels are last in memory."""

    globals: Tensor
    """(B, 2, C, H, W), uint8."""
    locals: Tensor
    """(B, V, C, h, w), uint8."""
    indices: Tensor
    """(B,), indices into the source."""
    bad: tuple[BadImage, ...] = ()
    """Images that could not be read."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors with one row per image."""
        return self.globals, self.locals, self.indices

    def to(self, device: torch.device) -> Self:
        """Move the tensors to a device, asynchronously if their memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def clone(self) -> Self:
        """Return a copy."""
        return self._each(torch.clone)

    def micro(self, index: int, count: int) -> Self:
        """Return one of `count` equal, contiguous micro-batches."""
        size, rest = divmod(len(self.indices), count)
        if rest:
            raise ConfigError(f"a batch of {len(self.indices)} cannot be split into {count} equal micro-batches")
        return self._each(lambda tensor: tensor[index * size : (index + 1) * size])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(change(self.globals), change(self.locals), change(self.indices), self.bad)


AnyBatch = Batch | ViewBatch


@dataclass(frozen=True)
class MultiCropTraining(BatchDataset):
    """The training batches of one rank, by step: a pure function of step, seed and files."""

    source: Source
    stream: Stream
    preprocess: Preprocess
    """Channels, and the size of global views."""
    crops: MultiCrop
    rank_slice: RankSlice = WHOLE_BATCH
    bad_files: BadFiles = "skip"

    def __post_init__(self) -> None:
        check_choice("bad_files", self.bad_files, get_args(BadFiles))

    @property
    def batch_bytes(self) -> int:
        """Bytes of all views of a batch."""
        local = self.crops.local_crops * math.prod(self.crops.local_size) * self.preprocess.channels
        each = GLOBAL_VIEWS * self.preprocess.pixel_bytes + local
        return len(self.stream.positions(0, self.rank_slice)) * each

    def __getitem__(self, step: int) -> ViewBatch | Failure:
        """Make the batch of a step."""
        try:
            return self._batch(step)
        except VitrailError as error:
            return Failure(type(error), str(error))

    def _batch(self, step: int) -> ViewBatch:
        positions = self.stream.positions(step, self.rank_slice)
        indices = self.stream.images_at(positions)
        channels = self.preprocess.channels
        large = empty_buffer(len(positions), GLOBAL_VIEWS, *self.preprocess.size, channels)
        small = empty_buffer(len(positions), self.crops.local_crops, *self.crops.local_size, channels)
        bad: list[BadImage] = []
        for row, position in enumerate(positions):
            load = partial(self._load, position=int(position))
            indices[row], views, failed = load_readable(self.source, int(indices[row]), self.bad_files, load)
            for buffer, some in ((large, views[:GLOBAL_VIEWS]), (small, views[GLOBAL_VIEWS:])):
                for number, view in enumerate(some):
                    buffer.numpy()[row, number] = view
            bad += failed
        large, small = (pixels.permute(0, 1, 4, 2, 3) for pixels in (large, small))
        return ViewBatch(large, small, torch.from_numpy(indices), tuple(bad))

    def _load(self, index: int, position: int) -> list[NDArray[np.uint8]]:
        """Decode an image once and make all its views."""
        image = open_image(self.source.read(index))
        views = plan_views(self.crops, image.height, image.width, self.preprocess.size, self.stream.seed, position)
        return apply_views(views, image.pixels(self.preprocess.channels, scale=decode_scale(views)))


def view_batches(
    data: MultiCropTraining,
    start: int,
    stop: int,
    *,
    workers: int | None = None,
    pin: bool = False,
    method: str | None = None,
) -> Generator[ViewBatch, None, None]:
    """Yield the batches of steps [start, stop), prefetched by `workers` processes; 0 means in this process."""
    yield from checked_batches(data, range(start, stop), workers, pin, method)
