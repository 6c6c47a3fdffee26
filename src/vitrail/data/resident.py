"""Datasets that are kept on the device: read once, and augmented there for training. The caller checks that they fit.

The random draws for a position of the stream are the same as for images read from files; workers draw them and send
only numbers.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.device_operations import BatchOperations, pack_operations
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.mixing import draw_mix
from vitrail.data.augmentation.on_device import (
    OperationCapacity,
    apply_packed,
    check_on_device,
    operation_capacity,
    pad_plans,
)
from vitrail.data.batches import BadImage, Batch, Evaluation, Training, evaluation_batches, prefetch
from vitrail.data.packing import PackedArrays, Slot
from vitrail.data.sources.targets import kind_of_labels, label_rows
from vitrail.errors import ConfigError, DataError

READ_AT_ONCE = 256
LAYOUTS = 8
"""Number of layouts with a CUDA graph; most batches share one layout."""
CUDA_GRAPHS = True
"""Whether a CUDA device captures its work for a batch as a CUDA graph instead of launching kernel by kernel
(benchmarks/lab-gpu.md)."""
MOST_DRAWING = 4
"""Most workers that draw: one draws for tens of thousands of images/s, and more only take memory."""


class Layout(NamedTuple):
    """Where each array is in a batch's memory; the same for all batches with the same count of each operation."""

    operations: BatchOperations
    indices: Slot
    """Longer than `lam`: the rows after it are padding, computed but not returned."""
    lam: Slot
    box: Slot


class Planned(NamedTuple):
    """All random draws of a batch, without its pixels, in one block of memory."""

    memory: Tensor
    layout: Layout


@dataclass(frozen=True)
class Planning(Dataset[Any]):
    """A worker's job: draw the augmentations of a step's images and pack them for the device."""

    training: Training
    capacity: OperationCapacity | None = None
    """Batches are padded to this, so that a CUDA graph fits them all."""

    def __getitem__(self, step: int) -> Planned:
        """Draw a step's augmentations."""
        data, size = self.training, self.training.preprocess.size
        positions = data.stream.positions(step, data.rank_slice)
        mix = draw_mix(data.mixing, data.stream.seed, positions, size)
        plans = [
            augment.plan(data.augmentation, *size, size, draws(data.stream.seed, int(position)))
            for position in positions
        ]
        plans = plans if self.capacity is None else pad_plans(plans, self.capacity)
        indices = data.stream.images_at(positions)
        indices = np.concatenate([indices, np.repeat(indices[:1], len(plans) - len(indices))])
        packed = PackedArrays()
        operations = pack_operations(plans, size, packed)
        layout = Layout(operations, *(packed.put(array) for array in (indices, mix.lam, mix.box)))
        return Planned(packed.memory(), layout)


