"""Pictures that live on the device: small ones, all of them, read once; those to train on are varied there.

What is drawn for a position of the stream is what would be drawn for a picture read from a file; workers draw it, and
send nothing but numbers.
"""

import math
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.mixing import draw_mix
from vitrail.data.augmentation.on_device import carry_out, check_on_device
from vitrail.data.augmentation.orders import Orders, write_orders
from vitrail.data.batches import BadPicture, Batch, Evaluation, Training, evaluation_batches, made_ahead
from vitrail.data.parcel import Parcel, Slot
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError

READ_AT_ONCE = 256
MOST_DRAWING = 4
"""How many workers draw: one draws tens of thousands of pictures a second, and more only take memory."""
MOST_BYTES = 32 * 2**30
"""More than this is not a small data set; a GPU has better use for its memory."""


class Planned(NamedTuple):
    """Everything random of a batch that has no pixels yet, as numbers in one piece of memory."""

    memory: Tensor
    orders: Orders
    indices: Slot
    share: Slot
    box: Slot


@dataclass(frozen=True)
class Planning(Dataset[Any]):
    """What a worker does: everything random of a step's pictures, drawn and written down for the device."""

    training: Training

    def __getitem__(self, step: int) -> Planned:
        """Draw for a step."""
        data, size = self.training, self.training.preprocess.size
        positions = data.stream.positions(step, data.share)
        mix = draw_mix(data.mixing, data.stream.seed, positions, size)
        plans = [
            augment.plan(data.augmentation, *size, size, draws(data.stream.seed, int(position)))
            for position in positions
        ]
        parcel = Parcel()
        orders = write_orders(plans, size, parcel)
        numbers = [parcel.put(array) for array in (data.stream.pictures_at(positions), mix.share, mix.box)]
        return Planned(parcel.memory(), orders, *numbers)


class Resident:
    """A training part on a device."""

    def __init__(self, training: Training, device: torch.device, workers: int) -> None:
        check_on_device(training.augmentation)
        self.training, self.device, self.workers = training, device, workers
        self.bad: list[BadPicture] = []
        self.pixels, stand_ins = self._read(device)
        self.stand_ins = stand_ins.to(device)
        self.labels = torch.from_numpy(training.source.labels.astype(np.int64)).to(device)

    def batches(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Give the batches of steps [start, stop), on the device; a GPU makes them beside its work."""
        steps = range(start, stop)
        workers = min(self.workers, MOST_DRAWING, len(steps))
        with closing(made_ahead(Planning(self.training), steps, workers=workers)) as planned:
            if self.device.type == "cuda":
                yield from self._made_beside(planned)
            else:
                yield from map(self.make, planned)

    def _made_beside(self, planned: Iterator[Planned]) -> Generator[Batch, None, None]:
        """Make each batch on a stream of its own, beside what the caller's stream is still busy with.

        Not by a thread: it would take Python from the caller, who has more to do for a step than this for a batch.
        """
        side, here = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(here)  # on which the pictures are still being sent
        for one in planned:
            with torch.cuda.stream(side):
                batch, done = self.make(one), side.record_event()
            here.wait_event(done)
            for tensor in batch.tensors:
                tensor.record_stream(here)  # so that its memory is not given away while it is used here
            yield batch

    def make(self, planned: Planned) -> Batch:
        """Make a batch that was drawn."""
        memory = planned.memory
        if self.device.type == "cuda":
            memory = memory.pin_memory()  # from which it is sent without waiting
        memory = memory.to(self.device, non_blocking=True)
        indices = self.stand_ins[planned.indices.of(memory)]
        pixels = carry_out(planned.orders, memory, self.pixels[indices])
        bad, self.bad = tuple(self.bad), []
        return Batch(pixels, self.labels[indices], indices, planned.share.of(memory), planned.box.of(memory), bad)

    def _read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return all pictures, and for each which one is shown in its place: itself, if it can be read."""
        source, preprocess = self.training.source, self.training.preprocess
        shape = (len(source), preprocess.channels, *preprocess.size)
        if _bytes(len(source), preprocess) > MOST_BYTES:
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


class Kept:
    """A part that is measured again and again: read the first time, and from then on found on the device."""

    def __init__(self, data: Evaluation, device: torch.device, workers: int) -> None:
        self.data, self.device, self.workers = data, device, workers
        self._kept: list[Batch] | None = None

    def batches(self) -> Iterator[Batch]:
        """Give every batch, in order, and every time those that could not be read."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Batch] = []
        fits = _bytes(len(self.data.source), self.data.preprocess) <= MOST_BYTES
        for batch in evaluation_batches(self.data, workers=self.workers, pin=self.device.type == "cuda"):
            if fits:
                # Copies: memory that a worker has shared takes a file descriptor for as long as it is used.
                labels, indices, share, box = (tensor.clone() for tensor in batch.tensors[1:])
                batch = Batch(batch.pixels.to(self.device, copy=True), labels, indices, share, box, batch.bad)
                kept.append(batch)
            yield batch
        self._kept = kept if fits else None


def _bytes(pictures: int, preprocess: Preprocess) -> int:
    return pictures * preprocess.channels * math.prod(preprocess.size)


def _next_readable(there: Tensor) -> Tensor:
    """Return for each picture itself or the next one that is there, the first after the last."""
    readable = there.nonzero().flatten()
    place = torch.searchsorted(readable, torch.arange(len(there)))
    return readable[place % len(readable)]
