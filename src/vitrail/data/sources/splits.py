"""Split a dataset into train, validation and test, and draw a subset of the training split."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.labels import report_faults
from vitrail.data.sources.source import Keyed, Labels, Source, Subset
from vitrail.data.sources.strata import cover, strata_of
from vitrail.data.sources.targets import targets_of
from vitrail.errors import ConfigError, DataError

Indices = NDArray[np.int64]
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Accepted names of splits in folders, shards and split columns."""
_SPLIT, _SUBSET = 0, 2**63
"""Added to the class index in the key of a draw. No class index is that large, so the two draws are independent."""


class Splits(NamedTuple):
    """The splits of a dataset. Neither the validation nor the test split is used for training."""

    train: Source
    val: Source | None
    test: Source | None
    record: dict[str, Any]
    """How the splits were made, as JSON-compatible values; `splits_from_record` restores them from it."""


def split_of(source: Source, indices: Indices) -> Subset:
    """Return a subset of a source; a subset of a subset refers to the whole source."""
    return Subset(source.base, source.indices[indices]) if isinstance(source, Subset) else Subset(source, indices)


def split_indices(
    labels: Labels, *, seed: int, val: float, test: float, classes: Sequence[str] | None = None
) -> tuple[Indices, Indices, Indices]:
    """Split images into train, validation and test, stratified by class; return sorted indices.

    A pure function of the labels and the seed. A split with fraction 0 is empty; every other one has at least one image
    of each class. `classes` are names for messages.
    """
    _check_fractions(val, test)
    _check_labelled(labels)
    report_faults(too_few(labels, val=val, test=test, classes=classes), "the data", None)
    taken: dict[str, list[Indices]] = {"train": [], "val": [], "test": []}
    for shuffled in _shuffled_classes(labels, seed, _SPLIT):
        for_val, for_test = _counts(len(shuffled), val, test)
        taken["val"].append(shuffled[:for_val])
        taken["test"].append(shuffled[for_val : for_val + for_test])
        taken["train"].append(shuffled[for_val + for_test :])
    train_split, val_split, test_split = (np.sort(np.concatenate(taken[split])) for split in ("train", "val", "test"))
    return train_split, val_split, test_split


def subset_indices(labels: Labels, *, seed: int, fraction: float = 1.0, per_class: int | None = None) -> Indices:
    """Draw a fraction of every class, or at most `per_class` images of it; return sorted indices.

    A pure function of the labels and the seed. It takes the first images of every class in one order, so with the same
    seed a smaller subset is contained in every larger one. A class keeps at least one image.
    """
    check_subset(fraction, per_class)
    _check_labelled(labels)
    taken = []
    for shuffled in _shuffled_classes(labels, seed, _SUBSET):
        rounded = max(1, math.floor(len(shuffled) * fraction + 0.5))
        taken.append(shuffled[: rounded if per_class is None else per_class])
    return np.sort(np.concatenate(taken))


def check_subset(fraction: float, per_class: int | None) -> None:
    """Raise unless a subset can be drawn with these settings."""
    if not 0 < fraction <= 1:
        raise ConfigError(f"the fraction is {fraction}; it should be above 0 and at most 1")
    if per_class is not None and per_class < 1:
        raise ConfigError(f"per_class is {per_class}; it should be at least 1")
    if fraction < 1 and per_class is not None:
        raise ConfigError(f"fraction is {fraction} and per_class is {per_class}; leave one of them out")


def _shuffled_classes(labels: Labels, seed: int, draw: int) -> Iterator[Indices]:
    """Yield the images of each class in an order drawn by the seed, independently of the other classes."""
    by_class = np.argsort(labels, kind="stable")
    numbers, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    for number, start, count in zip(numbers.tolist(), starts.tolist(), counts.tolist(), strict=True):
        # Raw output and a stable sort: NumPy guarantees that neither changes between versions.
        key = np.array([seed % 2**64, number + draw], np.uint64)
        order = np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
        yield by_class[start : start + count][order]


def _check_labelled(labels: Labels) -> None:
    if not len(labels) or int(labels.min()) < 0:
        raise DataError("images without labels cannot be split; label every image")


def _check_fractions(val: float, test: float) -> None:
    for name, fraction in (("val", val), ("test", test)):
        if not 0 <= fraction < 1:
            raise ConfigError(f"the {name} fraction is {fraction}; it should be at least 0 and below 1")
    if val + test >= 1:
        raise ConfigError(f"the fractions of val {val} and test {test} leave no training images; make them smaller")


def too_few(labels: Labels, *, val: float, test: float, classes: Sequence[str] | None = None) -> list[str]:
    """Report the classes with too few images for all splits."""
    needed = 1 + (val > 0) + (test > 0)
    numbers, counts = np.unique(labels[labels >= 0], return_counts=True)
    return [
        f"class {str(number) if classes is None else classes[number]!r} has "
        f"{'1 image' if count == 1 else f'{count} images'}, too few for {needed} splits; "
        "add images, remove the class, or use fewer splits"
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        if count < needed
    ]


def too_few_images(source: Source, *, val: float, test: float) -> list[str]:
    """Report why the images of a source cannot be split."""
    if targets_of(source) is None:
        return too_few(source.labels, val=val, test=test, classes=source.classes)
    needed = 1 + (val > 0) + (test > 0)
    if len(source) >= needed:
        return []
    images = "1 image is" if len(source) == 1 else f"{len(source)} images are"
    return [f"{images} too few for {needed} splits; add images, or use fewer splits"]


