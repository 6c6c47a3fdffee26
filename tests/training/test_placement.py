"""Which images are kept on the device, for how much memory."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.memory_jobs import job

from vitrail.data.sources.source import Arrays
from vitrail.data.sources.splits import Splits, split_of
from vitrail.errors import ConfigError
from vitrail.training.auto_batch import FILLED, MemoryLimit
from vitrail.training.context import Job
from vitrail.training.memory import forecast
from vitrail.training.placement import place_images
from vitrail.training.run import _training
from vitrail.training.split_predictions import split_predictor

TRAIN, VAL, SIDE = 60, 20, 32
ONE = 3 * SIDE * SIDE


def planned(**changes: Any) -> tuple[Job, Splits]:
    source = Arrays(np.zeros((TRAIN + VAL, 8, 8, 3), np.uint8), np.arange(TRAIN + VAL) % 10, tuple("0123456789"))
    splits = Splits(split_of(source, np.arange(TRAIN)), split_of(source, np.arange(TRAIN, TRAIN + VAL)), None, {})
    return job(data={"on_device": True}, augmentation={"crop": "padded"}, **changes), splits


def limit_for(planned: Job, images: float) -> MemoryLimit:
    """Return the memory that holds the model and this many images."""
    return MemoryLimit(round((forecast(planned).total + images * ONE) / FILLED), "the GPU")


@pytest.mark.parametrize(("room", "kept", "both"), [(TRAIN + VAL + 1, 80, True), (TRAIN + 10, 60, False)])
def test_what_fits_beside_the_model_is_kept(room: int, kept: int, both: bool) -> None:
    asked, splits = planned()
    placed = place_images(asked, splits, limit_for(asked, room))
    assert (placed.context.resident, placed.context.resident_validation) == (kept, both)
    assert forecast(placed).total == forecast(asked).total + kept * ONE
    assert placed.context.placement.startswith("images kept on the GPU: 60 for training")
    assert ("the 20 for validation do not fit and are read from their files" in placed.context.placement) != both
    predictor = split_predictor(placed.plan, placed.context, splits.val or splits.train)
    assert (predictor.kept is not None) == both
    assert len(_training(placed, splits.train).source) == TRAIN


def test_training_images_that_do_not_fit_are_an_error() -> None:
    asked, splits = planned()
    with pytest.raises(ConfigError, match=r"60 training images of 32×32 pixels take 184 kB, but the GPU has .* leaves"):
        place_images(asked, splits, limit_for(asked, TRAIN - 5))


def test_an_automatic_batch_makes_room_for_the_images() -> None:
    asked, splits = planned(batch="auto")
    room = forecast(asked).total - 100 * ONE
    placed = place_images(asked, splits, MemoryLimit(round(room / FILLED), "the GPU"))
    assert not placed.context.resident_validation
    with pytest.raises(ConfigError, match="has 500 kB, of which the model leaves 0 bytes"):
        place_images(asked, splits, MemoryLimit(500_000, "the GPU"))


def test_nothing_is_placed_unless_asked_for() -> None:
    asked, (_, splits) = job(), planned()
    assert place_images(asked, splits, MemoryLimit(0, "the GPU")) is asked
    assert asked.device == torch.device("cpu")
