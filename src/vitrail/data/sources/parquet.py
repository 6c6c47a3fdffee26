"""Parquet manifests, one file or several: image paths, or the image bytes, as written by Hugging Face datasets."""

import importlib
import itertools
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.remote.filesystems import Status, public_url
from vitrail.data.remote.stored_files import RemoteFile, StoredFile, open_stored
from vitrail.data.sources.cells import Cell, Reading
from vitrail.data.sources.columns import (
    IMAGE_COLUMNS,
    Columns,
    LabelCollector,
    LabelRequest,
    ManifestRow,
    choose_columns,
    count_cells,
    request_labels,
)
from vitrail.data.sources.index_files import Progress
from vitrail.data.sources.labelled import Labelled, with_strata
from vitrail.data.sources.labels import Faults, order_classes, report_faults
from vitrail.data.sources.manifests import PROGRESS_EVERY, Manifest, manifest_of
from vitrail.data.sources.source import Labels, names_in_common_folder, reason_of, stamp_file
from vitrail.data.sources.targets import AUTOMATIC, Labelling, Targets
from vitrail.errors import DataError
from vitrail.text import printable_path

GROUPS_HELD = 4
"""Number of row groups a process keeps in memory."""
FILES_HELD = 2
"""Number of files whose row groups a process keeps in memory."""


# ── one file ──


