"""Data given as Python objects: what the kinds have in common, and the fingerprint that stands for their path."""

import hashlib
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.data.sources.labels import check_classes, label_text, order_classes
from vitrail.data.sources.source import Labels, Pixels, Source, Wrapped
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
                raise DataError(f"{source.name(int(unknown[0]))} has no label; add one, or remove the image")


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

    def add_labels(self, classes: Iterable[str], labels: Labels) -> None:
        """Add the labels of all images."""
        for name in classes:
            self.add(name)
        self.add(labels)

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
        if values.ndim != 1:
            hint = ", such as labels.argmax(1) for one-hot rows" if values.ndim == 2 else ""
            raise DataError(f"{what} have shape {values.shape}; give one label per image{hint}")
        return list(values.tolist())
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
    return None if isinstance(value, float) and math.isnan(value) else value


def index_labels(
    values: Sequence[object], names: Sequence[str] | None, *, title: str, unit: str
) -> tuple[tuple[str, ...], Labels]:
    """Return the classes, and the class index of every label; -1 for None.

    Integers are sorted numerically, texts alphabetically. With `names`, integers are indices into that list.
    """
    numeric = _check_one_type(values, title, unit)
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
    if names is None and numeric:
        counts = np.bincount(numbers[numbers >= 0], minlength=len(codes)).tolist()
        check_classes(dict(zip(codes, counts, strict=True)), title, "pass the labels as texts")
    classes, lookup = order_classes(list(codes), names, place=title)
    return classes, lookup[numbers]


def _check_one_type(values: Sequence[object], title: str, unit: str) -> bool:
    """Raise for labels of several types: 1, "1" and True would be one class; return whether they are numbers."""
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        kind = "int" if type(value) in (int, float) else type(value).__name__
        if value is not None and kind not in first:
            first[kind] = index
    if len(first) > 1:
        (one, here), (other, there) = list(first.items())[:2]
        raise DataError(f"{title} has labels of type {one} ({unit} {here}) and {other} ({unit} {there}); use one type")
    return "int" in first


def note_slow(what: str, count: int) -> None:
    """Tell that something takes a while, if it does."""
    if count >= 10_000:
        _log.warning("%s", what)
