"""Images that live on the device are those of the stream."""

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
from vitrail.data.resident import ResidentEvaluation, Resident
from vitrail.data.sources.opening import open_source
from vitrail.data.stream import RankSlice, Stream
from vitrail.errors import ConfigError, DataError

CPU = torch.device("cpu")


def training(folder: Path, share: RankSlice | None = None, bad_files: str = "skip") -> Training:
    source = open_source(folder)
    augmentation = Augmentation(crop="padded", flip=0.5, erasing=0.5)
    parts = RankSlice(0, 1) if share is None else share
    return Training(
        source, Stream(len(source), 4, 7), Preprocess(size=(8, 8)), augmentation, Mixing(cutmix=1.0), parts, bad_files
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / name / f"{number}.png")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_made_from_files(folder: Path, workers: int) -> None:
    data = training(folder)
    found = list(Resident(data, CPU, workers).batches(3, 9))
    expected = list(training_batches(data, 3, 9, workers=0))
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        for name in ("pixels", "labels", "indices", "share", "box"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("stop", [9, 10_000])
def test_workers_draw_the_same_batches(folder: Path, stop: int) -> None:
    """The end may come early."""
    data, before = training(folder), set(multiprocessing.active_children())  # a failure's, while it is remembered
    with closing(Resident(data, CPU, 2).batches(3, stop)) as made:
        for one, other in zip(islice(made, 6), training_batches(data, 3, 9, workers=0), strict=True):
            assert all(map(torch.equal, one.tensors, other.tensors))
    assert set(multiprocessing.active_children()) <= before


def test_a_part_of_several_processes(folder: Path) -> None:
    whole = next(iter(Resident(training(folder), CPU, 0).batches(2, 3)))
    parts = [next(iter(Resident(training(folder, RankSlice(part, 2)), CPU, 0).batches(2, 3))) for part in range(2)]
    assert torch.equal(torch.cat([part.pixels for part in parts]), whole.pixels)


@pytest.mark.parametrize("bad", ["a/1.png", "a/4.png", "b/4.png"], ids=["", "before another class", "the last"])
def test_bad_files_are_replaced_and_told_once(folder: Path, bad: str) -> None:
    (folder / bad).write_text("no image")
    data = training(folder)
    found = list(Resident(data, CPU, 0).batches(0, 10))
    expected = list(training_batches(data, 0, 10, workers=0))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.labels, other.labels)
    assert [len(batch.bad) for batch in found] == [1] + [0] * 9
    with pytest.raises(DataError, match=bad[2:]):
        Resident(training(folder, bad_files="refuse"), CPU, 0)


def test_what_cannot_live_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.resident.MOST_BYTES", 100)
    with pytest.raises(ConfigError, match="10 images of 8×8 pixels are too many to live on the device"):
        Resident(training(folder), CPU, 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("part", [RankSlice(0, 1), RankSlice(0, 2), RankSlice(1, 2)])
def test_what_is_measured_again_is_read_once(folder: Path, workers: int, part: RankSlice) -> None:
    (folder / "a" / "1.png").write_text("no image")
    data = Evaluation(open_source(folder), Preprocess(size=(8, 8)), 3, part, bad_files="skip")
    expected = list(evaluation_batches(data, workers=0))
    kept = ResidentEvaluation(data, CPU, workers)
    first = list(kept.batches())
    for image in folder.rglob("*.png"):
        image.unlink()
    for found in (first, list(kept.batches()), list(kept.batches())):
        assert [batch.bad for batch in found] == [batch.bad for batch in expected]
        for one, other in zip(found, expected, strict=True):
            for mine, theirs in zip(one.tensors, other.tensors, strict=True):
                assert torch.equal(mine, theirs)
                assert mine.stride() == theirs.stride()


def test_a_measurement_that_breaks_off_is_not_kept(folder: Path) -> None:
    data = Evaluation(open_source(folder), Preprocess(size=(8, 8)), 3)
    kept = ResidentEvaluation(data, CPU, 0)
    next(iter(kept.batches()))
    assert len(list(kept.batches())) == len(data)


def test_what_is_too_large_to_keep_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.resident.MOST_BYTES", 100)
    kept = ResidentEvaluation(Evaluation(open_source(folder), Preprocess(size=(8, 8)), 3, bad_files="skip"), CPU, 0)
    assert sum(len(batch.labels) for batch in kept.batches()) == 10
    (folder / "b" / "3.png").unlink()
    assert sum(len(batch.labels) for batch in kept.batches()) == 9
