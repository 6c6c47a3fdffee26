"""Targets: what images are labelled with if not with one class each: several labels, or numbers.

A source whose images have targets holds them as `targets`. Its classes and `labels` are then strata: groups of similar
images, by which splits and samples are drawn and counted. The targets of subsets and other wrappers follow from those
of the source behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.source import Source, Subset
from vitrail.errors import ConfigError, DataError
from vitrail.text import number

Kind = Literal["classes", "labels", "values"]
"""What images are labelled with: one class each, any number of labels, or numbers."""


class Labelling(NamedTuple):
    """How to read the labels of a dataset."""

    kind: Kind | None = None
    """What the images are labelled with; None: whatever the labels look like."""
    columns: tuple[str, ...] = ()
    """The columns of a table that hold the labels; empty: by their names."""
    separator: str | None = None
    """What is between the labels in a text such as "cat;outdoor"; None: | or ; or a comma, whichever there is."""


AUTOMATIC = Labelling()
IGNORED: Final = "ignored"
"""The targets of a source whose images are used without them."""


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of N images: which of K labels they have, or K numbers."""

    kind: Literal["labels", "values"]
    names: tuple[str, ...]
    """The labels; or what the numbers are, the names of their columns."""
    values: NDArray[np.uint8] | NDArray[np.float64]
    """(N, K). Labels: 0 or 1. Numbers: NaN in the row of an image without them."""
    reason: str = ""
    """Why they were taken for targets of this kind: "label holds several labels per image, such as 'cat;outdoor'"."""
    separator: str | None = None
    """What was between the labels in a text."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.values)

    @cached_property
    def present(self) -> tuple[str, ...]:
        """The labels that any image has."""
        return tuple(self.names[place] for place in np.flatnonzero((self.values > 0).any(axis=0)).tolist())

    def take(self, indices: NDArray[np.int64]) -> "Targets":
        """Return the targets of some images."""
        return replace(self, values=self.values[indices])

    def text(self, index: int) -> str:
        """Return the targets of an image as text: "cat, outdoor", or "age 37.5, height 1.8"."""
        row = self.values[index].tolist()
        if self.kind == "labels":
            return ", ".join(name for name, has in zip(self.names, row, strict=True) if has) or "no label"
        return ", ".join(f"{name} {number(value)}" for name, value in zip(self.names, row, strict=True))

    def renamed(self, names: Sequence[str]) -> "Targets":
        """Return these targets with the columns of other names; labels that are missing here are 0, numbers NaN."""
        if tuple(names) == self.names:
            return self
        here = {name: place for place, name in enumerate(self.names)}
        shape, nothing = (len(self), len(names)), 0 if self.kind == "labels" else np.nan
        values = np.full(shape, nothing, self.values.dtype)
        for place, name in enumerate(names):
            if name in here:
                values[:, place] = self.values[:, here[name]]
        return replace(self, names=tuple(names), values=values)


def targets_of(source: Source) -> Targets | None:
    """Return the targets of a source's images; None if each has a class."""
    own = getattr(source, "targets", None)
    if isinstance(own, Targets) or own == IGNORED:
        return own if isinstance(own, Targets) else None
    base = getattr(source, "base", None)
    if base is None:
        return None
    targets = targets_of(base)
    return targets.take(source.indices) if targets is not None and isinstance(source, Subset) else targets


def output_names_of(source: Source) -> tuple[str, ...]:
    """Return the names of what the images are labelled with: classes, labels or columns."""
    targets = targets_of(source)
    return source.classes if targets is None else targets.names


def check_labelling(labelling: Labelling, source: Source, title: str) -> None:
    """Raise if images have one class each, but should have several labels, or numbers."""
    if labelling.kind in ("labels", "values") and targets_of(source) is None and (source.labels >= 0).any():
        what = "several labels per image" if labelling.kind == "labels" else "numbers"
        raise DataError(f"{title} has one class per image, not {what}; list the images in a manifest with {what}")


def check_no_columns(labelling: Labelling, title: str) -> None:
    """Raise if columns of labels were named for data without columns."""
    if labelling.columns:
        raise ConfigError(f"{title} has no columns, so {labelling.columns[0]!r} cannot be one; do not name columns")


def resolved(labelling: Labelling, source: Source) -> Labelling:
    """Return the labelling that reads other splits as this one was read."""
    targets = targets_of(source)
    if targets is not None:
        return labelling._replace(kind=targets.kind, separator=targets.separator)
    known = labelling.kind is not None or not len(source.labels) or int(source.labels.max()) < 0
    return labelling if known else labelling._replace(kind="classes")
