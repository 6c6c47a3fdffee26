"""Data given as Python objects: what the kinds have in common, and the fingerprint that stands for their path."""

import hashlib
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vitrail.data.sources.cells import Cell, Reading, cell_of, check_cell
from vitrail.data.sources.kinds import decide, decide_columns, required
from vitrail.data.sources.labelled import CellColumn, Labelled, targets_in, with_strata
from vitrail.data.sources.labels import label_text, order_classes
from vitrail.data.sources.source import Pixels, Source, Wrapped
from vitrail.data.sources.targets import Labelling, targets_of
from vitrail.errors import DataError, InputError

TITLES = {
    "arrays": "the array data",
    "list": "the list",
    "dataset": "the dataset",
    "dataframe": "the DataFrame",
    "huggingface": "the Hugging Face dataset",
}
"""The kinds of data in memory, as messages call them. The kind is also the start of the default run folder's name."""
_RECORDED = re.compile(rf"({'|'.join(TITLES)}):[0-9a-f]{{32}}")
_log = logging.getLogger("vitrail")


@dataclass(frozen=True, eq=False)
class InMemory:
    """Data given as a Python object, as one source per split."""

    kind: str
    """One of `TITLES`."""
    splits: Mapping[str, Source]
    """"train" alone if the object does not define splits."""
    fingerprint: str
    """32 hex digits that change with the images, their order and their labels."""

    @property
    def title(self) -> str:
        """What messages call it."""
        return TITLES[self.kind]

    def __str__(self) -> str:
        """Return what a run records instead of a path."""
        return f"{self.kind}:{self.fingerprint}"

    def check_labelled(self) -> None:
        """Raise unless every image has a label."""
        for source in self.splits.values():
            unknown = np.flatnonzero(source.labels < 0)
            if len(unknown) == len(source):
                raise DataError(f"{self.title} without labels cannot be used here; {_LABELLED[self.kind]}")
            if len(unknown):
                targets = targets_of(source)
                none = " (an empty list if it has none)" if targets is not None and targets.kind == "labels" else ""
                raise DataError(f"{source.name(int(unknown[0]))} has no label; add one{none}, or remove the image")


_LABELLED = {
    "arrays": "pass a tuple of images and labels",
    "list": "pass pairs of an image and its label",
    "dataset": "its items should be pairs of an image and its label",
    "dataframe": "add a column label",
    "huggingface": "add a column label",
}


def recorded_kind(place: str) -> str | None:
    """Return the kind of data that a run recorded instead of a path; None for a path."""
    match = _RECORDED.fullmatch(place)
    return None if match is None else match[1]


@dataclass(frozen=True, eq=False)
class Fingerprinted(Wrapped):
    """A source whose images have no files: its fingerprint tells them from those of other data with the same names."""

    digest: str
    place: str = ""
    """The start of every name; empty if the data has one split."""

    def key(self, index: int) -> str:
        """Return the name of an image with the fingerprint."""
        return f"{self.digest[:12]}: {self.name(index)}"

    def name(self, index: int) -> str:
        """Return a readable name of an image."""
        return f"{self.place}{self.base.name(index)}"

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the index and the fingerprint."""
        return index, int(self.digest[:15], 16)


# ── fingerprints ──


class Fingerprint:
    """A digest of values, each with its length, so that neighbours cannot be confused."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, value: str | bytes | Pixels) -> None:
        """Add a text, bytes or an array."""
        if isinstance(value, np.ndarray):
            self._add(f"{value.dtype.str} {value.shape}".encode())
            self._digest.update(np.ascontiguousarray(value).data if value.size else b"")
            return
        self._add(value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value)

    def _add(self, value: bytes) -> None:
        self._digest.update(len(value).to_bytes(8, "little"))
        self._digest.update(value)

    def add_labels(self, labelled: Labelled) -> None:
        """Add the labels of all images."""
        for name in labelled.classes:
            self.add(name)
        self.add(labelled.labels)
        if labelled.targets is not None:
            self.add(labelled.targets.kind)
            for name in labelled.targets.names:
                self.add(name)
            self.add(labelled.targets.values)

    @property
    def hex(self) -> str:
        """32 hex digits."""
        return self._digest.hexdigest()


