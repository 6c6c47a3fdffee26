"""Training pictures that live on the device: small ones, all of them, read once and varied there.

What is drawn for a position of the stream is what would be drawn for a picture read from a file; workers draw it, and
send nothing but numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import Plan
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.mixing import draw_mix
from vitrail.data.augmentation.on_device import apply_all, check_on_device
from vitrail.data.batches import BadPicture, Batch, Evaluation, Training, evaluation_batches, made_ahead
from vitrail.errors import ConfigError, DataError

READ_AT_ONCE = 256
MOST_BYTES = 32 * 2**30
"""More than this is not a small data set; a GPU has better use for its memory."""


class Planned(NamedTuple):
    """A batch that has no pixels yet, and what is to be done to each of its pictures."""

    batch: Batch
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class Planning(Dataset[Any]):
    """What a worker does: everything random of a step's pictures, drawn."""

    training: Training

    def __getitem__(self, step: int) -> Planned:
        """Draw for a step."""
        data, size = self.training, self.training.preprocess.size
        positions = data.stream.positions(step, data.share)
        indices = data.stream.pictures_at(positions)
        mix = draw_mix(data.mixing, data.stream.seed, positions, size)
        plans = tuple(
            augment.plan(data.augmentation, *size, size, draws(data.stream.seed, int(position)))
            for position in positions
        )
        labels = torch.from_numpy(data.source.labels[indices].astype(np.int64))
        numbers = (torch.from_numpy(indices), torch.from_numpy(mix.share), torch.from_numpy(mix.box))
        return Planned(Batch(torch.empty(0, dtype=torch.uint8), labels, *numbers), plans)


class Resident:
    """A training part on a device."""

    def __init__(self, training: Training, device: torch.device, workers: int) -> None:
        check_on_device(training.augmentation)
        self.training, self.workers = training, workers
        self.bad: list[BadPicture] = []
        self.pixels, self.stand_ins = self._read(device)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Give the batches of steps [start, stop)."""
        for planned in made_ahead(Planning(self.training), range(start, stop), workers=self.workers):
            yield self._made(planned)

    def _made(self, planned: Planned) -> Batch:
        indices = self.stand_ins[planned.batch.indices]
        labels = torch.from_numpy(self.training.source.labels[indices.numpy()].astype(np.int64))
        pixels = apply_all(planned.plans, self.pixels[indices.to(self.pixels.device)])
        bad, self.bad = tuple(self.bad), []
        return planned.batch._replace(pixels=pixels, labels=labels, indices=indices, bad=bad)

    def _read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return all pictures, and for each which one is shown in its place: itself, if it can be read."""
        source, preprocess = self.training.source, self.training.preprocess
        shape = (len(source), preprocess.channels, *preprocess.size)
        if np.prod(shape, dtype=np.int64) > MOST_BYTES:
            raise ConfigError(
                f"{len(source):,} pictures of {preprocess.size[0]}×{preprocess.size[1]} pixels are too many to live on "
                f"the device; use data.on_device = false"
            )
        pixels = torch.empty(shape, dtype=torch.uint8, device=device)
        there = torch.zeros(len(source), dtype=torch.bool)
        read = Evaluation(source, preprocess, READ_AT_ONCE, bad_files=self.training.bad_files)
        for batch in evaluation_batches(read, workers=self.workers):
            pixels[batch.indices.to(device)] = batch.pixels.to(device)
            there[batch.indices] = True
            self.bad += batch.bad
        if not there.any():
            raise DataError("none of the pictures can be read; look at them with vitrail check")
        return pixels, _next_readable(there)


def _next_readable(there: Tensor) -> Tensor:
    """Return for each picture itself or the next one that is there, the first after the last."""
    readable = there.nonzero().flatten()
    place = torch.searchsorted(readable, torch.arange(len(there)))
    return readable[place % len(readable)]
