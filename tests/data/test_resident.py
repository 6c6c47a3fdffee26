"""Batches of images kept on the device equal those read from files."""

import multiprocessing
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.batches import Evaluation, Training, evaluation_batches, training_batches
from vitrail.data.preprocess import Preprocess
from vitrail.data.resident import Resident, ResidentEvaluation
from vitrail.data.sources.opening import open_source
from vitrail.data.stream import RankSlice, Stream
from vitrail.errors import DataError

CPU = torch.device("cpu")


def training(folder: Path, rank_slice: RankSlice | None = None, bad_files: str = "skip") -> Training:
    source = open_source(folder)
    augmentation = Augmentation(crop="padded", flip=0.5, erasing=0.5)
    stream, mixing = Stream(len(source), 4, 7), Mixing(cutmix=1.0)
    rank_slice = RankSlice(0, 1) if rank_slice is None else rank_slice
    return Training(source, stream, Preprocess(size=(8, 8)), augmentation, mixing, rank_slice, bad_files)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / name / f"{number}.png")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_same_batches_as_from_files(folder: Path, workers: int) -> None:
    data = training(folder)
    actual = list(Resident(data, CPU, workers).batches(3, 9))
    expected = list(training_batches(data, 3, 9, workers=0))
    assert len(actual) == len(expected) == 6
    for one, other in zip(actual, expected, strict=True):
        for name in ("pixels", "labels", "indices", "lam", "box"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("stop", [9, 10_000])
def test_workers_draw_the_same_batches(folder: Path, stop: int) -> None:
    """Also if the caller stops early."""
    data, before = training(folder), set(multiprocessing.active_children())  # left over from a failed test
    with closing(Resident(data, CPU, 2).batches(3, stop)) as made:
        for one, other in zip(islice(made, 6), training_batches(data, 3, 9, workers=0), strict=True):
            assert all(map(torch.equal, one.tensors, other.tensors))
    assert set(multiprocessing.active_children()) <= before


def test_ranks_together_make_the_whole_batch(folder: Path) -> None:
    whole = next(iter(Resident(training(folder), CPU, 0).batches(2, 3)))
    slices = [next(iter(Resident(training(folder, RankSlice(rank, 2)), CPU, 0).batches(2, 3))) for rank in range(2)]
    assert torch.equal(torch.cat([batch.pixels for batch in slices]), whole.pixels)


@pytest.mark.parametrize("bad", ["a/1.png", "a/4.png", "b/4.png"], ids=["", "before another class", "the last"])
def test_bad_files_are_replaced_and_reported_once(folder: Path, bad: str) -> None:
    (folder / bad).write_text("no image")
    data = training(folder)
    actual = list(Resident(data, CPU, 0).batches(0, 10))
    expected = list(training_batches(data, 0, 10, workers=0))
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.labels, other.labels)
    assert [len(batch.bad) for batch in actual] == [1] + [0] * 9
    with pytest.raises(DataError, match=bad[2:]):
        Resident(training(folder, bad_files="refuse"), CPU, 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rank_slice", [RankSlice(0, 1), RankSlice(0, 2), RankSlice(1, 2)])
def test_repeated_evaluation_reads_files_once(folder: Path, workers: int, rank_slice: RankSlice) -> None:
    (folder / "a" / "1.png").write_text("no image")
    data = Evaluation(open_source(folder), Preprocess(size=(8, 8)), 3, rank_slice, bad_files="skip")
    expected = list(evaluation_batches(data, workers=0))
    kept = ResidentEvaluation(data, CPU, workers)
    first = list(kept.batches())
    for image in folder.rglob("*.png"):
        image.unlink()
    for actual in (first, list(kept.batches()), list(kept.batches())):
        assert [batch.bad for batch in actual] == [batch.bad for batch in expected]
        for one, other in zip(actual, expected, strict=True):
            for mine, theirs in zip(one.tensors, other.tensors, strict=True):
                assert torch.equal(mine, theirs)
                assert mine.stride() == theirs.stride()


def test_an_interrupted_evaluation_is_not_kept(folder: Path) -> None:
    data = Evaluation(open_source(folder), Preprocess(size=(8, 8)), 3)
    kept = ResidentEvaluation(data, CPU, 0)
    next(iter(kept.batches()))
    assert len(list(kept.batches())) == len(data)
