"""Check that a finished output of predict has the rows that the images would give now."""

import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from vitrail.data.inputs import Item
from vitrail.data.sources.parquet import import_pyarrow
from vitrail.data.sources.source import reason_of
from vitrail.errors import DataError
from vitrail.inference.writing import Format, Sink, complete_records, parquet_path, read_record
from vitrail.text import printable_path


def count_finished(target: Path, format: Format, items: Iterator[Item]) -> Sink:
    """Count the rows of a finished output, which must match the images as listed now.

    The model and settings of a finished output are not recorded, so they are not compared.
    """
    counted = Sink()
    for row, item in zip_longest(_rows(target, format), items):
        written = None if row is None else row[1]
        expected = None if item is None else parquet_path(item.name) if format == "parquet" else item.name
        if written != expected or (row is not None and row[0] != counted.done + 1):
            raise DataError(
                f"{printable_path(os.fspath(target))} is finished, but its row {counted.done + 1:,} is "
                f"{_name(written)} and "
                f"would now be {_name(expected)}: the images have changed; recreate it with --overwrite"
            )
        if row is not None:
            counted.count(row[1], row[2])
    return counted


def _name(path: bytes | None) -> str:
    return "nothing" if path is None else printable_path(path)


def _rows(target: Path, format: Format) -> Iterator[tuple[int, bytes, str | None]]:
    """Yield number, path and error of every row."""
    try:
        yield from _of_parquet(target) if format == "parquet" else _of_lines(target, format)
    except (ValueError, LookupError, TypeError):
        raise DataError(
            f"{printable_path(os.fspath(target))} already exists and was not written by predict; choose another "
            "name, or "
            f"replace it with --overwrite"
        ) from None
    except OSError as fault:
        reason = " ".join(reason_of(fault).split())[:200]  # pyarrow's messages have several lines
        raise DataError(f"{printable_path(os.fspath(target))} cannot be read: {reason}") from None


def _of_lines(target: Path, format: Format) -> Iterator[tuple[int, bytes, str | None]]:
    with target.open("rb") as file:
        records, end = complete_records(file, format), 0
        if format == "csv":
            header, end = next(records, (b"", 0))
            if not header.startswith(b"number,path,error"):
                raise ValueError(header)
        for record, after in records:
            yield read_record(record, format)
            end = after
        if end < os.fstat(file.fileno()).st_size:
            raise ValueError("the last line is incomplete")


def _of_parquet(target: Path) -> Iterator[tuple[int, bytes, str | None]]:
    arrow: Any = import_pyarrow(os.fspath(target))
    with arrow.parquet.ParquetFile(target) as file:  # raises ValueError or OSError for an invalid file
        if not {"number", "path", "error"} <= set(file.schema_arrow.names):
            raise ValueError(target)
        for batch in file.iter_batches(columns=["number", "path", "error"]):
            for row in batch.to_pylist():
                yield row["number"], str(row["path"]).encode(), row["error"]