# ── labels ──


def as_list(values: object, what: str) -> list[object]:
    """Return a column of labels as a list: of an array, a tensor, a series or any sequence."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray):
        if values.ndim not in (1, 2):
            raise DataError(f"{what} have shape {values.shape}; give one row per image")
        return [_plain(value) for value in values] if values.dtype == object else list(values.tolist())
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InputError(f"{what} are of type {type(values).__name__}; give one label per image")
    return [_plain(value) for value in values]


def _plain(value: Any) -> object:
    """Return a scalar of NumPy or torch as a Python value; None, NaN and the NA of pandas are a missing label."""
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray | Tensor) and value.ndim == 0):
        value = value.item()
    if isinstance(value, np.ndarray | Tensor):
        value = value.tolist()
    if type(value).__name__ == "Series":  # a list in a DataFrame of polars
        value = list(value)
    return None if isinstance(value, float) and math.isnan(value) else value


class GivenLabels(NamedTuple):
    """Labels of images in memory, as they were given: a column, or one for each label or number."""

    columns: tuple[list[object], ...]
    names: tuple[str, ...] = ()
    """The names of the columns, if they have some."""
    classes: Sequence[str] | None = None
    """Names of classes or labels that are integers."""
    reading: Reading | None = None
    """How they are read; None: whatever they look like."""


def read_labels(given: GivenLabels, labelling: Labelling, *, title: str, unit: str) -> Labelled:
    """Return the classes and the class index of every label, or the targets; -1 for images without labels.

    Integers are sorted numerically, texts alphabetically. With class names, integers are indices into that list.
    """
    first, reading = given.columns[0], given.reading
    if labelling.kind == "classes" or all(value is None for value in first):
        reading = Reading()
    if reading is None and len(given.columns) > 1:
        rows = zip(*given.columns, strict=True)
        reading = required(decide_columns(rows, given.names, labelling), given.names, labelling, title)
    cells = [] if reading == Reading() else [_cells(values, given.classes, title, unit) for values in given.columns]
    if reading is None:
        numeric = all(isinstance(value, int | float | list | None) for value in first)
        subject = given.names[0] if given.names else title
        reading = decide(
            Counter(cells[0]), labelling, subject, named=given.classes is not None, numeric=numeric,
            column=bool(labelling.columns),
        )  # fmt: skip
    if reading.kind == "classes":
        return _class_labels(first, given.classes, title, unit)
    names = given.names or (title,)
    columns = [
        _checked(some, reading, name, title, unit, named=bool(given.names))
        for name, some in zip(names, cells, strict=True)
    ]
    base = None if given.names else "value" if reading.kind == "values" else "label"
    return targets_in(columns, reading, given.classes, place=title, base=base)


def _cells(values: Sequence[object], classes: Sequence[str] | None, title: str, unit: str) -> list[Cell]:
    """Return labels as cells; None for images without."""
    known: dict[tuple[type, object], Cell] = {}
    if classes is not None:
        known[int, -1] = None  # Hugging Face writes -1 for an unknown label
    cells: list[Cell] = []
    for index, value in enumerate(values):
        kind = type(value)
        if kind not in (int, float, bool, str):
            cells.append(cell_of(value, f"{unit} {index} of {title}"))
            continue
        if (kind, value) not in known:
            known[kind, value] = cell_of(value, f"{unit} {index} of {title}")
        cells.append(known[kind, value])
    return cells


def _checked(cells: Sequence[Cell], reading: Reading, name: str, title: str, unit: str, *, named: bool) -> CellColumn:
    """Return a column of cells that are as expected."""
    codes: dict[Cell, int] = {}
    for index, cell in enumerate(cells):
        if cell is not None and cell not in codes:
            check_cell(cell, reading, f"{unit} {index} of {title}", name if named else None)
            codes[cell] = len(codes)
    return CellColumn(name, list(codes), np.array([-1 if cell is None else codes[cell] for cell in cells], np.int64))


def array_labels(
    labels: Pixels, names: Sequence[str] | None, labelling: Labelling, *, title: str, unit: str
) -> Labelled:
    """Return the targets in the rows of an array: integers 0 and 1 for each label, or numbers."""
    if labels.dtype.kind not in "biuf" or not labels.shape[1]:
        raise DataError(f"the labels of {title} have shape {labels.shape} and type {labels.dtype}; give numbers")
    unknown = np.asarray(np.isnan(labels.astype(np.float64)).all(axis=1))
    known, count = labels[~unknown], labels.shape[1]
    bits = bool(((known == 0) | (known == 1)).all())
    kind = labelling.kind
    if kind is None and bits and count > 1 and not (known.sum(axis=1) == 1).all():
        kind = "labels"
    if kind is None and labels.dtype.kind == "f" and not (bits and count > 1):
        kind = "values"
    if kind not in ("labels", "values"):
        hint = "such as labels.argmax(1) for one-hot rows, or 0 and 1 for several labels, or floats for numbers"
        raise DataError(f"the labels have shape {labels.shape}; give one label per image, {hint}")
    wrong = ~((known == 0) | (known == 1)) if kind == "labels" else ~np.isfinite(known)
    if wrong.any():
        row, column = (int(place) for place in np.argwhere(wrong)[0])
        index, what = int(np.flatnonzero(~unknown)[row]), "0 or 1" if kind == "labels" else "a finite number"
        raise DataError(f"{unit} {index} of {title} has {known[row, column]} in its labels; write {what}")
    base = "label" if kind == "labels" else "value"
    outputs = (base,) if count == 1 else tuple(f"{base} {number}" for number in range(count))
    if names is not None and len(names) == count:
        outputs = tuple(names)
    reason = f"{title} has rows of {'0 and 1' if kind == 'labels' else 'numbers'}" if labelling.kind is None else ""
    values = np.where(unknown[:, None], 0, labels).astype(np.uint8) if kind == "labels" else labels.astype(np.float64)
    return with_strata(outputs, values, ~unknown, Reading(kind, "vectors", None, reason), title)


def _class_labels(values: Sequence[object], names: Sequence[str] | None, title: str, unit: str) -> Labelled:
    _check_one_type(values, title, unit)
    codes: dict[str, int] = {}
    found: dict[object, int] = {None: -1}
    if names is not None:
        found[-1] = -1  # Hugging Face writes -1 for an unknown label
    for index, value in enumerate(values):
        if not isinstance(value, str | int | float | None):
            label_text(value, f"{unit} {index} of {title}")  # raises
        elif value not in found:  # a few classes have millions of images
            found[value] = codes.setdefault(label_text(value, f"{unit} {index} of {title}"), len(codes))
    numbers = np.array([found[value] for value in values], np.int64)
    classes, lookup = order_classes(list(codes), names, place=title)
    return Labelled(classes, lookup[numbers])


def _check_one_type(values: Sequence[object], title: str, unit: str) -> None:
    """Raise for labels of several types: 1, "1" and True would be one class."""
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        kind = "int" if type(value) in (int, float) else type(value).__name__
        if value is not None and kind not in first:
            first[kind] = index
    if len(first) > 1:
        (one, here), (other, there) = list(first.items())[:2]
        raise DataError(f"{title} has labels of type {one} ({unit} {here}) and {other} ({unit} {there}); use one type")


def note_slow(what: str, count: int) -> None:
    """Tell that something takes a while, if it does."""
    if count >= 10_000:
        _log.warning("%s", what)
