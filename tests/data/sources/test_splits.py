"""Train, validation and test splits, and subsets of the training split."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.sources.source import Arrays, Subset, digits
from vitrail.data.sources.splits import (
    keys_of,
    split_indices,
    split_source,
    splits_from_record,
    subset_indices,
    take_subset,
)
from vitrail.errors import ConfigError, DataError

PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)
counts_of_classes = st.lists(st.integers(3, 60), min_size=1, max_size=6)
shares = st.floats(0, 0.25)
fractions = st.floats(0, 1, exclude_min=True)
seeds = st.integers(0, 2**64 - 1)


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


# ── subsets of the training split ──


@PROPERTY
@given(counts_of_classes, seeds, fractions)
def test_a_fraction_is_stratified(counts: list[int], seed: int, fraction: float) -> None:
    labels = labels_of(counts, 0)
    subset = subset_indices(labels, seed=seed, fraction=fraction)
    assert subset.dtype == np.int64
    assert (np.diff(subset) > 0).all()
    kept = np.bincount(labels[subset], minlength=len(counts))
    assert kept.min() >= 1
    assert (np.abs(kept - np.array(counts) * fraction) <= 1).all()
    assert (kept <= counts).all()


@PROPERTY
@given(counts_of_classes, seeds, st.integers(1, 80))
def test_at_most_so_many_images_per_class(counts: list[int], seed: int, most: int) -> None:
    labels = labels_of(counts, 0)
    subset = subset_indices(labels, seed=seed, per_class=most)
    assert np.bincount(labels[subset], minlength=len(counts)).tolist() == [min(count, most) for count in counts]


@PROPERTY
@given(counts_of_classes, seeds, fractions, fractions, st.integers(1, 80), st.integers(1, 80))
def test_a_smaller_subset_is_contained_in_a_larger_one(
    counts: list[int], seed: int, one: float, other: float, few: int, many: int
) -> None:
    labels = labels_of(counts, 0)

    def drawn(fraction: float = 1.0, per_class: int | None = None) -> set[int]:
        return set(subset_indices(labels, seed=seed, fraction=fraction, per_class=per_class).tolist())

    assert drawn(min(one, other)) <= drawn(max(one, other)) <= drawn() == set(range(len(labels)))
    assert drawn(per_class=min(few, many)) <= drawn(per_class=max(few, many))
    # Both settings take the same order: what keeps fewer images of every class is contained in the other.
    kept = [max(1, math.floor(count * one + 0.5)) for count in counts]
    if all(few <= number for number in kept):
        assert drawn(per_class=few) <= drawn(one)
    if all(number <= few for number in kept):
        assert drawn(one) <= drawn(per_class=few)


@PROPERTY
@given(counts_of_classes, seeds, fractions)
def test_a_subset_depends_on_labels_and_seed_only(counts: list[int], seed: int, fraction: float) -> None:
    labels = labels_of(counts, 1)
    once, again = (subset_indices(labels, seed=seed, fraction=fraction).tolist() for _ in range(2))
    assert once == again
    # The first class is drawn independently of the others.
    first = np.flatnonzero(labels == 0)
    alone = subset_indices(np.zeros(len(first), np.int64), seed=seed, fraction=fraction)
    assert first[alone].tolist() == [index for index in once if labels[index] == 0]


@PROPERTY
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_seeds_draw_different_subsets(one: int, other: int) -> None:
    labels = np.repeat([0, 1], 60)
    first, second = (subset_indices(labels, seed=seed, fraction=0.5).tolist() for seed in (one, other))
    assert (first == second) == (one == other)


def test_subsets_are_stable() -> None:
    # These numbers must never change: a run resumed with a newer version must get the same images.
    assert subset_indices(np.repeat([0, 1], 20), seed=0, fraction=0.1).tolist() == [2, 17, 31, 38]


@PROPERTY
@given(st.integers(0, 2**32))
def test_the_subset_is_drawn_independently_of_the_splits(seed: int) -> None:
    """With one key for both draws, the subset would be the images that come first in the draw of the splits."""
    labels = np.zeros(120, np.int64)
    _, val, _ = split_indices(labels, seed=seed, val=0.5, test=0)
    assert subset_indices(labels, seed=seed, fraction=0.5).tolist() != val.tolist()


@PROPERTY
@given(seeds, fractions)
def test_validation_and_test_stay_whole(seed: int, fraction: float) -> None:
    whole = split_source(digits(), seed=seed)
    splits = take_subset(whole, seed=seed, fraction=fraction)
    assert (splits.val, splits.test) == (whole.val, whole.test)
    assert splits.record["names"]["val"] == whole.record["names"]["val"]
    assert splits.record["names"]["test"] == whole.record["names"]["test"]
    assert set(keys_of(splits.train)) <= set(keys_of(whole.train))


def test_the_whole_training_split_has_no_subset() -> None:
    splits = split_source(digits())
    assert take_subset(splits, seed=0) is splits
    assert "subset" not in splits.record
    assert "train" not in splits.record["names"]


@pytest.mark.parametrize(("fraction", "per_class"), [(0.3, None), (1.0, 5), (1.0, 1000)])
def test_a_recorded_subset_is_restored(fraction: float, per_class: int | None) -> None:
    whole = split_source(digits(), seed=2)
    splits = take_subset(whole, seed=2, fraction=fraction, per_class=per_class)
    record = json.loads(json.dumps(splits.record))
    assert record["subset"] == {
        "seed": 2, "fraction": fraction, "per_class": per_class, "drawn_from": whole.record["counts"]["train"],
    }  # fmt: skip
    assert sum(record["counts"]["train"].values()) == len(record["names"]["train"]) == len(splits.train)
    again = splits_from_record(digits(), record)
    for before, after in zip(splits[:3], again[:3], strict=True):
        assert before.indices.tolist() == after.indices.tolist()


def test_a_recorded_training_image_is_missing() -> None:
    whole = digits()
    record = take_subset(split_source(whole, val=0, test=0), seed=0, per_class=3).record
    last = max(int(name.split()[1]) for name in record["names"]["train"])
    with pytest.raises(DataError, match=f"^image {last}, of the recorded train split, is missing; restore it, or"):
        splits_from_record(chosen(whole, np.arange(last)), record)
    # Images that were left out do not matter.
    assert len(splits_from_record(chosen(whole, np.arange(last + 1)), record).train) == 30
    with pytest.raises(DataError, match="split record is incomplete"):
        splits_from_record(whole, {**record, "names": {"train": 3}})


@pytest.mark.parametrize(
    ("fraction", "per_class", "message"),
    [
        (0, None, "the fraction is 0; it should be above 0 and at most 1"),
        (-0.1, None, "the fraction is -0.1"),
        (1.1, None, "the fraction is 1.1"),
        (float("nan"), None, "the fraction is nan"),
        (1, 0, "per_class is 0; it should be at least 1"),
        (0.5, 3, "fraction is 0.5 and per_class is 3; leave one of them out"),
    ],
)
def test_invalid_subsets(fraction: float, per_class: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        subset_indices(np.zeros(9, np.int64), seed=0, fraction=fraction, per_class=per_class)
    with pytest.raises(ConfigError, match=message):
        take_subset(split_source(digits()), seed=0, fraction=fraction, per_class=per_class)


def test_a_subset_needs_labels() -> None:
    for labels in (np.array([0, -1, 0]), np.zeros(0, np.int64)):
        with pytest.raises(DataError, match="without labels"):
            subset_indices(labels, seed=0, fraction=0.5)
