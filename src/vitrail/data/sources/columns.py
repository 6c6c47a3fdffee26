"""The columns of a manifest: which hold images, labels and splits, and how those are read."""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.cells import Cell, Reading, cell_of, check_cell, is_empty
from vitrail.data.sources.kinds import candidates, decide, decide_columns, required
from vitrail.data.sources.labelled import CellColumn, Labelled, targets_in
from vitrail.data.sources.labels import is_missing, label_text, order_classes
from vitrail.data.sources.source import SUFFIXES
from vitrail.data.sources.splits import SPLITS
from vitrail.data.sources.targets import AUTOMATIC, Labelling
from vitrail.errors import DataError, suggest
from vitrail.text import printable_path

IMAGE_COLUMNS = ("path", "file", "filename", "file_name", "image", "bytes")
LABEL_COLUMNS = ("label", "class", "target", "category", "label_name", "class_name", "labels", "tags")
MASK_COLUMNS = ("mask", "mask_path")
NAME_COLUMNS = ("label_name", "class_name")
"""Values in these columns are names of classes, even if they look like numbers."""
_SPLIT_NUMBERS = {"train": 0, "val": 1, "test": 2}


class Columns(NamedTuple):
    """The columns of a manifest."""

    image: str
    labels: tuple[str, ...]
    """Empty if no column has the name of one with labels."""
    name: str | None
    split: str | None
    header: tuple[str, ...] = ()
    """All columns."""

    @property
    def others(self) -> tuple[str, ...]:
        """All other columns."""
        return tuple(
            column for column in self.header if column not in (self.image, *self.labels, self.name, self.split)
        )

    @property
    def are_names(self) -> bool:
        """Whether the labels are names of classes, whatever they look like."""
        return self.name is not None or (len(self.labels) == 1 and self.labels[0].strip().lower() in NAME_COLUMNS)


class ManifestRow(NamedTuple):
    """One row of a manifest. Values of missing columns are None."""

    number: int
    image: object
    labels: tuple[object, ...] = ()
    name: object = None
    split: object = None
    fault: str | None = None
    """Why the row cannot be parsed; the other fields are then None."""


def choose_columns(
    place: str,
    header: Sequence[str],
    labelling: Labelling = AUTOMATIC,
    *,
    unlabelled: bool = False,
    images: Sequence[str] = IMAGE_COLUMNS,
) -> Columns:
    """Identify the columns by name, ignoring case. With `unlabelled`, those of the labels may all be missing."""
    by_name: dict[str, str] = {}
    for column in header:
        by_name.setdefault(column.strip().lower(), column)

    def first(names: Sequence[str]) -> str | None:
        return next((by_name[name] for name in names if name in by_name), None)

    image, label = first(images), first(LABEL_COLUMNS)
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
            f"{printable_path(place)} has no image column; rename one of its columns ({_listed(header)}) to "
            f"{' or '.join(IMAGE_COLUMNS)}"
        )
    labels: tuple[str, ...] = (label,) if label is not None else ()
    if labelling.columns:
        missing = all(column.strip().lower() not in by_name for column in labelling.columns)
        asked = () if unlabelled and missing else labelling.columns
        labels = tuple(_named(place, header, by_name, column) for column in asked)
    by_number = len(labels) == 1 and not labelling.columns and labels[0].strip().lower() not in NAME_COLUMNS
    name, split = first(NAME_COLUMNS) if by_number else None, first(("split",))
    return Columns(image, labels, name, split, tuple(header))


def _listed(header: Sequence[str]) -> str:
    return ", ".join(repr(column) for column in header[:20]) or "none"


def _named(place: str, header: Sequence[str], by_name: dict[str, str], column: str) -> str:
    """Return the column that was asked for."""
    found = column if column in header else by_name.get(column.strip().lower())
    if found is None:
        raise DataError(
            f"{printable_path(place)} has no column {column!r}; its columns are {_listed(header)}"
            f"{suggest(column, header)}"
        )
    return found


def no_label_column(place: str, columns: Columns) -> DataError:
    """Return the error for a manifest without labels."""
    return DataError(
        f"{printable_path(place)} has no label column; rename one of its columns ({_listed(columns.header)}) to "
        f"{' or '.join(LABEL_COLUMNS[:4])}, or name it: --set data.labels=COLUMN in training, --labels COLUMN in "
        "vitrail check"
    )


