"""Strata: groups of images with similar targets, which stand for classes when splits and samples are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.source import Labels
from vitrail.data.sources.targets import Targets

FEWEST = 10
"""A label, or a range of numbers, with fewer images than this has no stratum of its own."""
MOST_RANGES = 10
OTHER = "other"
"""The stratum of images whose labels are all rare, or which have none."""


@dataclass(frozen=True, eq=False)
class Strata:
    """Strata that were made of the targets of some images; other images can be assigned to them."""

    names: tuple[str, ...]
    order: tuple[int, ...] = ()
    """The labels that have strata, by index, the rarest first."""
    edges: tuple[float, ...] = ()
    """The lower ends of all ranges but the first."""

    def assign(self, targets: Targets) -> Labels:
        """Return the stratum of every image: that of its rarest label, or of its first number; -1 without numbers."""
        if targets.kind == "values":
            first = targets.values[:, 0]
            found = np.searchsorted(np.array(self.edges), first, side="right").astype(np.int64)
            found[np.isnan(first)] = -1
            return found
        strata = np.full(len(targets), len(self.order), np.int64)
        for place, label in reversed(list(enumerate(self.order))):
            strata[targets.values[:, label] > 0] = place
        return np.minimum(strata, len(self.names) - 1)


def strata_of(targets: Targets, known: NDArray[np.bool_] | None = None) -> Strata:
    """Return strata for images with these targets; of labels, only images that are `known` to have some or none."""
    if targets.kind == "values":
        numbers = targets.values[:, 0]
        return _ranges(np.sort(numbers[~np.isnan(numbers)]))
    values = targets.values if known is None else targets.values[known]
    return _of_labels(targets.names, values > 0)


def _of_labels(names: Sequence[str], has: NDArray[np.bool_]) -> Strata:
    """Return a stratum for each label, unless its images nearly all have a rarer one, and one for all others."""
    left = np.ones(len(has), bool)
    counts = has.sum(axis=0)
    order = []
    for label in np.argsort(counts, kind="stable").tolist():
        mine = left & has[:, label] if counts[label] >= FEWEST else left[:0]
        if mine.sum() >= FEWEST:
            order.append(label)
            left &= ~mine
    kept = [names[label] for label in order]
    if not left.any() and kept:
        return Strata(tuple(kept), tuple(order))
    if 0 < left.sum() < FEWEST and kept:  # too few for a stratum of their own: they join the last
        return Strata(tuple(kept), tuple(order))
    return Strata((*kept, _unused(OTHER, names)), tuple(order))


def _unused(name: str, names: Sequence[str]) -> str:
    while name in names:
        name = f"{name} labels"
    return name


def _ranges(ordered: NDArray[np.float64]) -> Strata:
    """Return ranges with about as many numbers each."""
    count = max(1, min(MOST_RANGES, len(ordered) // FEWEST))
    if not len(ordered):
        return Strata(("no numbers",))
    starts = [0]
    for place in range(1, count):
        # Equal numbers are in one range: this one, if the one before would have too few without them.
        edge = ordered[len(ordered) * place // count]
        before, after = (int(np.searchsorted(ordered, edge, side=side)) for side in ("left", "right"))
        start = before if before - starts[-1] >= FEWEST else after
        if start - starts[-1] >= FEWEST and len(ordered) - start >= FEWEST:
            starts.append(start)
    ends = [*(start - 1 for start in starts[1:]), len(ordered) - 1]
    spans = [(float(ordered[start]), float(ordered[end])) for start, end in zip(starts, ends, strict=True)]
    return Strata(_range_names(spans), edges=tuple(low for low, _ in spans[1:]))


def _range_names(spans: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    """Return names such as "12.5 to 30", with as many digits as it takes to tell them apart."""
    names: list[str] = []
    for digits in (4, 6, 9, 17):
        ends = [(_text(low, digits), _text(high, digits)) for low, high in spans]
        names = [low if low == high else f"{low} to {high}" for low, high in ends]
        distinct = [text for low, high in ends for text in {low, high}]
        if len(set(distinct)) == len(distinct):
            break
    return tuple(names)


def _text(number: float, digits: int) -> str:
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else f"{number:.{digits}g}"


def cover(targets: Targets, splits: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Return splits in which every frequent label occurs: for each that is missing, an image is moved there.

    The image comes from the split with the most images of the label, and is one that is missed least.
    """
    if targets.kind == "values":
        return list(splits)
    has = targets.values > 0
    where = np.full(len(targets), -1, np.int64)
    for place, indices in enumerate(splits):
        where[indices] = place
    present = [place for place, indices in enumerate(splits) if len(indices)]
    counts = np.stack([has[where == place].sum(axis=0) for place in range(len(splits))])
    frequent = counts.sum(axis=0) >= FEWEST
    for label in np.flatnonzero(frequent).tolist():
        for place in present:
            if counts[place, label]:
                continue
            source = int(np.argmax(counts[:, label]))
            images = np.flatnonzero((where == source) & has[:, label])
            # An image is missed if it has the only label of a kind in its split.
            missed = (has[images] & (counts[source] == 1) & frequent).sum(axis=1)
            image = int(images[np.argmin(missed)])
            where[image] = place
            counts[source] -= has[image]
            counts[place] += has[image]
    return [np.flatnonzero(where == place) for place in range(len(splits))]
