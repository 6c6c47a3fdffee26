"""Decoding by nvImageCodec leaks nothing over 100,000 images; it runs here on the CPU.

Workers read a few batches, which are then decoded again and again: reading and drawing 100,000 images takes minutes.
tests/data/test_gpu_decoding_gpu.py looks at the memory of a GPU.
"""

import ctypes
import gc
import os
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.jpeg_files import jpeg, photo

from vitrail.data.augmentation.augment import preset
from vitrail.data.batches import Batch, Evaluation, Training
from vitrail.data.gpu_batches import EncodedEvaluation, EncodedTraining
from vitrail.data.gpu_decoding import GpuDecoder, decoding_threads
from vitrail.data.preprocess import Preprocess
from vitrail.data.stream import Stream

CPU = torch.device("cpu")
IMAGES, BATCH, READ = 100_000, 500, 4
"""READ: batches that are read."""
PREPROCESS = Preprocess(size=(8, 8))


class Small:
    """A source of small files of many sizes; one in 50 cannot be read."""

    classes = ("a", "b")

    def __init__(self) -> None:
        self.files = [jpeg(photo(9 + number % 7, 8 + number % 11, number), quality=60) for number in range(98)]
        self.files += [self.files[0][:150], b"not an image"]
        self.labels = np.arange(READ * BATCH, dtype=np.int64) % 2

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{index}.jpg"

    def read(self, index: int) -> bytes:
        return self.files[index % len(self.files)]

    def stamp(self, index: int) -> tuple[int, int]:
        return index, 0


def evaluation() -> EncodedEvaluation:
    return EncodedEvaluation(Evaluation(Small(), PREPROCESS, BATCH, bad_files="skip"))


def training() -> EncodedTraining:
    return EncodedTraining(Training(Small(), Stream(READ * BATCH, BATCH), PREPROCESS, preset("light")))


def memory() -> int:
    """Return the bytes of this process, without what the allocator could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize("make", [evaluation, training])
def test_nothing_leaks_over_100_000_images(make: Callable[[], EncodedEvaluation | EncodedTraining]) -> None:
    """100 bytes per image would be 8 MB over the last 80,000."""
    job = make()
    read, used, bad = [job[number] for number in range(READ)], list[int](), 0

    def decoded(decoder: GpuDecoder, batch: Any) -> Batch:
        return job.decoded(decoder, batch)

    made = decoding_threads(CPU).map(decoded, islice(cycle(read), IMAGES // BATCH))
    for number, batch in enumerate(made, start=1):
        bad += len(batch.bad)
        if number in (IMAGES // BATCH // 5, IMAGES // BATCH):
            used.append(memory())
    assert bad >= 0.02 * IMAGES
    assert used[1] - used[0] < 6 * 2**20
