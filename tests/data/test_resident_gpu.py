"""Batches made on a GPU's side stream equal those made on a CPU."""

from contextlib import closing

import pytest
import torch

from vitrail.data import resident
from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.augmentation.randaugment import RandAugment
from vitrail.data.batches import Training
from vitrail.data.preprocess import Preprocess
from vitrail.data.resident import Resident
from vitrail.data.sources.opening import open_source
from vitrail.data.stream import Stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def training() -> Training:
    source = open_source("digits")
    augmentation = Augmentation(crop="padded", randaugment=RandAugment(layers=2, magnitude=9), erasing=0.3)
    preprocess, mixing = Preprocess(size=(32, 32)), Mixing(mixup=0.5, cutmix=1.0)
    return Training(source, Stream(len(source), 256, 7), preprocess, augmentation, mixing)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_the_same_batches_while_the_device_is_busy(
    training: Training, workers: int, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "CUDA_GRAPHS", cuda_graphs)
    expected = list(Resident(training, torch.device("cpu"), workers).batches(5, 25))
    busy = torch.randn(4096, 4096, device="cuda")
    with closing(Resident(training, torch.device("cuda"), workers).batches(5, 25)) as batches:
        actual = []
        for batch in batches:
            busy = (busy @ busy).clamp(-1, 1)
            # These copies run late on this stream: the memory of a batch must not be reused before.
            actual.append([tensor.clone() for tensor in batch.tensors])
            del batch
    for one, other in zip(actual, expected, strict=True):
        for mine, theirs in zip(one, other.tensors, strict=True):
            assert torch.equal(mine.cpu(), theirs)


def test_transfers_are_pinned() -> None:
    memory = torch.randint(256, (1000,), dtype=torch.uint8)
    pinned = resident._pinned(memory)
    assert pinned.is_pinned()
    assert torch.equal(pinned, memory)
