"""Several splits with the same classes or targets: what the training split must have, and how others fit it."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitrail.data.sources.source import Keyed, Labels, Pixels, Source, base_of
from vitrail.data.sources.strata import strata_of
from vitrail.data.sources.targets import Targets, targets_of
from vitrail.text import plural


@dataclass(frozen=True, eq=False)
class Renumbered:
    """A source whose class indices are those of another source, so that one model fits both."""

    base: Source
    classes: tuple[str, ...]
    labels: Labels
    targets: Targets | Literal["ignored"] | None = None
    """With the columns of the other source; None if they are those of the base, if it has some."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.base)

    def key(self, index: int) -> str:
        """Return the key of an image."""
        return self.base.key(index) if isinstance(self.base, Keyed) else self.base.name(index)

    def name(self, index: int) -> str:
        """Return a readable name of an image."""
        return self.base.name(index)

    def read(self, index: int) -> bytes | Pixels:
        """Return an image as it is stored."""
        return self.base.read(index)

    def stamp(self, index: int) -> tuple[int, int]:
        """Return two numbers that change when the stored image does."""
        return self.base.stamp(index)


def not_trainable(title: str, train: Source) -> list[str]:
    """Report why nothing can be learnt from the labels of a training split."""
    targets = targets_of(train)
    if targets is not None:
        return _no_targets(title, targets)
    present = np.unique(train.labels)
    if len(present) > 1:
        return []
    actual = f"only one class, {train.classes[present[0]]!r}" if len(present) else "no images to train on"
    return [f"{title} has {actual}; training needs at least two classes"]


def _no_targets(title: str, targets: Targets) -> list[str]:
    if len(targets) < 2:
        return [f"{title} has {plural(len(targets), 'image')} to train on; training needs at least two"]
    if targets.kind == "labels":
        present = targets.present
        if not present:
            return [f"no image of {title} has any label; add labels to train on"]
        missing = (name for name in targets.names if name not in present)
        return [f"no training image has the label {name!r}; remove the column or add images" for name in missing]
    if targets.kind == "masks":
        return _one_class(title, targets)
    same = np.flatnonzero((targets.values == targets.values[:1]).all(axis=0)).tolist()
    return [
        f"every image has the value {targets.values[0, place]:g} in the column {targets.names[place]}; there is "
        "nothing to learn"
        for place in same
    ]


def _one_class(title: str, targets: Targets) -> list[str]:
    """Report that masks have fewer than two classes; those of 0 and 255 are common, but 255 is ignored."""
    if len(targets.present) > 1:
        return []
    found = f"only one class, {targets.present[0]!r}" if targets.present else "no class"
    return [
        f"the masks of {title} have {found}; training needs at least two, and pixels of value 255 count nowhere: write "
        "another value for a class"
    ]


def strange_classes(source: Source, train: Source, place: str) -> list[str]:
    """Report classes or labels of a split that the training split does not have, and other differences between them.

    `place` names the split in messages.
    """
    targets, expected = targets_of(source), targets_of(train)
    if expected is not None:
        return strange_targets(targets, expected, place)
    trained = {train.classes[label] for label in np.unique(train.labels).tolist()}
    present = [source.classes[label] for label in np.unique(source.labels).tolist()]
    return [
        f"{place} has the class {name!r}, which the training split does not have; add it there or remove it"
        for name in present
        if name not in trained
    ]


def strange_targets(targets: Targets | None, expected: Targets, place: str) -> list[str]:
    """Report how the targets of a split differ from those of the training split."""
    if targets is None or targets.kind != expected.kind:
        what = {"labels": "several labels per image", "values": "numbers", "masks": "masks"}[expected.kind]
        return [f"{place} does not have {what}, as the training split has; write its labels in the same way"]
    if targets.kind == "labels":
        return [
            f"{place} has the label {name!r}, which the training split does not have; add it there or remove it"
            for name in targets.present
            if name not in expected.present
        ]
    if targets.kind == "masks":  # a class that classes.txt names need not be in a mask
        return [
            f"the masks of {place} have the class {name!r}, which those of the training split do not have; name it in "
            "classes.txt, or leave its pixels out with --set data.ignore"
            for name in targets.present
            if name not in expected.names
        ]
    if set(targets.names) != set(expected.names):
        return [
            f"{place} has the columns {', '.join(targets.names)}, the training split {', '.join(expected.names)}; use "
            "the same columns"
        ]
    return []


def renumber(source: Source, train: Source) -> Source:
    """Return a source with the class indices of the training split, which has all of its classes; or with its targets.

    Labels that a source lacks are labels that none of its images has. Masks are renumbered when they are read.
    """
    targets, expected = targets_of(source), targets_of(train)
    if targets is not None and expected is not None and targets.kind == expected.kind:
        if base_of(source) is base_of(train):
            return source
        aligned = targets.renamed(expected.names)
        strata = strata_of(expected, train.labels >= 0)
        labels = np.where(source.labels >= 0, strata.assign(aligned), -1)
        return Renumbered(source, strata.names, labels, aligned)
    if source.classes == train.classes:
        return source
    numbers = {name: number for number, name in enumerate(train.classes)}
    lookup = np.array([*(numbers.get(name, -1) for name in source.classes), -1], np.int64)  # no label stays -1
    return Renumbered(source, train.classes, lookup[source.labels])
