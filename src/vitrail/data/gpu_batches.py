"""Batches whose JPEGs are decoded on a GPU: the same images, draws and unreadable files as in `batches`.

Worker processes read files and headers, and draw; threads of this process decode, resize and augment on the device.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrail.data.augmentation.augment import AugmentationPlan
from vitrail.data.augmentation.device_operations import BatchOperations, pack_operations
from vitrail.data.augmentation.mixing import Mix, draw_mix
from vitrail.data.augmentation.on_device import apply_packed
from vitrail.data.batches import (
    BadImage,
    Batch,
    Evaluation,
    Failure,
    Training,
    checked_batches,
    load_readable,
)
from vitrail.data.decode import open_image
from vitrail.data.device_resize import Axis, Window, evaluation_window
from vitrail.data.encoded import Encoded, EncodedBatch, encoded, pack_images
from vitrail.data.gpu_decoding import GpuDecoder, Output, decoding_threads
from vitrail.data.packing import PackedArrays
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Pixels
from vitrail.data.sources.targets import labels_at
from vitrail.errors import VitrailError

DECODED_AT_ONCE = 256
"""Fewest images that are decoded at a time: the engines are half as fast with 64."""


# ── evaluation ──


class EncodedEvaluationBatch(NamedTuple):
    """A batch for evaluation, before it is decoded."""

    memory: Tensor
    images: EncodedBatch
    good: tuple[int, ...]
    bad: tuple[tuple[int, BadImage], ...]


@dataclass(frozen=True)
class EncodedEvaluation(Dataset[Any]):
    """A worker's job: read the images of a batch."""

    data: Evaluation

    def __getitem__(self, number: int) -> EncodedEvaluationBatch | Failure:
        """Read a batch by its index."""
        images: list[Encoded | Pixels] = []
        try:
            good, bad = self.data.each_readable(
                self.data.indices(number), lambda _, index: images.append(self._load(index))
            )
        except VitrailError as error:
            return Failure(type(error), str(error))
        packed, preprocess = PackedArrays(), self.data.preprocess
        batch = pack_images(images, preprocess.size, preprocess.channels, packed)
        return EncodedEvaluationBatch(packed.memory(), batch, tuple(good), tuple(bad))

    def _load(self, index: int) -> Encoded | Pixels:
        image, preprocess = open_image(self.data.source.read(index)), self.data.preprocess
        window = evaluation_window(preprocess, image.height, image.width)
        left = encoded(image, window, preprocess.channels)
        return preprocess.fit(image.pixels(preprocess.channels)) if left is None else left

    def decoded(self, decoder: GpuDecoder, batch: EncodedEvaluationBatch) -> Batch:
        """Decode a batch; what the GPU cannot decode is loaded here."""
        failed: list[int] = []
        rows = batch.images.rows.of(batch.memory)
        pixels = decoder.pixels(
            batch.images,
            batch.memory,
            evaluation_output(self.data.preprocess),
            lambda number, _: failed.append(int(rows[number])),
        )
        pixels = joined(pixels, batch.images, batch.memory)
        loaded: list[int] = []

        def load(_: int, index: int) -> None:
            row = batch.good.index(index)
            pixels[row] = on_device(self.data.load(index), pixels.device)
            loaded.append(row)

        _, bad = self.data.each_readable([batch.good[row] for row in failed], load)
        lost = set(failed) - set(loaded)
        kept = [row for row in range(len(batch.good)) if row not in lost]
        pixels = pixels[torch.tensor(kept, device=pixels.device)] if lost else pixels
        report = tuple(row for _, row in sorted([*batch.bad, *bad], key=itemgetter(0)))
        return self.data.batch_of(pixels, [batch.good[row] for row in kept], report)


