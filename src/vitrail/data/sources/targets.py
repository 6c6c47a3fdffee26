"""Targets: what images are labelled with if not with one class each: several labels, or numbers.

A source whose images have targets holds them as `targets`. Its classes and `labels` are then strata: groups of similar
images, by which splits and samples are drawn and counted. The targets of subsets and other wrappers follow from those
of the source behind them.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.source import Source, Subset

Kind = Literal["classes", "labels", "values"]
"""What images are labelled with: one class each, any number of labels, or numbers."""


class Labelling(NamedTuple):
    """How to read the labels of a dataset."""

    kind: Kind | None = None
    """What the images are labelled with; None: whatever the labels look like."""
    columns: tuple[str, ...] = ()
    """The columns of a manifest that hold the labels; empty: by their names."""


AUTOMATIC = Labelling()


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of N images: which of K labels they have, or K numbers."""

    kind: Literal["labels", "values"]
    names: tuple[str, ...]
    """The labels; or what the numbers are, the names of their columns."""
    values: NDArray[np.uint8] | NDArray[np.float64]
    """(N, K). Labels: 0 or 1. Numbers: NaN in the row of an image without them."""
    reason: str = ""
    """Why they were taken for targets of this kind: "label holds lists"."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.values)

    def take(self, indices: NDArray[np.int64]) -> "Targets":
        """Return the targets of some images."""
        return replace(self, values=self.values[indices])


def targets_of(source: Source) -> Targets | None:
    """Return the targets of a source's images; None if each has a class."""
    own = getattr(source, "targets", None)
    if isinstance(own, Targets):
        return own
    base = getattr(source, "base", None)
    if base is None:
        return None
    targets = targets_of(base)
    return targets.take(source.indices) if targets is not None and isinstance(source, Subset) else targets


def _stored_targets(source: Source) -> Targets | None:
    """Return the targets that the source or one behind it holds, of all of its images."""
    base: Any = source
    while base is not None:
        own = getattr(base, "targets", None)
        if isinstance(own, Targets):
            return own
        base = getattr(base, "base", None)
    return None


def label_rows(source: Source) -> NDArray[Any]:
    """Return what each image is labelled with: class indices (N), or targets (N, K)."""
    return labels_at(source, np.arange(len(source)))


def labels_at(source: Source, indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return the same for some images, in time that does not depend on the size of the source."""
    base: Any = source
    places = indices
    while base is not None:
        own = getattr(base, "targets", None)
        if isinstance(own, Targets):
            return own.values[places]
        places = base.indices[places] if isinstance(base, Subset) else places
        base = getattr(base, "base", None)
    return source.labels[indices].astype(np.int64)


def label_texts(source: Source, indices: NDArray[np.int64]) -> list[str | None]:
    """Return what images are labelled with as text: "cat", "cat;outdoor" or "age=37.5"; None if it is unknown."""
    known, rows = source.labels[indices], labels_at(source, indices)
    targets = _stored_targets(source)
    if targets is None:
        return [None if label < 0 else source.classes[label] for label in known.tolist()]
    texts = []
    for row in rows.tolist():
        if targets.kind == "labels":
            texts.append(";".join(name for name, has in zip(targets.names, row, strict=True) if has))
        else:
            texts.append("; ".join(f"{name}={value:g}" for name, value in zip(targets.names, row, strict=True)))
    return [None if label < 0 else text for label, text in zip(known.tolist(), texts, strict=True)]


def output_names_of(source: Source) -> tuple[str, ...]:
    """Return the names of what the images are labelled with: classes, labels or columns."""
    targets = _stored_targets(source)
    return source.classes if targets is None else targets.names
