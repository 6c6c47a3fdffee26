"""Padding images leave the others unchanged, and give all batches the same layout."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.device_augmentation import apply_all

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import Affine, Augmentation, AugmentationPlan, Jitter
from vitrail.data.augmentation.device_operations import operation_group
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.augmentation.on_device import OperationCapacity, operation_capacity, pad_plans
from vitrail.data.augmentation.randaugment import Operation, RandAugment
from vitrail.data.batches import Training
from vitrail.data.preprocess import Preprocess
from vitrail.data.resident import Planning, Resident
from vitrail.data.sources.source import Arrays
from vitrail.data.stream import Stream

SIZE = (12, 16)
CPU = torch.device("cpu")
AUGMENTATIONS = {
    "none": Augmentation(crop="none", flip=0.0),
    "usual": Augmentation(crop="padded", randaugment=RandAugment(layers=2, magnitude=9)),
    "big_vision": Augmentation(randaugment=RandAugment(layers=3, magnitude=15, operations="big_vision"), crop="padded"),
    "all": Augmentation(
        crop="padded", rotation=9.0, affine=Affine(shear=5.0), grey=0.2, erasing=0.3,
        jitter=Jitter(brightness=0.3, contrast=0.4, saturation=0.2), randaugment=RandAugment(layers=1, magnitude=5),
    ),
}  # fmt: skip


def plans_of(augmentation: Augmentation, batch: int, first: int = 0) -> list[AugmentationPlan]:
    places = range(first, first + batch)
    return [augment.plan(augmentation, *SIZE, SIZE, draws(3, place)) for place in places]


def training(augmentation: Augmentation, batch: int) -> Training:
    pixels = np.random.default_rng(0).integers(0, 256, (64, *SIZE, 3), np.uint8)
    source = Arrays(pixels, np.arange(64) % 4, tuple("abcd"))
    return Training(source, Stream(64, batch), Preprocess(size=SIZE), augmentation, Mixing(cutmix=1.0))


@settings(deadline=None, max_examples=20)
@given(name=st.sampled_from(sorted(AUGMENTATIONS)), batch=st.integers(1, 300), first=st.integers(0, 10_000))
def test_padding_leaves_the_images_unchanged(name: str, batch: int, first: int) -> None:
    augmentation = AUGMENTATIONS[name]
    plans = plans_of(augmentation, batch, first)
    more = pad_plans(plans, operation_capacity(augmentation, SIZE, batch))
    assert more[:batch] == plans
    some = torch.randint(0, 256, (batch, 3, *SIZE), dtype=torch.uint8)
    padding = some[:1].expand(len(more) - batch, -1, -1, -1)
    assert torch.equal(apply_all(more, torch.cat([some, padding]))[:batch], apply_all(plans, some))


@pytest.mark.parametrize("name", ["usual", "big_vision"])
def test_padded_batches_have_the_same_operation_counts(name: str) -> None:
    capacity = operation_capacity(AUGMENTATIONS[name], SIZE, 512)
    assert 0 < capacity.added < 512
    for first in range(0, 8 * 512, 512):
        more = pad_plans(plans_of(AUGMENTATIONS[name], 512, first), capacity)
        assert len(more) == 512 + capacity.added
        for layer, sizes in enumerate(capacity.layers):
            result = Counter(operation_group(plan.operations[layer]) for plan in more)
            del result[None]
            assert result == sizes


def test_padded_batches_share_one_layout() -> None:
    """So one CUDA graph fits them all."""
    data = training(AUGMENTATIONS["usual"], 512)
    planning = Planning(data, operation_capacity(data.augmentation, SIZE, 512))
    assert len({planning[step].layout for step in range(12)}) == 1
    assert len({Planning(data)[step].layout for step in range(12)}) == 12


@pytest.mark.parametrize("name", sorted(AUGMENTATIONS))
def test_padding_does_not_change_batches(name: str) -> None:
    data = training(AUGMENTATIONS[name], 128)
    resident = Resident(data, CPU, 0)
    filling = Planning(data, operation_capacity(data.augmentation, SIZE, 128))
    for step in range(3):
        actual, expected = resident.make(filling[step]), resident.make(Planning(data)[step])
        assert all(map(torch.equal, actual.tensors, expected.tensors))
        assert len(actual.labels) == 128


@pytest.mark.parametrize(
    "change",
    [
        {"operations": (Operation("solarize_add", (3.0,)), Operation("identity"))},
        {"operations": (Operation("identity"),) * 3},
    ],
    ids=["unexpected group", "too many layers"],
)
def test_plans_beyond_the_capacity_are_not_padded(change: dict[str, Any]) -> None:
    capacity = OperationCapacity(({"moves": 5}, {"moves": 5}), 9)
    move = Operation("translate_x", (2.0,))
    usual = plans_of(AUGMENTATIONS["none"], 4)
    fits = [plan._replace(operations=(move, move)) for plan in usual]
    assert len(pad_plans(fits, capacity)) == 13
    odd = [*fits[:3], fits[3]._replace(**change)]
    assert pad_plans(odd, capacity) == odd
    assert pad_plans(fits[:3] * 2, capacity) == fits[:3] * 2
    assert pad_plans(fits, OperationCapacity(capacity.layers, 0)) == fits