@dataclass(frozen=True, eq=False)
class ParquetImages:
    """Image bytes in a column of a Parquet file, read one row group at a time.

    Fast in row order. In random order every image costs reading its row group: for training on many images, write
    small row groups, or tar shards.
    """

    place: str
    column: str
    """The path of the column in the schema: "bytes", or "image.bytes"."""
    group_ends: NDArray[np.int64]
    classes: tuple[str, ...]
    labels: Labels
    split_of: NDArray[np.int8] | None
    """The split of every image: 0 train, 1 validation, 2 test; None if the file has no split column."""
    version: Status | None = None
    """The version of a remote file when it was opened; None for a local file."""
    targets: Targets | None = None
    _held: OrderedDict[int, Any] = field(default_factory=OrderedDict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # Row groups are not pickled.
        return {**self.__dict__, "_held": OrderedDict()}

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def key(self, index: int) -> str:
        """Return the number of the row."""
        return f"row {index + 1}"

    def name(self, index: int) -> str:
        """Return the file and the number of the row."""
        return f"{printable_path(public_url(self.place))}, row {index + 1}"

    def read(self, index: int) -> bytes:
        """Return the bytes of an image."""
        group = int(np.searchsorted(self.group_ends, index, side="right"))
        start = int(self.group_ends[group - 1]) if group else 0
        value = self._group(group, index)[index - start].as_py()
        if value is None:
            raise DataError(f"{self.name(index)} has no image; add its bytes, or remove the row")
        return bytes(value)

    def _group(self, group: int, index: int) -> Any:
        values = self._held.pop(group, None)
        if values is None:
            arrow = import_pyarrow(self.place)
            try:
                with self._open() as raw, arrow.parquet.ParquetFile(raw) as file:
                    table = file.read_row_group(group, columns=[self.column], use_threads=False)
            except _read_errors(arrow) as fault:
                raise DataError(f"{self.name(index)} cannot be read: {_one_line(fault)}") from None
            values = table.column(0)
            for inner in self.column.split(".")[1:]:
                values = arrow.compute.struct_field(values, inner)
        self._held[group] = values
        while len(self._held) > GROUPS_HELD:
            self._held.popitem(last=False)
        return values

    def _open(self) -> StoredFile:
        return open_stored(self.place) if self.version is None else RemoteFile(self.place, self.version)

    def release(self) -> None:
        """Release the cached row groups."""
        self._held.clear()

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the size of the Parquet file and the time of its last change."""
        return self.version or stamp_file(self.place, self.name(index))


def import_pyarrow(place: str) -> Any:
    """Import pyarrow, which only Parquet files need."""
    try:
        importlib.import_module("pyarrow.compute")
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError:
        raise DataError(
            f"{printable_path(place)} cannot be read without pyarrow: pip install 'vitrail[parquet]'"
        ) from None


def open_parquet(
    place: str | os.PathLike[str],
    *,
    labelling: Labelling = AUTOMATIC,
    unlabelled: bool = False,
    faults: Faults | None = None,
    on_progress: Progress | None = None,
) -> Manifest | ParquetImages:
    """Open a Parquet file. With `unlabelled`, a label column is not required.

    With `faults`, rows with unusable files are skipped and named there.
    """
    place = os.fspath(place)
    arrow = import_pyarrow(place)
    try:
        with open_stored(place) as raw, arrow.parquet.ParquetFile(raw) as file:
            opened = _open(place, arrow, file, labelling, unlabelled, faults, on_progress)
            if isinstance(opened, ParquetImages) and isinstance(raw, RemoteFile):
                return replace(opened, version=raw.status)
            return opened
    except _read_errors(arrow) as fault:
        raise DataError(f"{printable_path(place)} cannot be read as Parquet: {_one_line(fault)}") from None


def _open(
    place: str,
    arrow: Any,
    file: Any,
    labelling: Labelling,
    unlabelled: bool,
    faults: Faults | None,
    on_progress: Progress | None,
) -> Manifest | ParquetImages:
    columns = _columns(place, arrow, file, labelling, unlabelled)
    column = _bytes_column(arrow, file, columns.image)
    names = _class_names(file.schema_arrow, columns.labels[0]) if len(columns.labels) == 1 else None
    if names is not None:
        columns = columns._replace(name=None)

    def rows_of(labels: tuple[str, ...]) -> Iterator[ManifestRow]:
        return _rows(file, Columns("", labels, None, None))

    request = _request(place, arrow, file, columns, labelling, rows_of, unlabelled, named=names is not None)
    if column is None:
        rows = _rows(file, request.columns)
        return manifest_of(
            place, request, rows, rows_of, unit="row", names=names, faults=faults, on_progress=on_progress
        )
    _check_no_empty(place, file, column)
    # Hugging Face writes -1 for an unknown label.
    unknown = "-1" if names and unlabelled else None
    collector = LabelCollector(place, request, rows_of, unit="row", names=names, unknown=unknown)
    wrong: list[str] = []
    for row in _rows(file, request.columns._replace(image="")):
        try:
            collector.keep(*collector.read(row))
        except DataError as fault:
            wrong.append(str(fault))
        if on_progress is not None and not row.number % PROGRESS_EVERY:
            on_progress(row.number)
    report_faults(wrong, printable_path(place), None)  # images are addressed by row number, so no row can be skipped
    groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    (classes, labels, targets), split_of = collector.finish()
    ends = np.cumsum(groups, dtype=np.int64)
    return ParquetImages(place, column, ends, classes, labels, split_of, targets=targets)


def _request(
    place: str, arrow: Any, file: Any, columns: Columns, labelling: Labelling,
    rows_of: Callable[[tuple[str, ...]], Iterator[ManifestRow]], unlabelled: bool, *, named: bool,
) -> LabelRequest:  # fmt: skip
    """Return how to read the labels; columns of an unknown name are read only if all others are numbers."""
    if not columns.labels and not all(_is_number(arrow, file.schema_arrow.field(name).type) for name in columns.others):
        labelling = Labelling(kind="classes")
    return request_labels(place, columns, labelling, rows_of, unlabelled=unlabelled, named=named)


def _is_number(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    return any(is_kind(kind) for is_kind in (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal))


def read_parquet(place: str) -> Iterator[ManifestRow]:
    """Iterate over a file lazily; `ManifestRow.image` is an image's bytes, its path, or both in a dict."""
    arrow = import_pyarrow(place)
    try:
        with open_stored(place) as raw, arrow.parquet.ParquetFile(raw) as file:
            columns = Columns(_columns(place, arrow, file).image, (), None, None)
            at_once = 65_536 if _bytes_column(arrow, file, columns.image) is None else 16
            yield from _rows(file, columns, at_once)
    except _read_errors(arrow) as fault:
        raise DataError(f"{printable_path(place)} cannot be read as Parquet: {_one_line(fault)}") from None


def images_of(place: str) -> ParquetImages:
    """Open a file for its image bytes by row, without reading labels."""
    arrow = import_pyarrow(place)
    try:
        with open_stored(place) as raw, arrow.parquet.ParquetFile(raw) as file:
            column = _bytes_column(arrow, file, _columns(place, arrow, file).image)
            groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    except _read_errors(arrow) as fault:
        raise DataError(f"{printable_path(place)} cannot be read as Parquet: {_one_line(fault)}") from None
    if column is None:
        raise DataError(f"{printable_path(place)} has no image bytes any more; rerun with --overwrite")
    ends = np.cumsum(groups, dtype=np.int64)
    return ParquetImages(place, column, ends, (), np.full(sum(groups), -1, np.int64), None)


def _columns(place: str, arrow: Any, file: Any, labelling: Labelling = AUTOMATIC, unlabelled: bool = True) -> Columns:
    # Bytes before paths: if a file has both, the paths are the origin of the bytes.
    names = file.schema_arrow.names
    binary = [name for name in names if _bytes_column(arrow, file, name) is not None]
    preferred = sorted(IMAGE_COLUMNS, key=lambda name: not any(name == column.strip().lower() for column in binary))
    return choose_columns(place, names, labelling, unlabelled=unlabelled, images=preferred)


def _bytes_column(arrow: Any, file: Any, name: str) -> str | None:
    """Return the schema path of a column's bytes, or None if it holds file paths."""
    kind = file.schema_arrow.field(name).type
    if arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind):
        return name
    if arrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        missing = _empty_cells(file, f"{name}.bytes")
        if missing is None or missing < file.metadata.num_rows:
            return f"{name}.bytes"
    return None