class Resident:
    """A training split on a device."""

    def __init__(self, training: Training, device: torch.device, workers: int) -> None:
        if kind_of_labels(training.source) == "masks":
            raise ConfigError("images with masks are augmented on the CPU, so they cannot be kept on the device")
        check_on_device(training.augmentation)
        self.training, self.device, self.workers = training, device, workers
        self.bad: list[BadImage] = []
        self.pixels, replacements = self._read(device)
        self.replacements = replacements.to(device)
        self.labels = torch.from_numpy(label_rows(training.source)).to(device)
        self.graphs: dict[Layout, _CapturedBatch | None] = {}

    def batches(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Yield the batches of steps [start, stop), on the device; a GPU makes them on a side stream."""
        steps = range(start, stop)
        workers = min(self.workers, MOST_DRAWING, len(steps))
        with closing(prefetch(Planning(self.training, self._capacity()), steps, workers=workers)) as planned:
            if self.device.type == "cuda":
                yield from self._on_side_stream(planned)
            else:
                yield from map(self.make, planned)

    def _on_side_stream(self, planned: Iterator[Planned]) -> Generator[Batch, None, None]:
        """Make each batch on a side stream, concurrently with the work on the caller's stream.

        Not in a thread: it would compete for the GIL with the caller, who has more Python to run per step.
        """
        side, here = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(here)  # which is still copying the images
        for one in planned:
            with torch.cuda.stream(side):
                batch, done = self.make(one), side.record_event()
            here.wait_event(done)
            for tensor in batch.tensors:
                tensor.record_stream(here)  # keeps the allocator from reusing its memory while it is in use here
            yield batch

    def make(self, planned: Planned) -> Batch:
        """Make a batch from its draws."""
        bad, self.bad = tuple(self.bad), []
        if self.device.type != "cuda":
            return self._computed(planned.layout, planned.memory.to(self.device))._replace(bad=bad)
        memory = _pinned(planned.memory)
        captured = self.graphs.get(planned.layout)
        if captured is not None:
            return captured.replay(memory)._replace(bad=bad)
        made = self._computed(planned.layout, memory.to(self.device, non_blocking=True))
        if planned.layout in self.graphs:  # computed once before: capture needs a warm-up
            self.graphs[planned.layout] = _CapturedBatch(self._computed, planned.layout, memory.to(self.device))
        elif CUDA_GRAPHS and len(self.graphs) < LAYOUTS:
            self.graphs[planned.layout] = None
        return made._replace(bad=bad)

    def _computed(self, layout: Layout, memory: Tensor) -> Batch:
        """Make a batch from draws that are on the device."""
        indices = self.replacements[layout.indices.of(memory)]
        lam, box = layout.lam.of(memory), layout.box.of(memory)
        pixels = apply_packed(layout.operations, memory, self.pixels[indices])
        real = slice(len(lam))
        return Batch(pixels[real], self.labels[indices[real]], indices[real], lam, box)

    def _capacity(self) -> OperationCapacity | None:
        """Return what batches are padded to; None without CUDA graphs, which are the reason for padding."""
        data = self.training
        if self.device.type != "cuda" or not CUDA_GRAPHS:
            return None
        return operation_capacity(
            data.augmentation, data.preprocess.size, len(data.stream.positions(0, data.rank_slice))
        )

    def _read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return all images, and for each the index to use: its own, or the next readable image's."""
        source, preprocess = self.training.source, self.training.preprocess
        shape = (len(source), preprocess.channels, *preprocess.size)
        pixels = torch.empty(shape, dtype=torch.uint8, device=device)
        readable_mask = torch.zeros(len(source), dtype=torch.bool)
        read = Evaluation(source, preprocess, READ_AT_ONCE, bad_files=self.training.bad_files)
        for batch in evaluation_batches(read, workers=self.workers, pin=device.type == "cuda"):
            pixels[batch.indices.to(device)] = batch.pixels.to(device)
            readable_mask[batch.indices] = True
            self.bad += batch.bad
        if not readable_mask.any():
            raise DataError("none of the images can be read; run vitrail check to see why")
        return pixels, _next_readable(readable_mask)


class _CapturedBatch:
    """A CUDA graph that makes one batch: hundreds of small kernels in one launch."""

    def __init__(self, compute: Callable[[Layout, Tensor], Batch], layout: Layout, memory: Tensor) -> None:
        self.memory, self.graph = memory, torch.cuda.CUDAGraph()
        # Capture only this thread's work; another one may be copying images.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.made = compute(layout, self.memory)

    def replay(self, memory: Tensor) -> Batch:
        """Replay with other draws; the returned batch is a copy."""
        self.memory.copy_(memory, non_blocking=True)
        self.graph.replay()
        return self.made.clone()


class ResidentEvaluation:
    """A split that is evaluated repeatedly: read on the first pass, then kept on the device."""

    def __init__(self, data: Evaluation, device: torch.device, workers: int) -> None:
        self.data, self.device, self.workers = data, device, workers
        self._kept: list[Batch] | None = None

    def batches(self) -> Iterator[Batch]:
        """Yield every batch, in order; unreadable images are reported on every pass."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Batch] = []
        for batch in evaluation_batches(self.data, workers=self.workers, pin=self.device.type == "cuda"):
            batch = batch._replace(pixels=batch.pixels.to(self.device))
            kept.append(batch)
            yield batch
        self._kept = kept


def _pinned(memory: Tensor) -> Tensor:
    """Return a pinned copy, for an asynchronous transfer to the GPU.

    Copied by this thread with NumPy: torch would split 0.7 MB over one thread per core and wait for all of them, on
    cores where workers are drawing, which took 5 ms.
    """
    pinned = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
    np.copyto(pinned.numpy(), memory.numpy())
    return pinned


def _next_readable(readable_mask: Tensor) -> Tensor:
    """Return for each image its own index or that of the next readable one, wrapping around."""
    readable = readable_mask.nonzero().flatten()
    place = torch.searchsorted(readable, torch.arange(len(readable_mask)))
    return readable[place % len(readable)]
