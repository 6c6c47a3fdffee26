"""Batches of views are a pure function of step, seed and files, whatever process makes them."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.jpeg_source import JpegSource

from vitrail.data.augmentation.multicrop import MultiCrop, apply_views, plan_views
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Arrays, Source
from vitrail.data.stream import RankSlice, Stream
from vitrail.data.views import MultiCropTraining, ViewBatch, view_batches
from vitrail.errors import ConfigError, DataError

CROPS = MultiCrop(local_size=(8, 12), local_crops=3)
SIZE = (16, 24)


def training(files: Source, batch: int = 8, **fields: Any) -> MultiCropTraining:
    return MultiCropTraining(
        files, Stream(len(files), batch, seed=3), Preprocess(size=SIZE), **{"crops": CROPS, **fields}
    )


def same(one: ViewBatch, other: ViewBatch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True)) and one.bad == other.bad


FILES = JpegSource(20, corrupt=(7,))
STRAIGHT = [training(FILES)[step] for step in range(4)]


def test_shapes_and_dtypes() -> None:
    batch = STRAIGHT[0]
    assert batch.globals.shape == (8, 2, 3, *SIZE)
    assert batch.locals.shape == (8, 3, 3, 8, 12)
    assert batch.globals.dtype == batch.locals.dtype == torch.uint8
    for views in (batch.globals, batch.locals):
        assert views.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
        assert views.flatten(0, 1).data_ptr() == views.data_ptr()
    assert batch.indices.shape == (8,)


@given(start=st.integers(0, 3), world_size=st.sampled_from([1, 2, 4]), micros=st.sampled_from([1, 2]))
@settings(deadline=None, derandomize=True, max_examples=10)
def test_any_start_and_any_slicing(start: int, world_size: int, micros: int) -> None:
    slices = [training(FILES, rank_slice=RankSlice(rank, world_size))[start] for rank in range(world_size)]
    slices = [batch.micro(micro, micros) for batch in slices for micro in range(micros)]
    for number, expected in enumerate(STRAIGHT[start].tensors):
        assert torch.equal(torch.cat([batch.tensors[number] for batch in slices]), expected)


def test_the_batch_size_does_not_change_an_image() -> None:
    expected = [torch.cat([batch.tensors[number] for batch in STRAIGHT]) for number in range(3)]
    for batch in (2, 4, 16):
        made = [training(FILES, batch)[step] for step in range(32 // batch)]
        for number in range(3):
            assert torch.equal(torch.cat([some.tensors[number] for some in made]), expected[number])


def test_views_are_those_of_the_position() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 40, 50, 3), dtype=np.uint8)
    files = Arrays(images, np.zeros(5, np.int64), ("a",))
    batch = training(files, batch=4)[1]
    for row, position in enumerate(range(4, 8)):
        views = apply_views(plan_views(CROPS, 40, 50, SIZE, 3, position), images[batch.indices[row]])
        actual = [*batch.globals[row], *batch.locals[row]]
        assert len(actual) == len(views) == 5
        assert all(np.array_equal(one.permute(1, 2, 0), other) for one, other in zip(actual, views, strict=True))


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork")])
def test_any_number_of_workers(workers: int, method: str | None) -> None:
    made = list(view_batches(training(FILES), 1, 4, workers=workers, method=method))
    assert len(made) == 3
    assert all(same(one, other) for one, other in zip(made, STRAIGHT[1:], strict=True))


def test_no_local_views() -> None:
    batch = next(view_batches(training(FILES, crops=CROPS.replace(local_crops=0)), 0, 1, workers=1, method="fork"))
    assert batch.locals.shape == (8, 0, 3, 8, 12)
    assert torch.equal(batch.globals, training(FILES, crops=CROPS.replace(local_crops=0))[0].globals)


def test_unreadable_images_are_replaced_and_reported() -> None:
    bad = [image for batch in STRAIGHT for image in batch.bad]
    assert {image.name for image in bad} == {"images/7.jpg"}
    assert all(7 not in batch.indices for batch in STRAIGHT)
    with pytest.raises(DataError, match=r"images/7.jpg: "):
        list(view_batches(training(FILES, bad_files="refuse"), 0, 4, workers=0))
    nothing = JpegSource(3, corrupt=(0, 1, 2))
    with pytest.raises(DataError, match="3 consecutive images cannot be read"):
        list(view_batches(training(nothing), 0, 1, workers=0))


def test_moving_and_copying() -> None:
    batch = STRAIGHT[0]
    for other in (batch.to(torch.device("cpu")), batch.clone(), pickle.loads(pickle.dumps(batch)), batch.micro(0, 1)):
        assert isinstance(other, ViewBatch)
        assert same(batch, other)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="a batch of 8 cannot be split into 3 equal micro-batches"):
        STRAIGHT[0].micro(0, 3)
    with pytest.raises(ConfigError, match="bad_files is 'ignore'; choose one of 'skip', 'refuse'"):
        training(FILES, bad_files="ignore")
