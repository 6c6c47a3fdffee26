"""The columns of a manifest: which hold images, labels and splits, and how those are read."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.labels import check_classes, label_text, order_classes
from vitrail.data.sources.source import SUFFIXES, Labels
from vitrail.data.sources.splits import SPLITS
from vitrail.errors import DataError
from vitrail.text import printable_path

IMAGE_COLUMNS = ("path", "file", "filename", "file_name", "image", "bytes")
LABEL_COLUMNS = ("label", "class", "target", "category", "label_name", "class_name")
NAME_COLUMNS = ("label_name", "class_name")
"""Values in these columns are names, even if they look like numbers."""
_SPLIT_NUMBERS = {"train": 0, "val": 1, "test": 2}


class Columns(NamedTuple):
    """The columns of a manifest."""

    image: str
    label: str | None
    name: str | None
    split: str | None


class ManifestRow(NamedTuple):
    """One row of a manifest. Values of missing columns are None."""

    number: int
    image: object
    label: object
    name: object
    split: object
    fault: str | None = None
    """Why the row cannot be parsed; the other fields are then None."""


def choose_columns(
    place: str, header: Sequence[str], *, unlabelled: bool, images: Sequence[str] = IMAGE_COLUMNS
) -> Columns:
    """Identify the columns by name, ignoring case."""
    by_name: dict[str, str] = {}
    for column in header:
        by_name.setdefault(column.strip().lower(), column)

    def first(names: Sequence[str]) -> str | None:
        return next((by_name[name] for name in names if name in by_name), None)

    image, label = first(images), first(LABEL_COLUMNS)
    columns = ", ".join(repr(column) for column in header[:20]) or "none"
    if image is None and any(
        column.strip().lower().rpartition(".")[2] in SUFFIXES for column in header if "." in column
    ):
        raise DataError(
            f"{printable_path(place)} starts with a file name, not with a header; add a first line such as path,label"
        )
    if image is None and len(header) == 1 and "|" in header[0]:
        raise DataError(f"{printable_path(place)} separates fields by '|'; use commas, semicolons or tabs")
    if image is None:
        raise DataError(
            f"{printable_path(place)} has no image column; rename one of its columns ({columns}) to "
            f"{' or '.join(IMAGE_COLUMNS)}"
        )
    if label is None and not unlabelled:
        raise DataError(
            f"{printable_path(place)} has no label column; rename one of its columns ({columns}) to "
            f"{' or '.join(LABEL_COLUMNS[:4])}"
        )
    name = first(NAME_COLUMNS) if label is not None and label.strip().lower() not in NAME_COLUMNS else None
    return Columns(image, label, name, first(("split",)))


class LabelCollector:
    """Collects labels and splits row by row, and converts them to class indices at the end."""

    def __init__(
        self, place: str, columns: Columns, *, unit: str, unknown: str | None = None, any_label: bool = False
    ) -> None:
        self.place, self.columns, self.unit = place, columns, unit
        self.unknown = unknown
        named = columns.label is None or columns.name is not None or columns.label.strip().lower() in NAME_COLUMNS
        self.any_label = any_label or named
        self._codes: dict[str, int] = {}
        self._labels = array("q")
        self._splits = array("b")
        self._names: dict[str, str] = {}
        self._texts: dict[object, str] = {}
        """Labels as text: a few classes have millions of rows."""

    def read(self, row: ManifestRow) -> tuple[int, int | None]:
        """Return a code for the label of a row, equal for equal labels, and one for its split."""
        code = -1
        if self.columns.label is not None:
            text = self._text(row.label, row)
            code = -1 if text == self.unknown else self._codes.setdefault(text, len(self._codes))
            if self.columns.name is not None:
                name = self._text(row.name, row)
                if self._names.setdefault(text, name) != name:
                    raise DataError(
                        f"{self._where(row)} names label {text} {name!r}, but it was {self._names[text]!r} before; "
                        "use one name"
                    )
        if self.columns.split is None:
            return code, None
        split = SPLITS.get(str(row.split).strip().lower())
        if split is None:
            raise DataError(f"{self._where(row)} has the split {row.split!r}; write train, val or test")
        return code, _SPLIT_NUMBERS[split]

    def _text(self, value: object, row: ManifestRow) -> str:
        if type(value) not in (int, str):  # True and 1.0 would find the text of 1
            return label_text(value, self._where(row))
        if value not in self._texts:
            self._texts[value] = label_text(value, self._where(row))
        return self._texts[value]

    def _where(self, row: ManifestRow) -> str:
        return f"{printable_path(self.place)}, {self.unit} {row.number}"

    def keep(self, code: int, split: int | None) -> None:
        """Store what `read` returned for an image."""
        self._labels.append(code)
        if split is not None:
            self._splits.append(split)

    def finish(self, names: Sequence[str] | None = None) -> tuple[tuple[str, ...], Labels, NDArray[np.int8] | None]:
        """Return the classes, and the label and split of every row; `names` are the class names of integer labels."""
        if not self._labels:
            raise DataError(f"{printable_path(self.place)} lists no images; add one {self.unit} per image")
        codes = np.array(self._labels, np.int64)
        if names is None and not self.any_label:
            counts = np.bincount(codes[codes >= 0], minlength=len(self._codes)).tolist()
            images = {text: count for text, count in zip(self._codes, counts, strict=True) if count}
            check_classes(images, printable_path(self.place), "call the column class_name")
        classes, lookup = order_classes(list(self._codes), names, place=printable_path(self.place))
        if names is None and self._names:
            classes = tuple(self._names[text] for text in classes)
            order_classes((), classes, place=printable_path(self.place))  # raises for duplicate names
        splits = np.array(self._splits, np.int8) if self.columns.split is not None else None
        return classes, lookup[codes], splits
