"""Targets: what images are labelled with if not with one class each: several labels, numbers, or masks.

A source whose images have targets holds them as `targets`. Its classes and `labels` are then strata: groups of similar
images, by which splits and samples are drawn and counted. The targets of subsets and other wrappers follow from those
of the source behind them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.source import Source, Subset
from vitrail.errors import ConfigError, DataError
from vitrail.text import number

Kind = Literal["classes", "labels", "values", "masks"]
"""What images are labelled with: one class each, any number of labels, numbers, or one class per pixel."""


class Labelling(NamedTuple):
    """How to read the labels of a dataset."""

    kind: Kind | None = None
    """What the images are labelled with; None: whatever the labels look like."""
    columns: tuple[str, ...] = ()
    """The columns of a table that hold the labels; empty: by their names."""
    separator: str | None = None
    """What is between the labels in a text such as "cat;outdoor"; None: | or ; or a comma, whichever there is."""
    ignore: tuple[int, ...] = ()
    """The values in masks, besides 255, of pixels without a class."""


AUTOMATIC = Labelling()
IGNORED: Final = "ignored"
"""The targets of a source whose images are used without them."""


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of N images: which of K labels they have, or K numbers, or how many pixels K classes have in a mask.

    The masks themselves are read when they are needed (`masks`).
    """

    kind: Literal["labels", "values", "masks"]
    names: tuple[str, ...]
    """The labels; or what the numbers are, the names of their columns; or the classes of pixels."""
    values: NDArray[np.uint8] | NDArray[np.float64] | NDArray[np.int64]
    """(N, K). Labels: 0 or 1. Numbers: NaN in the row of an image without them. Masks: the number of pixels."""
    reason: str = ""
    """Why they were taken for targets of this kind: "label holds several labels per image, such as 'cat;outdoor'"."""
    separator: str | None = None
    """What was between the labels in a text."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.values)

    @cached_property
    def present(self) -> tuple[str, ...]:
        """The labels, or the classes of pixels, that any image has."""
        return tuple(self.names[place] for place in np.flatnonzero((self.values > 0).any(axis=0)).tolist())

    def take(self, indices: NDArray[np.int64]) -> "Targets":
        """Return the targets of some images."""
        return replace(self, values=self.values[indices])

    def text(self, index: int) -> str:
        """Return the targets of an image as text: "cat, outdoor", "age 37.5, height 1.8" or "pet 35%, grass 65%"."""
        row = self.values[index].tolist()
        if self.kind == "labels":
            return ", ".join(name for name, has in zip(self.names, row, strict=True) if has) or "no label"
        if self.kind == "masks":
            shares = [(name, count / max(1, sum(row))) for name, count in zip(self.names, row, strict=True) if count]
            texts = (f"{name} {100 * share:.0f}%" if share >= 0.005 else f"{name} <1%" for name, share in shares)
            return ", ".join(texts) or "no labelled pixel"
        return ", ".join(f"{name} {number(value)}" for name, value in zip(self.names, row, strict=True))

    def renamed(self, names: Sequence[str]) -> "Targets":
        """Return these targets with the columns of other names.

        Labels and classes that are missing here are 0, numbers NaN.
        """
        if tuple(names) == self.names:
            return self
        here = {name: place for place, name in enumerate(self.names)}
        shape, nothing = (len(self), len(names)), np.nan if self.kind == "values" else 0
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


def _stored_targets(source: Source) -> Targets | None:
    """Return the targets that the source or one behind it holds, of all of its images."""
    base: Any = source
    while base is not None:
        own = getattr(base, "targets", None)
        if isinstance(own, Targets) or own == IGNORED:
            return own if isinstance(own, Targets) else None
        base = getattr(base, "base", None)
    return None


def kind_of_labels(source: Source) -> Kind:
    """Return what the images of a source are labelled with."""
    targets = _stored_targets(source)
    return "classes" if targets is None else targets.kind


def label_rows(source: Source) -> NDArray[Any]:
    """Return what each image is labelled with: class indices (N), or targets (N, K)."""
    return labels_at(source, np.arange(len(source)))


def labels_at(source: Source, indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return the same for some images, in time that does not depend on the size of the source."""
    base: Any = source
    places = indices
    while base is not None:
        own = getattr(base, "targets", None)
        if own == IGNORED:
            break
        if isinstance(own, Targets):
            return own.values[places]
        places = base.indices[places] if isinstance(base, Subset) else places
        base = getattr(base, "base", None)
    return source.labels[indices].astype(np.int64)


def label_texts(source: Source, indices: NDArray[np.int64]) -> list[str | None]:
    """Return what images are labelled with as text: "cat", "cat, outdoor" or "age 37.5"; None if it is unknown.

    Of a mask: the shares of its classes.
    """
    known, targets = source.labels[indices].tolist(), _stored_targets(source)
    if targets is None:
        return [None if label < 0 else source.classes[label] for label in known]
    own = replace(targets, values=labels_at(source, indices))
    return [None if label < 0 else own.text(row) for row, label in enumerate(known)]


def output_names_of(source: Source) -> tuple[str, ...]:
    """Return the names of what the images are labelled with: classes (also of pixels), labels or columns."""
    targets = _stored_targets(source)
    return source.classes if targets is None else targets.names


def check_labelling(labelling: Labelling, source: Source, title: str) -> None:
    """Raise if images do not have what they should have: several labels, numbers or masks."""
    kind = kind_of_labels(source)
    if labelling.kind == "masks" != kind:
        raise DataError(
            f"{title} has no masks; put images into a folder images and their masks into masks, or list both in a CSV "
            "or JSONL manifest with the columns path and mask"
        )
    if labelling.ignore and kind != "masks":
        raise ConfigError(
            f"data.ignore is {list(labelling.ignore)}, values in masks, but {title} has no masks; leave it out"
        )
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


# ── what a split record says ──


def labelling_record(labelling: Labelling, train: Source) -> dict[str, Any]:
    """Return what a split record says of the labels, so that they are read alike again; nothing for plain classes."""
    read = resolved(labelling, train)
    if read.kind in (None, "classes") and labelling == AUTOMATIC:
        return {}
    kept = {"kind": read.kind, "columns": list(read.columns), "separator": read.separator}
    return {"labelling": kept | ({"ignore": list(read.ignore)} if read.ignore else {})}


def recorded_labelling(record: Mapping[str, Any] | None) -> Labelling | None:
    """Return how a run read its labels; None if its record does not say so."""
    kept = None if record is None else record.get("labelling")
    if not isinstance(kept, Mapping):
        return None
    columns = kept.get("columns") or ()
    ignore = tuple(map(int, kept.get("ignore") or ()))
    return Labelling(kept.get("kind"), tuple(map(str, columns)), kept.get("separator"), ignore)