class LabelRequest(NamedTuple):
    """The columns of a manifest, and how its labels are read."""

    columns: Columns
    labelling: Labelling
    reading: Reading | None
    """None: to be decided by what the one column of labels holds."""
    named: bool = False
    """Whether labels are indices into a list of names."""
    unlabelled: bool = False

    def decide(self, images: Mapping[Cell, int]) -> Reading:
        """Return how to read the one column of labels; `images` counts those with each cell."""
        subject, asked = self.columns.labels[0].strip(), bool(self.labelling.columns)
        # Images to predict or evaluate are few: their integers may differ and still be classes.
        return decide(images, self.labelling, subject, named=self.named, many=not self.unlabelled, column=asked)


ReadRows = Callable[[tuple[str, ...]], Iterable[ManifestRow]]
"""Return the rows of a manifest with the labels of some columns."""


def request_labels(
    place: str, columns: Columns, labelling: Labelling, read: ReadRows, *, unlabelled: bool, named: bool = False
) -> LabelRequest:
    """Find columns that hold 0 and 1 or numbers, if no column has a known name; and decide how to read several.

    With `unlabelled`, there need not be a column of labels.
    """
    names = columns.are_names and labelling.kind is None
    if labelling.kind in ("labels", "values", "masks"):
        columns = columns._replace(name=None)
    if labelling.kind == "masks" and len(columns.labels) == 1:
        return LabelRequest(columns, labelling, Reading("masks"))
    if len(columns.labels) == 1:
        reading = Reading() if names or labelling.kind == "classes" else None
        if labelling.kind == "values":
            reading = decide(count_cells(islice(read(columns.labels), 1)), labelling, "")
        return LabelRequest(columns, labelling, reading, named, unlabelled)
    some = columns.labels or (() if labelling.columns else candidates(columns.others))
    reading = decide_columns((row.labels for row in read(some)), some, labelling, strict=unlabelled) if some else None
    if columns.labels:
        reading = required(reading, columns.labels, labelling, printable_path(place))
    elif reading is None and not unlabelled:
        raise no_label_column(place, columns)
    return LabelRequest(
        columns._replace(labels=some if reading is not None else ()), labelling, reading, named, unlabelled
    )