def gpu_evaluation_batches(
    data: Evaluation, device: torch.device, *, workers: int | None = None
) -> Generator[Batch, None, None]:
    """Yield every image once, in order, in batches of at most `data.batch`, decoded on the device."""
    together = -(-DECODED_AT_ONCE // data.batch) * data.batch
    job = EncodedEvaluation(replace(data, batch=together))
    read = checked_batches(job, range(len(job.data)), workers, False, None)
    for batch in on_this_stream(decoding_threads(device).map(job.decoded, read), device):
        yield from batch.slices(data.batch)


def evaluation_output(preprocess: Preprocess) -> Output:
    """Return what the evaluation transform makes of images."""
    return Output(preprocess.size, preprocess.channels, preprocess.interpolation, preprocess.padding())


# ── training ──


class EncodedStep(NamedTuple):
    """A training batch, before it is decoded."""

    memory: Tensor
    images: EncodedBatch
    drawn: Tensor
    """The memory of the operations."""
    operations: BatchOperations | None
    """Of the encoded images; None: there are none."""
    positions: tuple[int, ...]
    indices: tuple[int, ...]
    mix: Mix
    bad: tuple[tuple[int, BadImage], ...]
    """By row."""


@dataclass(frozen=True)
class EncodedTraining(Dataset[Any]):
    """A worker's job: read the images of a step, and draw."""

    data: Training

    def __getitem__(self, step: int) -> EncodedStep | Failure:
        """Read the batch of a step."""
        try:
            return self._batch(step)
        except VitrailError as error:
            return Failure(type(error), str(error))

    def _batch(self, step: int) -> EncodedStep:
        data, preprocess = self.data, self.data.preprocess
        positions = data.stream.positions(step, data.rank_slice)
        indices = data.stream.images_at(positions)
        images: list[Encoded | Pixels] = []
        plans: list[AugmentationPlan] = []
        bad: list[tuple[int, BadImage]] = []
        for row, position in enumerate(positions):
            load = partial(self._load, position=int(position))
            indices[row], (image, plan), failed = load_readable(data.source, int(indices[row]), data.bad_files, load)
            images.append(image)
            plans += [plan._replace(box=None)] if isinstance(image, Encoded) else []
            bad += [(row, one) for one in failed]
        packed, drawn = PackedArrays(), PackedArrays()
        operations = pack_operations(plans, preprocess.size, drawn) if plans else None
        batch = pack_images(images, preprocess.size, preprocess.channels, packed)
        mix = draw_mix(data.mixing, data.stream.seed, positions, preprocess.size)
        return EncodedStep(
            packed.memory(), batch, drawn.memory(), operations,
            tuple(positions.tolist()), tuple(indices.tolist()), mix, tuple(bad),
        )  # fmt: skip

    def _load(self, index: int, position: int) -> tuple[Encoded | Pixels, AugmentationPlan]:
        image, plan = self.data.open(index, position)
        if plan.box is None:
            window = evaluation_window(self.data.preprocess, image.height, image.width)
        else:
            top, left, height, width = map(int, plan.box)
            rows, columns = (
                Axis(0, side, made, 0) for side, made in zip((height, width), self.data.preprocess.size, strict=True)
            )
            window = Window(top, left, height, width, rows, columns)
        left_to_gpu = encoded(image, window, self.data.preprocess.channels)
        return (self.data.augmented(image, plan) if left_to_gpu is None else left_to_gpu), plan

    def decoded(self, decoder: GpuDecoder, step: EncodedStep) -> Batch:
        """Decode and augment a batch; what the GPU cannot decode is loaded here, as without one."""
        failed: list[int] = []
        rows = step.images.rows.of(step.memory)
        pixels = decoder.pixels(
            step.images, step.memory, self._output(), lambda number, _: failed.append(int(rows[number]))
        )
        if step.operations is not None:
            pixels = apply_packed(step.operations, step.drawn.to(pixels.device), pixels)
        pixels = joined(pixels, step.images, step.memory)
        indices, bad = np.array(step.indices, np.int64), list(step.bad)
        for row in sorted(failed):
            load = partial(self.data.load, position=step.positions[row])
            indices[row], made, others = load_readable(self.data.source, int(indices[row]), self.data.bad_files, load)
            pixels[row] = on_device(made, pixels.device)
            bad += [(row, one) for one in others]
        labels = torch.from_numpy(labels_at(self.data.source, indices))
        lam, box = torch.from_numpy(step.mix.lam), torch.from_numpy(step.mix.box)
        batch = Batch(
            pixels, labels, torch.from_numpy(indices), lam, box, tuple(one for _, one in sorted(bad, key=itemgetter(0)))
        )
        return batch.to(pixels.device)

    def _output(self) -> Output:
        augmentation, output = self.data.augmentation, evaluation_output(self.data.preprocess)
        return output if augmentation.crop == "none" else output._replace(interpolation=augmentation.interpolation)


def gpu_training_batches(
    data: Training, start: int, stop: int, device: torch.device, *, workers: int | None = None
) -> Generator[Batch, None, None]:
    """Yield the batches of steps [start, stop), decoded and augmented on the device."""
    job = EncodedTraining(data)
    read = checked_batches(job, range(start, stop), workers, False, None)
    yield from on_this_stream(decoding_threads(device).map(job.decoded, read), device)


# ── both ──


def joined(pixels: Tensor, batch: EncodedBatch, memory: Tensor) -> Tensor:
    """Return all rows of a batch: those decoded (n, C, H, W), and those that were ready."""
    rows, ready = batch.rows.of(memory), batch.ready.of(memory)
    if not len(ready):
        return pixels
    made = torch.empty(len(rows) + len(ready), *pixels.shape[1:], dtype=torch.uint8, device=pixels.device)
    made[rows.to(made.device)] = pixels
    made[batch.ready_rows.of(memory).to(made.device)] = ready.to(made.device).permute(0, 3, 1, 2)
    return made


def on_device(pixels: Pixels, device: torch.device) -> Tensor:
    """Return pixels (H, W, C) as (C, H, W) on a device."""
    return torch.from_numpy(np.array(pixels)).to(device).permute(2, 0, 1)  # a copy: Pillow's pixels are read-only


def on_this_stream(made: Iterator[Batch], device: torch.device) -> Generator[Batch, None, None]:
    """Yield batches made on other streams; their memory is not used again before the caller's stream is done."""
    for batch in made:
        if device.type == "cuda":
            here = torch.cuda.current_stream(device)
            for tensor in batch.tensors:
                if tensor.is_cuda:
                    tensor.record_stream(here)
        yield batch