def draw_split(source: Source, *, seed: int, val: float, test: float) -> tuple[Indices, Indices, Indices]:
    """Split the images of a source, stratified by class; or by strata, with every frequent label in each split.

    The strata are those of these images: in a part of a dataset, its strata may have too few.
    """
    targets = targets_of(source)
    if targets is None:
        return split_indices(source.labels, seed=seed, val=val, test=test, classes=source.classes)
    _check_labelled(source.labels)
    report_faults(too_few_images(source, val=val, test=test), "the data", None)
    drawn = split_indices(strata_of(targets).assign(targets), seed=seed, val=val, test=test)
    train, val_split, test_split = cover(targets, drawn)
    return train, val_split, test_split


def _counts(count: int, val: float, test: float) -> tuple[int, int]:
    """Return how many images of a class go to validation and test: rounded, leaving at least one for each split."""
    exact = [count * val, count * test]
    rounded = [max(1, math.floor(number + 0.5)) if number else 0 for number in exact]
    while sum(rounded) >= count:  # rounding left no training images
        over = [(number - target if number > 1 else -math.inf) for number, target in zip(rounded, exact, strict=True)]
        rounded[over.index(max(over))] -= 1
    return rounded[0], rounded[1]


def split_source(source: Source, *, seed: int = 0, val: float = 0.1, test: float = 0.2) -> Splits:
    """Split a source."""
    indices = draw_split(source, seed=seed, val=val, test=test)
    train_split, val_split, test_split = (split_of(source, split) if len(split) else None for split in indices)
    if train_split is None:
        raise DataError("no images to train on")
    record = make_record(
        "stratified", train_split, val_split, test_split, seed=seed, fractions={"val": val, "test": test}
    )
    return Splits(train_split, val_split, test_split, record)


def take_subset(splits: Splits, *, seed: int, fraction: float = 1.0, per_class: int | None = None) -> Splits:
    """Reduce the training split to a fraction of every class, or to `per_class` images of it.

    The images that are left out are in no split. The record then holds the names of the training images too, because
    they are no longer all images that are in neither of the other splits.
    """
    check_subset(fraction, per_class)
    if fraction == 1 and per_class is None:
        return splits
    whole, record = splits.train, splits.record
    train = split_of(whole, subset_indices(whole.labels, seed=seed, fraction=fraction, per_class=per_class))
    drawn = {"seed": seed, "fraction": fraction, "per_class": per_class, "drawn_from": _class_counts(whole)}
    record = {
        **record,
        "counts": {**record["counts"], "train": _class_counts(train)},
        "names": {**record["names"], "train": keys_of(train)},
        "subset": drawn,
    }
    return splits._replace(train=train, record=record)


def make_record(
    method: str,
    train: Source,
    val: Source | None,
    test: Source | None,
    *,
    seed: int | None = None,
    fractions: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Record how splits were made. `method` is "stratified" or "given"; `fractions` are those of the drawn splits."""
    splits = {"train": train, "val": val, "test": test}
    return {
        "method": method,
        "seed": seed,
        "fractions": dict(fractions or {}),
        "counts": {name: _class_counts(split) for name, split in splits.items() if split is not None},
        "names": {name: keys_of(split) for name, split in splits.items() if split is not None and name != "train"},
    }


def _class_counts(source: Source) -> dict[str, int]:
    counts = np.bincount(source.labels, minlength=len(source.classes)).tolist()
    return dict(zip(source.classes, counts, strict=True))


def keys_of(source: Source) -> list[str]:
    """Return the keys of a source's images in a split record."""
    base, indices = (
        (source.base, source.indices.tolist()) if isinstance(source, Subset) else (source, range(len(source)))
    )
    find = base.key if isinstance(base, Keyed) else base.name
    return [find(index) for index in indices]


def splits_from_record(source: Source, record: Mapping[str, Any]) -> Splits:
    """Restore recorded splits of a source, which must have the same images."""
    try:
        names = {split: list(record["names"].get(split, [])) for split in ("val", "test")}
        if "train" in record["names"]:  # of a run on a subset; the names of a whole training split are not recorded
            names["train"] = list(record["names"]["train"])
        counts: dict[str, dict[str, int]] = dict(record["counts"])
    except (KeyError, TypeError, AttributeError):
        raise DataError("the split record is incomplete; start again without it") from None
    place_of = {key: index for index, key in enumerate(keys_of(source))}
    restored: dict[str, Indices] = {}
    for split, keys in names.items():
        gone = [key for key in keys if key not in place_of]
        if gone:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            raise DataError(
                f"{gone[0]}{more}, of the recorded {split} split, is missing; restore it, or start a new run"
            )
        restored[split] = np.sort(np.array([place_of[key] for key in keys], np.int64))
    rest = np.ones(len(source), bool)
    rest[np.concatenate([restored["val"], restored["test"]])] = False
    remaining = np.flatnonzero(rest)
    train = split_of(source, np.intersect1d(remaining, restored["train"]) if "train" in restored else remaining)
    val, test = (split_of(source, restored[split]) if split in counts else None for split in ("val", "test"))
    for name, split_now in (("train", train), ("val", val), ("test", test)):
        if split_now is not None:
            check_counts(name, split_now, counts.get(name, {}))
    return Splits(train, val, test, dict(record))


def check_counts(name: str, split: Source, recorded: Mapping[str, int]) -> None:
    """Raise unless a split has the recorded number of images of each class."""
    now = _class_counts(split)
    for label in [*recorded, *now]:
        before, after = recorded.get(label, 0), now.get(label, 0)
        if before != after:
            raise DataError(
                f"class {label!r} has {after} images in the {name} split, but had {before} "
                "when the split was recorded; restore the same images, or start a new run"
            )
