"""Parquet manifests: image paths, or the image bytes, as written by Hugging Face datasets."""

import importlib
import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.remote.filesystems import Status, public_url
from vitrail.data.remote.stored_files import RemoteFile, StoredFile, open_stored
from vitrail.data.sources.columns import (
    IMAGE_COLUMNS,
    Columns,
    LabelCollector,
    LabelRequest,
    ManifestRow,
    choose_columns,
    request_labels,
)
from vitrail.data.sources.index_files import Progress
from vitrail.data.sources.kinds import candidates
from vitrail.data.sources.labels import Faults, report_faults
from vitrail.data.sources.manifests import PROGRESS_EVERY, Manifest, manifest_of
from vitrail.data.sources.source import Labels, reason_of, stamp_file
from vitrail.data.sources.targets import AUTOMATIC, Labelling, Targets
from vitrail.errors import DataError
from vitrail.text import printable_path

GROUPS_HELD = 4
"""Number of row groups a process keeps in memory."""


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
    columns = columns_of(place, arrow, file, labelling, unlabelled)
    column = _bytes_column(arrow, file, columns.image)
    names = stored_class_names(file.schema_arrow, columns.labels[0]) if len(columns.labels) == 1 else None
    if names is not None:
        columns = columns._replace(name=None)

    def rows_of(labels: tuple[str, ...]) -> Iterator[ManifestRow]:
        return rows_of_file(file, Columns("", labels, None, None))

    request = _request(place, arrow, file, columns, labelling, rows_of, unlabelled, named=names is not None)
    if column is None:
        rows = rows_of_file(file, request.columns)
        return manifest_of(
            place, request, rows, rows_of, unit="row", names=names, faults=faults, on_progress=on_progress
        )
    _check_no_empty(place, file, column)
    # Hugging Face writes -1 for an unknown label.
    unknown = "-1" if names and unlabelled else None
    collector = LabelCollector(place, request, rows_of, unit="row", names=names, unknown=unknown)
    wrong: list[str] = []
    for row in rows_of_file(file, request.columns._replace(image="")):
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
    if not columns.labels and not number_columns(arrow, file, columns):
        labelling = Labelling(kind="classes")
    return request_labels(place, columns, labelling, rows_of, unlabelled=unlabelled, named=named)


def number_columns(arrow: Any, file: Any, columns: Columns) -> tuple[str, ...]:
    """Return the columns that may hold labels though their names do not say so, if all of these hold numbers."""
    types, chosen = arrow.types, candidates(columns.others)
    kinds = [file.schema_arrow.field(name).type for name in chosen]
    numeric = (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal)
    return chosen if all(any(is_kind(kind) for is_kind in numeric) for kind in kinds) else ()


def read_parquet(place: str) -> Iterator[ManifestRow]:
    """Iterate over a file lazily; `ManifestRow.image` is an image's bytes, its path, or both in a dict."""
    with opened_parquet(place) as (arrow, file):
        columns = Columns(columns_of(place, arrow, file).image, (), None, None)
        at_once = 65_536 if _bytes_column(arrow, file, columns.image) is None else 16
        yield from rows_of_file(file, columns, at_once)


def images_of(place: str) -> ParquetImages:
    """Open a file for its image bytes by row, without reading labels."""
    with opened_parquet(place) as (arrow, file):
        column = _bytes_column(arrow, file, columns_of(place, arrow, file).image)
        groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    if column is None:
        raise DataError(f"{printable_path(place)} has no image bytes any more; rerun with --overwrite")
    ends = np.cumsum(groups, dtype=np.int64)
    return ParquetImages(place, column, ends, (), np.full(sum(groups), -1, np.int64), None)


def columns_of(place: str, arrow: Any, file: Any, labelling: Labelling = AUTOMATIC, unlabelled: bool = True) -> Columns:
    """Identify the columns. Bytes go before paths: if a file has both, the paths are the origin of the bytes."""
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


def stored_class_names(schema: Any, label: str | None) -> list[str] | None:
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


def rows_of_file(file: Any, columns: Columns, at_once: int = 65_536) -> Iterator[ManifestRow]:
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


@contextmanager
def opened_parquet(place: str) -> Iterator[tuple[Any, Any]]:
    """Open a Parquet file; what goes wrong is a `DataError`."""
    arrow = import_pyarrow(place)
    try:
        with open_stored(place) as raw, arrow.parquet.ParquetFile(raw) as file:
            yield arrow, file
    except _read_errors(arrow) as fault:
        raise DataError(f"{printable_path(place)} cannot be read as Parquet: {_one_line(fault)}") from None


Table = Manifest | ParquetImages