def _empty_cells(file: Any, column: str) -> int | None:
    """Return the null count of a column from the file's statistics; None if it has none."""
    total = 0
    for group in range(file.num_row_groups):
        cells = file.metadata.row_group(group)
        for number in range(cells.num_columns):
            if cells.column(number).path_in_schema == column:
                statistics = cells.column(number).statistics
                if statistics is None or not statistics.has_null_count:
                    return None
                total += statistics.null_count
    return total


def _check_no_empty(place: str, file: Any, column: str) -> None:
    missing = _empty_cells(file, column)
    if missing:
        rows, them = ("1 row has", "it") if missing == 1 else (f"{missing} rows have", "them")
        raise DataError(f"{rows} no image in the column {column!r} of {printable_path(place)}; fill or remove {them}")


def _class_names(schema: Any, label: str | None) -> list[str] | None:
    """Return the class names that Hugging Face datasets stored for integer labels, if any."""
    text = (schema.metadata or {}).get(b"huggingface")
    try:
        feature = json.loads(text)["info"]["features"][label] if text is not None else {}
        while isinstance(feature, list) or "feature" in feature:  # a list of classes
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        names = feature["names"]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _rows(file: Any, columns: Columns, at_once: int = 65_536) -> Iterator[ManifestRow]:
    """Iterate over the rows, reading only the given columns."""
    chosen = (columns.image, columns.name, columns.split)
    names = [column for column in (*chosen, *columns.labels) if column]
    numbers = itertools.count(1)
    if not names:
        yield from (ManifestRow(next(numbers), None) for _ in range(file.metadata.num_rows))
        return
    for batch in file.iter_batches(batch_size=at_once, columns=names, use_threads=False):
        cells = [batch.column(column).to_pylist() if column else itertools.repeat(None) for column in chosen]
        labels = [batch.column(column).to_pylist() for column in columns.labels]
        each = zip(*labels, strict=True) if labels else itertools.repeat(())
        for image, name, split, some in zip(*cells, each, strict=False):
            yield ManifestRow(next(numbers), image, some, name, split)


def _read_errors(arrow: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions that pyarrow raises for a corrupt file, or for one that is not Parquet."""
    return OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError, arrow.ArrowException


def _one_line(fault: Exception) -> str:
    text = reason_of(fault) if isinstance(fault, OSError | ValueError) else str(fault)
    return " ".join(text.split())[:200]


# ── several files ──

Table = Manifest | ParquetImages


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
    reading = _decide_jointly(paths, labelling, unlabelled) if len(paths) > 1 and labelling.kind is None else None
    if reading is not None:
        labelling = labelling._replace(kind=reading.kind, separator=reading.separator)
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
    classes, labels, targets = _joined_labels(tables, reading)
    return Tables(tables, classes, labels, np.concatenate(divided) if divided else None, targets)


def _decide_jointly(paths: Sequence[str], labelling: Labelling, unlabelled: bool) -> Reading | None:
    """Return how to read the label columns of several files: one file alone may look different from all of them."""
    images: Counter[Cell] = Counter()
    request = None
    for path in paths:
        arrow = import_pyarrow(path)
        try:
            with open_stored(path) as raw, arrow.parquet.ParquetFile(raw) as file:
                columns = _columns(path, arrow, file, labelling, unlabelled)
                if len(columns.labels) != 1 or columns.are_names or _class_names(file.schema_arrow, columns.labels[0]):
                    return None
                request = request or LabelRequest(columns, labelling, None, unlabelled=unlabelled)
                images.update(count_cells(_rows(file, Columns("", columns.labels, None, None))))
        except _read_errors(arrow) as fault:
            raise DataError(f"{printable_path(path)} cannot be read as Parquet: {_one_line(fault)}") from None
    return None if request is None else request.decide(images)


def _joined_labels(tables: Sequence[Table], reading: Reading | None) -> Labelled:
    """Return the labels of all files, with the classes or targets of any."""
    place = printable_path(tables[0].place)
    targets = [table.targets for table in tables if table.targets is not None]
    if targets:
        return _joined_targets(tables, targets, reading, place)
    classes = tables[0].classes
    if any(table.classes != classes for table in tables):
        names = list(dict.fromkeys(name for table in tables for name in table.classes))
        classes, _ = order_classes(names, place=place)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [np.array([*(numbers[name] for name in table.classes), -1], np.int64)[table.labels] for table in tables]
    return Labelled(classes, np.concatenate(labels))


def _joined_targets(
    tables: Sequence[Table], targets: Sequence[Targets], reading: Reading | None, place: str
) -> Labelled:
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
    reason = first.reason if reading is None else reading.reason
    return with_strata(names, values, known, Reading(first.kind, separator=first.separator, reason=reason), place)