class LabelCollector:
    """Collects labels and splits row by row, and converts them to classes or targets at the end."""

    def __init__(
        self, place: str, request: LabelRequest, read: ReadRows, *, unit: str, names: Sequence[str] | None = None,
        unknown: str | None = None,
    ) -> None:  # fmt: skip
        self.place, self.columns, self.unit = printable_path(place), request.columns, unit
        self.request, self.reading = request, request.reading
        self.names, self.unknown = names, unknown
        self._rows = read
        self._cells: list[dict[Cell, int]] = [{} for _ in self.columns.labels]
        self._seen: list[dict[object, int]] = [{} for _ in self.columns.labels]
        """The codes of texts and integers as they are written: a few classes have millions of rows."""
        self._codes = [array("q") for _ in self.columns.labels]
        self._images = 0
        self._splits = array("b")
        self._names: dict[str, str] = {}

    def read(self, row: ManifestRow) -> tuple[tuple[int, ...], int | None]:
        """Return codes for the labels of a row, equal for equal labels, and one for its split."""
        codes = tuple(self._code(number, value, row) for number, value in enumerate(row.labels))
        if self.columns.name is not None and codes[0] >= 0:
            text, name = (label_text(value, self._where(row)) for value in (row.labels[0], row.name))
            if self._names.setdefault(text, name) != name:
                raise DataError(
                    f"{self._where(row)} names label {text} {name!r}, but it was {self._names[text]!r} before; "
                    "use one name"
                )
        if self.columns.split is None:
            return codes, None
        split = SPLITS.get(str(row.split).strip().lower())
        if split is None:
            raise DataError(f"{self._where(row)} has the split {row.split!r}; write train, val or test")
        return codes, _SPLIT_NUMBERS[split]

    def _code(self, number: int, value: object, row: ManifestRow) -> int:
        plain = type(value) in (int, str)  # True and 1.0 would find the code of 1
        if plain and value in self._seen[number]:
            return self._seen[number][value]
        cell = self._cell(value, self.columns.labels[number].strip(), self._where(row))
        cells = self._cells[number]
        code = -1 if cell is None or cell == self.unknown else cells.setdefault(cell, len(cells))
        if plain:
            self._seen[number][value] = code
        return code

    def _cell(self, value: object, column: str, where: str) -> Cell:
        """Return a label as a cell, None if its class is unknown; raise if it is not one."""
        if self.reading is not None and self.reading.kind == "masks":
            return _mask_path(value, where)
        if self._are_classes():
            return self._class(value, where)
        cell = cell_of(value, where)
        if self.reading is None and is_empty(cell):  # a fault, unless images may have no label
            self.reading = self.request.decide(count_cells(self._rows(self.columns.labels)))
        if self.reading is None:
            return cell
        if self._are_classes():
            return self._class(value, where)
        check_cell(cell, self.reading, where, column)
        return cell

    def _class(self, value: object, where: str) -> str | None:
        """Return a class; None if it is unknown, where images need no label."""
        blank = value is None or (isinstance(value, float) and math.isnan(value))
        if self.request.unlabelled and (blank or (isinstance(value, str) and is_missing(value))):
            return None
        return label_text(value, where)

    def _are_classes(self) -> bool:
        return self.reading is not None and self.reading.kind == "classes"

    def _where(self, row: ManifestRow) -> str:
        return f"{self.place}, {self.unit} {row.number}"

    def keep(self, codes: Sequence[int], split: int | None) -> None:
        """Store what `read` returned for an image."""
        self._images += 1
        for stored, code in zip(self._codes, codes, strict=True):
            stored.append(code)
        if split is not None:
            self._splits.append(split)

    def _decided(self) -> Reading:
        """Return how to read the one column of labels, by how many images have each cell."""
        codes, cells = np.array(self._codes[0], np.int64), self._cells[0]
        counts = np.bincount(codes[codes >= 0], minlength=len(cells)).tolist()
        reading = self.request.decide({cell: count for cell, count in zip(cells, counts, strict=True) if count})
        for cell in cells if reading.kind != "classes" else ():
            check_cell(cell, reading, self.place, self.columns.labels[0].strip())
        return reading

    def finish(self) -> tuple[Labelled, NDArray[np.int8] | None]:
        """Return what the images are labelled with, and the split of every row."""
        if not self._images:
            raise DataError(f"{self.place} lists no images; add one {self.unit} per image")
        splits = np.array(self._splits, np.int8) if self.columns.split is not None else None
        if not self._codes:
            return Labelled((), np.full(self._images, -1, np.int64)), splits
        reading = self.reading or self._decided()
        codes = [np.array(stored, np.int64) for stored in self._codes]
        if reading.kind == "classes":
            return self._classes(codes[0]), splits
        if reading.kind == "masks":
            return Labelled(tuple(str(cell) for cell in self._cells[0]), codes[0]), splits
        columns = [
            CellColumn(name.strip(), list(cells), some)
            for name, cells, some in zip(self.columns.labels, self._cells, codes, strict=True)
        ]
        return targets_in(columns, reading, self.names, place=self.place), splits

    def _classes(self, codes: NDArray[np.int64]) -> Labelled:
        texts = [cell for cell in self._cells[0] if isinstance(cell, str)]
        classes, lookup = order_classes(texts, self.names, place=self.place)
        if self.names is None and self._names:
            classes = tuple(self._names[text] for text in classes)
            order_classes((), classes, place=self.place)  # raises for duplicate names
        return Labelled(classes, lookup[codes])


def _mask_path(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where} has no mask (found {value!r}); write its path, or remove the image")
    return value.strip()


def count_cells(rows: Iterable[ManifestRow]) -> Counter[Cell]:
    """Count the cells of the one column of labels; those that cannot be read are left out."""
    counts: Counter[Cell] = Counter()
    for row in rows:
        with suppress(DataError):
            counts.update(cell_of(value, "") for value in row.labels)
    return counts
