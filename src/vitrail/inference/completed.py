"""An output of predict that is whole: does it have the rows that it would have now?"""

import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from vitrail.data.inputs import Item
from vitrail.data.sources.index_files import shown
from vitrail.data.sources.parquet import import_pyarrow
from vitrail.data.sources.source import reason_of
from vitrail.errors import DataError
from vitrail.inference.writing import Format, Sink, parquet_path, read_record, whole_records


def count_finished(target: Path, format: Format, items: Iterator[Item]) -> Sink:
    """Count the rows of a finished output, which must be those of the images as they are listed now.

    What they were computed with is not known any more.
    """
    counted = Sink()
    for row, item in zip_longest(_rows(target, format), items):
        there = None if row is None else row[1]
        wanted = None if item is None else parquet_path(item.name) if format == "parquet" else item.name
        if there != wanted or (row is not None and row[0] != counted.done + 1):
            raise DataError(
                f"row {counted.done + 1:,} of {shown(os.fspath(target))}, which is finished, is {_said(there)}, and "
                f"now {_said(wanted)} would be there: the images have changed; make it again with --overwrite"
            )
        if row is not None:
            counted.count(row[1], row[2])
    return counted


def _said(path: bytes | None) -> str:
    return "nothing" if path is None else shown(path)


def _rows(target: Path, format: Format) -> Iterator[tuple[int, bytes, str | None]]:
    """Give number, path and error of every row."""
    try:
        yield from _of_parquet(target) if format == "parquet" else _of_lines(target, format)
    except (ValueError, LookupError, TypeError):
        raise DataError(
            f"{shown(os.fspath(target))} exists already and has no rows of predict; choose another name, or replace it "
            f"with --overwrite"
        ) from None
    except OSError as fault:
        reason = " ".join(reason_of(fault).split())[:200]  # pyarrow's reasons have several lines
        raise DataError(f"{shown(os.fspath(target))} cannot be read: {reason}") from None


def _of_lines(target: Path, format: Format) -> Iterator[tuple[int, bytes, str | None]]:
    with target.open("rb") as file:
        records, end = whole_records(file, format), 0
        if format == "csv":
            header, end = next(records, (b"", 0))
            if not header.startswith(b"number,path,error"):
                raise ValueError(header)
        for record, after in records:
            yield read_record(record, format)
            end = after
        if end < os.fstat(file.fileno()).st_size:
            raise ValueError("the last line is not whole")


def _of_parquet(target: Path) -> Iterator[tuple[int, bytes, str | None]]:
    arrow: Any = import_pyarrow(os.fspath(target))
    with arrow.parquet.ParquetFile(target) as file:  # what is wrong with it is a ValueError or an OSError
        if not {"number", "path", "error"} <= set(file.schema_arrow.names):
            raise ValueError(target)
        for batch in file.iter_batches(columns=["number", "path", "error"]):
            for row in batch.to_pylist():
                yield row["number"], str(row["path"]).encode(), row["error"]
