"""Images that live on the device: small ones, all of them, read once; those to train on are varied there.

What is drawn for a position of the stream is what would be drawn for an image read from a file; workers draw it, and
send nothing but numbers.
"""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.device_operations import Orders, write_orders
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.mixing import draw_mix
from vitrail.data.augmentation.on_device import carry_out, check_on_device
from vitrail.data.augmentation.padding import Rooms, filled, rooms_for
from vitrail.data.batches import BadImage, Batch, Evaluation, Training, evaluation_batches, made_ahead
from vitrail.data.packing import PackedArrays, Slot
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError

READ_AT_ONCE = 256
LAYOUTS = 8
"""How many layouts are remembered; most batches have the same one."""
REPLAYED = True
"""Whether a CUDA device replays what it did for the batch before, launched at once in place of kernel by kernel
(benchmarks/lab-gpu.md)."""
MOST_DRAWING = 4
"""How many workers draw: one draws tens of thousands of images/s, and more only take memory."""
MOST_BYTES = 32 * 2**30
"""More than this is not a small data set; a GPU has better use for its memory."""


class Layout(NamedTuple):
    """Where in a batch's memory each number lies; the same for all batches that do the same number of each thing."""

    orders: Orders
    indices: Slot
    """More than there are shares: what comes behind is made, but not seen."""
    share: Slot
    box: Slot


class Planned(NamedTuple):
    """Everything random of a batch that has no pixels yet, as numbers in one piece of memory."""

    memory: Tensor
    layout: Layout


@dataclass(frozen=True)
class Planning(Dataset[Any]):
    """What a worker does: everything random of a step's images, drawn and written down for the device."""

    training: Training
    rooms: Rooms | None = None
    """Batches are filled up to these, so that a device can replay what it did before."""

    def __getitem__(self, step: int) -> Planned:
        """Draw for a step."""
        data, size = self.training, self.training.preprocess.size
        positions = data.stream.positions(step, data.share)
        mix = draw_mix(data.mixing, data.stream.seed, positions, size)
        plans = [
            augment.plan(data.augmentation, *size, size, draws(data.stream.seed, int(position)))
            for position in positions
        ]
        plans = plans if self.rooms is None else filled(plans, self.rooms)
        indices = data.stream.images_at(positions)
        indices = np.concatenate([indices, np.repeat(indices[:1], len(plans) - len(indices))])
        packed = PackedArrays()
        orders = write_orders(plans, size, packed)
        layout = Layout(orders, *(packed.put(array) for array in (indices, mix.share, mix.box)))
        return Planned(packed.memory(), layout)


class Resident:
    """A training split on a device."""

    def __init__(self, training: Training, device: torch.device, workers: int) -> None:
        check_on_device(training.augmentation)
        self.training, self.device, self.workers = training, device, workers
        self.bad: list[BadImage] = []
        self.pixels, stand_ins = self._read(device)
        self.stand_ins = stand_ins.to(device)
        self.labels = torch.from_numpy(training.source.labels.astype(np.int64)).to(device)
        self.recorded: dict[Layout, _Recording | None] = {}

    def batches(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Give the batches of steps [start, stop), on the device; a GPU makes them beside its work."""
        steps = range(start, stop)
        workers = min(self.workers, MOST_DRAWING, len(steps))
        with closing(made_ahead(Planning(self.training, self._rooms()), steps, workers=workers)) as planned:
            if self.device.type == "cuda":
                yield from self._made_beside(planned)
            else:
                yield from map(self.make, planned)

    def _made_beside(self, planned: Iterator[Planned]) -> Generator[Batch, None, None]:
        """Make each batch on a stream of its own, beside what the caller's stream is still busy with.

        Not by a thread: it would take Python from the caller, who has more to do for a step than this for a batch.
        """
        side, here = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(here)  # on which the images are still being sent
        for one in planned:
            with torch.cuda.stream(side):
                batch, done = self.make(one), side.record_event()
            here.wait_event(done)
            for tensor in batch.tensors:
                tensor.record_stream(here)  # so that its memory is not given away while it is used here
            yield batch

    def make(self, planned: Planned) -> Batch:
        """Make a batch that was drawn."""
        bad, self.bad = tuple(self.bad), []
        if self.device.type != "cuda":
            return self._computed(planned.layout, planned.memory.to(self.device))._replace(bad=bad)
        memory = _pinned(planned.memory)
        recording = self.recorded.get(planned.layout)
        if recording is not None:
            return recording.replay(memory)._replace(bad=bad)
        made = self._computed(planned.layout, memory.to(self.device, non_blocking=True))
        if planned.layout in self.recorded:  # computed once already, so that nothing is done for the first time
            self.recorded[planned.layout] = _Recording(self._computed, planned.layout, memory.to(self.device))
        elif REPLAYED and len(self.recorded) < LAYOUTS:
            self.recorded[planned.layout] = None
        return made._replace(bad=bad)

    def _computed(self, layout: Layout, memory: Tensor) -> Batch:
        """Make a batch of numbers that are on the device."""
        indices = self.stand_ins[layout.indices.of(memory)]
        share, box = layout.share.of(memory), layout.box.of(memory)
        pixels = carry_out(layout.orders, memory, self.pixels[indices])
        seen = slice(len(share))
        return Batch(pixels[seen], self.labels[indices[seen]], indices[seen], share, box)

    def _rooms(self) -> Rooms | None:
        """Return to what batches are filled up; on a CPU nothing is replayed, so that nothing need be alike."""
        data = self.training
        if self.device.type != "cuda" or not REPLAYED:
            return None
        return rooms_for(data.augmentation, data.preprocess.size, len(data.stream.positions(0, data.share)))

    def _read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return all images, and for each which one is shown in its place: itself, if it can be read."""
        source, preprocess = self.training.source, self.training.preprocess
        shape = (len(source), preprocess.channels, *preprocess.size)
        if _bytes(len(source), preprocess) > MOST_BYTES:
            raise ConfigError(
                f"{len(source):,} images of {preprocess.size[0]}×{preprocess.size[1]} pixels are too many to live on "
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
            raise DataError("none of the images can be read; look at them with vitrail check")
        return pixels, _next_readable(there)


class _Recording:
    """What a CUDA device does for one batch, recorded: hundreds of small kernels that are launched as one."""

    def __init__(self, compute: Callable[[Layout, Tensor], Batch], layout: Layout, memory: Tensor) -> None:
        self.memory, self.graph = memory, torch.cuda.CUDAGraph()
        # Only what this thread does is recorded; another one may be sending images.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.made = compute(layout, self.memory)

    def replay(self, memory: Tensor) -> Batch:
        """Do the same for other numbers; the batch is the caller's own."""
        self.memory.copy_(memory, non_blocking=True)
        self.graph.replay()
        return self.made.copied()


class Kept:
    """A split that is measured again and again: read the first time, and from then on found on the device."""

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


def _pinned(memory: Tensor) -> Tensor:
    """Return a copy that is sent to a GPU without waiting.

    Copied by this thread alone: torch would divide 0.7 MB among as many threads as there are cores and wait for all of
    them, on cores where workers are drawing, which took 5 ms.
    """
    pinned = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
    np.copyto(pinned.numpy(), memory.numpy())
    return pinned


def _bytes(images: int, preprocess: Preprocess) -> int:
    return images * preprocess.channels * math.prod(preprocess.size)


def _next_readable(there: Tensor) -> Tensor:
    """Return for each image itself or the next one that is there, the first after the last."""
    readable = there.nonzero().flatten()
    place = torch.searchsorted(readable, torch.arange(len(there)))
    return readable[place % len(readable)]
