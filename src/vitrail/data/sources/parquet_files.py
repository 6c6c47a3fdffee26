"""Several Parquet files as one source: their labels are read alike, and their classes or targets joined."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.cells import Reading
from vitrail.data.sources.columns import Columns, LabelRequest, ManifestRow, count_cells
from vitrail.data.sources.index_files import Progress
from vitrail.data.sources.kinds import decide_columns
from vitrail.data.sources.labelled import Labelled, with_strata
from vitrail.data.sources.labels import Faults, order_classes
from vitrail.data.sources.parquet import (
    ParquetImages,
    Table,
    columns_of,
    number_columns,
    open_parquet,
    opened_parquet,
    rows_of_file,
    stored_class_names,
)
from vitrail.data.sources.source import Labels, names_in_common_folder
from vitrail.data.sources.targets import AUTOMATIC, Labelling, Targets
from vitrail.errors import DataError
from vitrail.text import printable_path

FILES_HELD = 2
"""Number of files whose row groups a process keeps in memory."""


@dataclass(frozen=True, eq=False)
class Tables:
    """The images of several Parquet files, concatenated."""

    tables: tuple[Table, ...]
    classes: tuple[str, ...]
    labels: Labels
    split_of: NDArray[np.int8] | None
    """The split of every image: 0 train, 1 validation, 2 test; None if the files have no split column."""
    targets: Targets | None = None
    _recent: OrderedDict[int, None] = field(default_factory=OrderedDict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # Row groups are not pickled.
        return {**self.__dict__, "_recent": OrderedDict()}

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([len(table) for table in self.tables], dtype=np.int64)

    @cached_property
    def _file_names(self) -> list[str]:
        return names_in_common_folder([table.place for table in self.tables])

    def _find(self, index: int) -> tuple[int, int]:
        """Return the index of an image's file, and its index there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - (int(self._ends[number - 1]) if number else 0)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def key(self, index: int) -> str:
        """Return the path of the file relative to the files' common folder, and the image's key there."""
        number, inner = self._find(index)
        return f"{printable_path(self._file_names[number])}, {self.tables[number].key(inner)}"

    def name(self, index: int) -> str:
        """Return a readable name of an image."""
        number, inner = self._find(index)
        return self.tables[number].name(inner)

    def read(self, index: int) -> bytes:
        """Return the bytes of an image."""
        number, inner = self._find(index)
        self._recent.pop(number, None)
        self._recent[number] = None
        if len(self._recent) > FILES_HELD:
            oldest = self.tables[self._recent.popitem(last=False)[0]]
            if isinstance(oldest, ParquetImages):
                oldest.release()
        return self.tables[number].read(inner)

    def stamp(self, index: int) -> tuple[int, int]:
        """Return two numbers that change when the stored image does."""
        number, inner = self._find(index)
        return self.tables[number].stamp(inner)


def open_tables(
    paths: Sequence[str],
    *,
    labelling: Labelling = AUTOMATIC,
    unlabelled: bool = False,
    faults: Faults | None = None,
    on_progress: Progress | None = None,
) -> Table | Tables:
    """Open Parquet files as one source. Their classes may differ; all or none must have a split column."""
    reason = ""
    if len(paths) > 1 and labelling.kind is None:
        labelling, reason = _decide_jointly(paths, labelling, unlabelled)
    options: dict[str, Any] = {"unlabelled": unlabelled, "faults": faults, "on_progress": on_progress}
    tables = tuple(open_parquet(path, labelling=labelling, **options) for path in paths)
    if len(tables) == 1:
        return tables[0]
    divided = [table.split_of for table in tables if table.split_of is not None]
    if divided and len(divided) < len(tables):
        has, lacks = (
            next(table.place for table in tables if (table.split_of is None) is without) for without in (False, True)
        )
        raise DataError(
            f"{printable_path(has)} has a split column and {printable_path(lacks)} has none; add it there, or remove it"
        )
    classes, labels, targets = _joined_labels(tables, reason)
    return Tables(tables, classes, labels, np.concatenate(divided) if divided else None, targets)


def _decide_jointly(paths: Sequence[str], labelling: Labelling, unlabelled: bool) -> tuple[Labelling, str]:
    """Return how to read the labels of several files, and why: one file alone may look different from all of them."""
    with opened_parquet(paths[0]) as (arrow, file):
        columns = columns_of(paths[0], arrow, file, labelling, unlabelled)
        names = stored_class_names(file.schema_arrow, columns.labels[0]) if len(columns.labels) == 1 else None
        some = columns.labels or (number_columns(arrow, file, columns) if not labelling.columns else ())
    if not some or columns.are_names or names is not None:
        return labelling, ""
    rows = _rows_of_files(paths, some)
    if len(columns.labels) == 1:
        request = LabelRequest(columns, labelling, None, unlabelled=unlabelled)
        reading: Reading | None = request.decide(count_cells(rows))
    else:
        reading = decide_columns((row.labels for row in rows), some, labelling, strict=unlabelled)
    if reading is None:
        return labelling, ""
    # Columns of unknown names are named, so that every file is read alike.
    chosen = labelling.columns if columns.labels else some
    return Labelling(reading.kind, chosen, reading.separator), reading.reason


def _rows_of_files(paths: Sequence[str], labels: tuple[str, ...]) -> Iterator[ManifestRow]:
    for path in paths:
        with opened_parquet(path) as (_, file):
            if set(labels) <= set(file.schema_arrow.names):
                yield from rows_of_file(file, Columns("", labels, None, None))


def _joined_labels(tables: Sequence[Table], reason: str) -> Labelled:
    """Return the labels of all files, with the classes or targets of any."""
    place = printable_path(tables[0].place)
    targets = [table.targets for table in tables if table.targets is not None]
    if targets:
        return _joined_targets(tables, targets, reason, place)
    classes = tables[0].classes
    if any(table.classes != classes for table in tables):
        names = list(dict.fromkeys(name for table in tables for name in table.classes))
        classes, _ = order_classes(names, place=place)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [np.array([*(numbers[name] for name in table.classes), -1], np.int64)[table.labels] for table in tables]
    return Labelled(classes, np.concatenate(labels))


def _joined_targets(tables: Sequence[Table], targets: Sequence[Targets], reason: str, place: str) -> Labelled:
    first, known = targets[0], np.concatenate([table.labels >= 0 for table in tables])
    odd = next((table for table in tables if table.targets is None or table.targets.kind != first.kind), None)
    if odd is not None:
        has = next(table for table in tables if table.targets is first)
        raise DataError(
            f"{printable_path(has.place)} has {first.kind} and {printable_path(odd.place)} has none; use the same "
            "columns in all files"
        )
    names = first.names
    if any(set(some.names) != set(names) for some in targets):
        if first.kind == "values":
            listed = " and ".join(", ".join(some.names) for some in targets if set(some.names) != set(names))
            raise DataError(
                f"{place} has the numbers {', '.join(names)}, but others have {listed}; use the same columns"
            )
        names, _ = order_classes(list(dict.fromkeys(name for some in targets for name in some.names)), place=place)
    values: Any = np.concatenate([some.renamed(names).values for some in targets])
    reason = reason or first.reason
    return with_strata(names, values, known, Reading(first.kind, separator=first.separator, reason=reason), place)
