"""Train, validation and test splits."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.sources.source import Arrays, Subset, digits
from vitrail.data.sources.splits import split_indices, split_source, splits_from_record
from vitrail.errors import ConfigError, DataError

PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)
counts_of_classes = st.lists(st.integers(3, 60), min_size=1, max_size=6)
shares = st.floats(0, 0.25)


def labels_of(counts: list[int], seed: int) -> np.ndarray:
    labels = np.repeat(np.arange(len(counts)), counts)
    return np.random.default_rng(seed).permutation(labels)


@PROPERTY
@given(counts_of_classes, st.integers(0, 2**64 - 1), shares, shares)
def test_every_image_is_in_one_split(counts: list[int], seed: int, val: float, test: float) -> None:
    labels = labels_of(counts, 0)
    splits = split_indices(labels, seed=seed, val=val, test=test)
    assert sorted(np.concatenate(splits).tolist()) == list(range(len(labels)))
    for split, share in zip(splits, (None, val, test), strict=True):
        assert split.dtype == np.int64
        assert (np.diff(split) > 0).all()
        result = np.bincount(labels[split], minlength=len(counts))
        if share == 0:
            assert not len(split)
            continue
        assert result.min() >= 1
        if share is not None:
            assert (np.abs(result - np.array(counts) * share) <= 1).all()


@PROPERTY
@given(st.integers(3, 40), st.floats(0.01, 0.6), st.floats(0.01, 0.39))
def test_large_fractions_leave_a_training_image(count: int, val: float, test: float) -> None:
    splits = split_indices(np.zeros(count, np.int64), seed=0, val=val, test=test)
    assert min(len(split) for split in splits) >= 1


@PROPERTY
@given(counts_of_classes, st.integers(0, 1000))
def test_the_split_depends_on_labels_and_seed_only(counts: list[int], seed: int) -> None:
    labels = labels_of(counts, seed)
    once, again = (split_indices(labels, seed=seed, val=0.2, test=0.1) for _ in range(2))
    assert [split.tolist() for split in once] == [split.tolist() for split in again]


def test_a_class_is_split_independently_of_the_others() -> None:
    alone = split_indices(np.zeros(50, np.int64), seed=3, val=0.2, test=0.2)
    with_others = split_indices(np.repeat([0, 1, 2], [50, 9, 30]), seed=3, val=0.2, test=0.2)
    assert [split.tolist() for split in alone] == [split[split < 50].tolist() for split in with_others]


def test_seeds_differ_and_splits_are_stable() -> None:
    labels = np.repeat([0, 1], 20)
    first, second = (split_indices(labels, seed=seed, val=0.1, test=0.1)[1].tolist() for seed in (0, 1))
    assert first != second
    # These numbers must never change: a run resumed with a newer version must get the same splits.
    assert first == [0, 2, 36, 37]


@pytest.mark.parametrize(
    ("counts", "val", "test", "message"),
    [
        ([5, 2], 0.1, 0.1, "class 'dog' has 2 images, too few for 3 splits; add images, remove the class, or use"),
        ([1, 5], 0.1, 0, "class 'cat' has 1 image, too few for 2 splits"),
        ([1, 5], 0, 0.1, "class 'cat' has 1 image, too few for 2 splits"),
    ],
)
def test_a_class_with_too_few_images(counts: list[int], val: float, test: float, message: str) -> None:
    labels = np.repeat(np.arange(2), counts)
    with pytest.raises(DataError, match=message):
        split_indices(labels, seed=0, val=val, test=test, classes=("cat", "dog"))
    assert len(split_indices(labels, seed=0, val=0, test=0)[0]) == sum(counts)


@pytest.mark.parametrize(("val", "test"), [(-0.1, 0), (0, 1), (0.5, 0.5), (float("nan"), 0)])
def test_invalid_fractions(val: float, test: float) -> None:
    with pytest.raises(
        ConfigError,
        match=r"the (val|test) fraction is .*; it should be at least 0|the fractions of val .* leave no training",
    ):
        split_indices(np.zeros(9, np.int64), seed=0, val=val, test=test)


def test_images_without_labels_cannot_be_split() -> None:
    for labels in (np.array([0, -1, 0]), np.zeros(0, np.int64)):
        with pytest.raises(DataError, match="without labels"):
            split_indices(labels, seed=0, val=0.1, test=0.1)


def test_a_recorded_split_is_restored() -> None:
    whole = digits()
    splits = split_source(whole, seed=5, val=0.15, test=0.05)
    record = json.loads(json.dumps(splits.record))
    assert (record["method"], record["seed"], record["fractions"]) == ("stratified", 5, {"val": 0.15, "test": 0.05})
    assert sum(record["counts"]["train"].values()) == len(splits.train)
    assert len(record["names"]["val"]) == len(splits.val)
    again = splits_from_record(whole, record)
    for before, after in zip(splits[:3], again[:3], strict=True):
        assert isinstance(before, Subset)
        assert before.indices.tolist() == after.indices.tolist()
    assert again.record == record


def test_a_split_with_fraction_zero_is_none() -> None:
    splits = split_source(digits(), val=0.1, test=0)
    assert splits.test is None
    assert len(splits.train) + len(splits.val) == 1797
    assert splits_from_record(digits(), splits.record).test is None


def chosen(source: Arrays, kept: np.ndarray) -> Arrays:
    return Arrays(source.images[kept], source.labels[kept], source.classes)


def test_a_recorded_image_is_missing() -> None:
    whole = digits()
    record = split_source(whole).record
    last = 1 + max(int(name.split()[1]) for name in record["names"]["val"] + record["names"]["test"])
    with pytest.raises(DataError, match=r"of the recorded (val|test) split, is missing; restore it, or"):
        splits_from_record(chosen(whole, np.arange(last - 1)), record)
    with pytest.raises(DataError, match="class '0' has 125 images in the train split, but had 124 when the split"):
        splits_from_record(chosen(whole, np.append(np.arange(1797), 0)), record)


@pytest.mark.parametrize("record", [{}, {"names": 3, "counts": {}}, {"names": {}}])
def test_an_invalid_record(record: dict[str, object]) -> None:
    with pytest.raises(DataError, match="split record is incomplete"):
        splits_from_record(digits(), record)
