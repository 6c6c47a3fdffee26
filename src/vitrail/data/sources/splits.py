"""Dividing images into the split for training, the split that chooses, and the split for the result."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.faults import settle
from vitrail.data.sources.source import Keyed, Labels, Source, Subset
from vitrail.errors import ConfigError, DataError

Indices = NDArray[np.int64]
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""What folders, shards and split columns may call the splits, and which split that is."""


class Splits(NamedTuple):
    """The splits of a data set. What chooses (val) and what gives the result (test) is never trained on."""

    train: Source
    val: Source | None
    test: Source | None
    record: dict[str, Any]
    """How the splits came about, as JSON can hold it; `splits_from_record` makes the same splits from it."""


def split_of(source: Source, indices: Indices) -> Subset:
    """Return some images of a source; a split of a split is a split of the whole."""
    return Subset(source.whole, source.indices[indices]) if isinstance(source, Subset) else Subset(source, indices)


def split_indices(
    labels: Labels, *, seed: int, val: float, test: float, classes: Sequence[str] | None = None
) -> tuple[Indices, Indices, Indices]:
    """Divide images into train, val and test, each class by the same shares; return sorted indices.

    A pure function of the labels and the seed. A split with share 0 is empty; every other one has at least one image
    of each class. `classes` gives names to messages.
    """
    _check_shares(val, test)
    if not len(labels) or int(labels.min()) < 0:
        raise DataError("images without labels cannot be divided into splits; give every image a label")
    settle(too_few(labels, val=val, test=test, classes=classes), "the data", None)
    by_class = np.argsort(labels, kind="stable")
    numbers, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    taken: dict[str, list[Indices]] = {"train": [], "val": [], "test": []}
    for number, start, count in zip(numbers.tolist(), starts.tolist(), counts.tolist(), strict=True):
        for_val, for_test = _counts(count, val, test)
        # Raw output and a stable sort: NumPy promises that neither changes from one version to the next.
        key = np.array([seed % 2**64, number], np.uint64)
        order = np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
        shuffled = by_class[start : start + count][order]
        taken["val"].append(shuffled[:for_val])
        taken["test"].append(shuffled[for_val : for_val + for_test])
        taken["train"].append(shuffled[for_val + for_test :])
    train_split, val_split, test_split = (np.sort(np.concatenate(taken[split])) for split in ("train", "val", "test"))
    return train_split, val_split, test_split


def _check_shares(val: float, test: float) -> None:
    for name, share in (("val", val), ("test", test)):
        if not 0 <= share < 1:
            raise ConfigError(f"the share of {name} is {share}; it is at least 0 and below 1")
    if val + test >= 1:
        raise ConfigError(f"the shares of val {val} and test {test} leave nothing to train on; make them smaller")


def too_few(labels: Labels, *, val: float, test: float, classes: Sequence[str] | None = None) -> list[str]:
    """Say of every class that has too few images for all splits."""
    needed = 1 + (val > 0) + (test > 0)
    numbers, counts = np.unique(labels[labels >= 0], return_counts=True)
    return [
        f"class {str(number) if classes is None else classes[number]!r} has "
        f"{'1 image' if count == 1 else f'{count} images'}, too few for {needed} splits; "
        "add some, remove the class, or ask for fewer splits"
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        if count < needed
    ]


def _counts(count: int, val: float, test: float) -> tuple[int, int]:
    """Return how many images of a class go to val and to test: the nearest numbers that leave one for each split."""
    wanted = [count * val, count * test]
    given = [max(1, math.floor(share + 0.5)) if share else 0 for share in wanted]
    while sum(given) >= count:  # rounding left nothing to train on
        over = [(number - share if number > 1 else -math.inf) for number, share in zip(given, wanted, strict=True)]
        given[over.index(max(over))] -= 1
    return given[0], given[1]


def split_source(source: Source, *, seed: int = 0, val: float = 0.1, test: float = 0.2) -> Splits:
    """Divide a source into its splits."""
    indices = split_indices(source.labels, seed=seed, val=val, test=test, classes=source.classes)
    train_split, val_split, test_split = (split_of(source, split) if len(split) else None for split in indices)
    if train_split is None:
        raise DataError("there are no images to train on")
    record = make_record("stratified", train_split, val_split, test_split, seed=seed, shares={"val": val, "test": test})
    return Splits(train_split, val_split, test_split, record)


def make_record(
    method: str,
    train: Source,
    val: Source | None,
    test: Source | None,
    *,
    seed: int | None = None,
    shares: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Write down how splits came about. `method` is "stratified" or "given", `shares` those splits that were drawn."""
    splits = {"train": train, "val": val, "test": test}
    return {
        "method": method,
        "seed": seed,
        "shares": dict(shares or {}),
        "counts": {name: _class_counts(split) for name, split in splits.items() if split is not None},
        "names": {name: keys_of(split) for name, split in splits.items() if split is not None and name != "train"},
    }


def _class_counts(source: Source) -> dict[str, int]:
    counts = np.bincount(source.labels, minlength=len(source.classes)).tolist()
    return dict(zip(source.classes, counts, strict=True))


def keys_of(source: Source) -> list[str]:
    """Return what a record of a split calls the images of a source."""
    whole, indices = (
        (source.whole, source.indices.tolist()) if isinstance(source, Subset) else (source, range(len(source)))
    )
    find = whole.key if isinstance(whole, Keyed) else whole.name
    return [find(index) for index in indices]


def splits_from_record(source: Source, record: Mapping[str, Any]) -> Splits:
    """Make the splits of a source that a record tells of. The source must have the same images as then."""
    try:
        names: dict[str, list[str]] = {split: list(record["names"].get(split, [])) for split in ("val", "test")}
        counts: dict[str, dict[str, int]] = dict(record["counts"])
    except (KeyError, TypeError, AttributeError):
        raise DataError("the record of the split is incomplete; start again without it") from None
    place_of = {key: index for index, key in enumerate(keys_of(source))}
    found: dict[str, Indices] = {}
    for split, keys in names.items():
        gone = [key for key in keys if key not in place_of]
        if gone:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            raise DataError(
                f"{gone[0]}{more}, of the {split} split of the recorded split, is gone; put it back, or start a new run"
            )
        found[split] = np.sort(np.array([place_of[key] for key in keys], np.int64))
    rest = np.ones(len(source), bool)
    for indices in found.values():
        rest[indices] = False
    train = split_of(source, np.flatnonzero(rest))
    val, test = (split_of(source, found[split]) if split in counts else None for split in ("val", "test"))
    for name, part_now in (("train", train), ("val", val), ("test", test)):
        if part_now is not None:
            check_counts(name, part_now, counts.get(name, {}))
    return Splits(train, val, test, dict(record))


def check_counts(name: str, split: Source, recorded: Mapping[str, int]) -> None:
    """See to it that a split has as many images of each class as a record says."""
    now = _class_counts(split)
    for label in [*recorded, *now]:
        before, after = recorded.get(label, 0), now.get(label, 0)
        if before != after:
            raise DataError(
                f"class {label!r} has {after} images in the {name} split, but had {before} "
                "when the split was recorded; bring back the same images, or start a new run"
            )
