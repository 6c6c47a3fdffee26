"""What a check says about images with several labels, numbers or masks, besides what it says about any images."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import Targets, targets_of
from vitrail.text import number, plural


@dataclass(frozen=True)
class LabelCount:
    """How many images have a label."""

    name: str
    images: int


@dataclass(frozen=True)
class LabelFacts:
    """The labels of all images."""

    labels: int
    per_image: float
    """Mean number of labels of an image."""
    without: int
    """Number of images that have no label."""
    most: LabelCount
    """The most frequent label, and how many images have it."""
    fewest: LabelCount


@dataclass(frozen=True)
class ColumnFacts:
    """The numbers in one column."""

    name: str
    minimum: float
    mean: float
    maximum: float
    missing: int
    """Number of images without one."""

    @property
    def scale(self) -> float:
        """The largest size, to print all with as many decimals."""
        return max(abs(self.minimum), abs(self.maximum))


@dataclass(frozen=True)
class PixelFacts:
    """A class of the pixels in masks."""

    name: str
    images: int
    """Number of images with it."""
    fraction: float
    """Its fraction of the labelled pixels of all images."""


@dataclass(frozen=True)
class TargetFacts:
    """The targets of the images of all splits."""

    kind: Literal["labels", "values", "masks"]
    reason: str
    """Why the labels were taken for such targets; empty if that was asked for."""
    images: dict[str, int]
    """Images by split."""
    labels: LabelFacts | None
    """None for numbers and masks."""
    columns: tuple[ColumnFacts, ...]
    """Empty for labels and masks."""
    pixels: tuple[PixelFacts, ...] = ()
    """Of masks: their classes."""

    @property
    def brief(self) -> str:
        """For a summary: "with 20 labels"."""
        if self.kind == "masks":
            return f"with masks of {plural(len(self.pixels), 'class', 'classes')}"
        if self.labels is not None:
            return f"with {plural(self.labels.labels, 'label')}"
        shown = ", ".join(column.name for column in self.columns[:3])
        more = f" and {len(self.columns) - 3:,} more" if len(self.columns) > 3 else ""
        return f"with {plural(len(self.columns), 'number')} each ({shown}{more})"

    @property
    def lines(self) -> tuple[str, ...]:
        """Sentences about labels."""
        if self.labels is None:
            return ()
        most, fewest = self.labels.most, self.labels.fewest
        return (
            f"an image has {number(self.labels.per_image)} of {plural(self.labels.labels, 'label')} on average; "
            f"{plural(self.labels.without, 'image has', 'images have')} none",
            f"most frequent: {most.name!r} with {plural(most.images, 'image')}; rarest: {fewest.name!r} with "
            f"{plural(fewest.images, 'image')}",
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values."""
        return asdict(self)


def target_facts(sources: Mapping[str, Source]) -> TargetFacts | None:
    """Return facts about the targets of all splits; None if images have one class each."""
    each = [targets for source in sources.values() if (targets := targets_of(source)) is not None]
    if not each:
        return None
    first, values = each[0], np.concatenate([targets.values for targets in each])
    known = np.concatenate([source.labels >= 0 for source in sources.values() if targets_of(source) is not None])
    images = {name: len(source) for name, source in sources.items()}
    if first.kind == "masks":
        return TargetFacts("masks", first.reason, images, None, (), _pixels(first.names, values))
    if first.kind == "values":
        columns = tuple(_column(name, values[:, place]) for place, name in enumerate(first.names))
        return TargetFacts("values", first.reason, images, None, columns)
    return TargetFacts("labels", first.reason, images, _labels(first.names, values[known] > 0), ())


def _labels(names: Sequence[str], has: np.ndarray[Any, np.dtype[np.bool_]]) -> LabelFacts:
    counts = has.sum(axis=0)
    most, fewest = int(np.argmax(counts)), int(np.argmin(counts))
    return LabelFacts(
        labels=len(names),
        per_image=float(has.sum() / max(1, len(has))),
        without=int((~has.any(axis=1)).sum()),
        most=LabelCount(names[most], int(counts[most])),
        fewest=LabelCount(names[fewest], int(counts[fewest])),
    )


def _pixels(names: Sequence[str], counts: np.ndarray[Any, np.dtype[Any]]) -> tuple[PixelFacts, ...]:
    images, sums = (counts > 0).sum(axis=0).tolist(), counts.sum(axis=0, dtype=np.int64)
    shares = (sums / max(1, int(sums.sum()))).tolist()
    return tuple(PixelFacts(*row) for row in zip(names, images, shares, strict=True))


def _column(name: str, numbers: np.ndarray[Any, np.dtype[Any]]) -> ColumnFacts:
    known = numbers[~np.isnan(numbers)]
    if not len(known):
        return ColumnFacts(name, 0.0, 0.0, 0.0, len(numbers))
    return ColumnFacts(
        name, float(known.min()), float(known.mean()), float(known.max()), int(len(numbers) - len(known))
    )


def count_labels(targets: Targets) -> dict[str, int]:
    """Return how many images have each label, or pixels of each class."""
    return dict(zip(targets.names, (targets.values > 0).sum(axis=0).tolist(), strict=True))
