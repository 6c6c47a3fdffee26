"""Predictions as rows: a table for the terminal, JSONL and CSV as they come, and Parquet written from JSONL at the end.

    number         counted from 1
    path           as passed in; for a file in a tar, the tar's path and the path inside
    error          why the image has no prediction, or empty
    classes        of a classifier: the most likely classes, in order of probability
    probabilities  their probabilities
                   other tasks have other fields: `RowFormat.types`

A path may contain any bytes. In JSON a byte that is not UTF-8 is written `\\udcXX`, which Python decodes to a str that
`open` accepts; in CSV it is the byte itself; in Parquet, whose strings cannot hold it, the four characters `\\xXX`.
"""

import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, Self, get_args

from vitrail.data.inputs import Item
from vitrail.data.sources.parquet import import_pyarrow
from vitrail.errors import ConfigError, suggest
from vitrail.io import writing_to_stdout
from vitrail.tasks.task import FieldType, Prediction, RowFormat
from vitrail.text import printable, printable_path

Format = Literal["table", "jsonl", "csv", "parquet"]
SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "table",
}
ROW_GROUP = 65_536
LONGEST = 60
"""Maximum width of a table column."""


class PredictionRow(NamedTuple):
    """The prediction for one image."""

    number: int
    path: bytes
    prediction: Prediction


class Writer(Protocol):
    """Encodes rows as bytes."""

    def header(self) -> bytes:
        """Return what precedes the first row."""

    def encode(self, rows: Iterable[PredictionRow]) -> bytes:
        """Return encoded rows."""


def choose_format(requested: str | None, output: Path | None, *, interactive: bool) -> Format:
    """Return the requested format, or that of the output's suffix.

    Without a file it is a table on an `interactive` terminal, and JSONL otherwise.
    """
    if requested is not None:
        if requested not in get_args(Format):
            raise ConfigError(
                f"unknown format {requested!r}{suggest(requested, get_args(Format))}; "
                "choose table, jsonl, csv or parquet"
            )
        if requested == "parquet" and output is None:
            raise ConfigError("Parquet needs a file; give one with --output")
        return requested  # type: ignore[return-value]
    if output is None:
        return "table" if interactive else "jsonl"
    if output.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"{printable_path(os.fspath(output))} has no known suffix; use .jsonl, .csv or .parquet, or give --format"
        )
    return SUFFIXES[output.suffix.lower()]


def open_writer(format: Format, rows: RowFormat, top: int) -> Writer:
    """Return the writer of a format for rows with `top` values; rows for Parquet are kept as JSONL until the end."""
    match format:
        case "csv":
            return Csv(rows, top)
        case "table":
            return Table(rows)
        case _:
            return Jsonl()


class Jsonl:
    """A JSON object on every line."""

    def __init__(self) -> None:
        self._to_json = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode

    def header(self) -> bytes:
        """Return nothing: JSONL has no header."""
        return b""

    def encode(self, rows: Iterable[PredictionRow]) -> bytes:
        """Return one line per row."""
        # Python decodes a byte that is not UTF-8 to a lone surrogate, which is written as a JSON escape.
        lines = (
            self._to_json(
                {
                    "number": row.number,
                    "path": os.fsdecode(row.path),
                    "error": row.prediction.error,
                    **row.prediction.fields(),
                }
            )
            for row in rows
        )
        return "".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace")


class Csv:
    """Comma-separated values, in the columns of the task."""

    def __init__(self, rows: RowFormat, top: int) -> None:
        self.rows, self.top = rows, top
        self._lines: list[str] = []
        # With \\r\\n as line end the writer quotes both characters; the lines themselves end in \\n.
        self._writer = csv.writer(self, lineterminator="\r\n")

    def write(self, line: str) -> None:
        """Receive a line from the CSV writer."""
        self._lines.append(line.removesuffix("\r\n") + "\n")

    def header(self) -> bytes:
        """Return the column names."""
        self._writer.writerow(["number", "path", "error", *self.rows.csv_header(self.top)])
        return self._flush()

    def encode(self, rows: Iterable[PredictionRow]) -> bytes:
        """Return one line per row, or several if a path has line breaks."""
        for row in rows:
            cells = self.rows.csv_cells(row.prediction.fields(), self.top)
            self._writer.writerow([row.number, os.fsdecode(row.path), row.prediction.error or "", *cells])
        return self._flush()

    def _flush(self) -> bytes:
        text = "".join(self._lines)
        self._lines.clear()
        return text.encode("utf-8", "surrogateescape")


class Table:
    """One line per image, for people; the first rows determine the column widths."""

    def __init__(self, rows: RowFormat) -> None:
        self.rows = rows
        self._widths: list[int] = []

    def header(self) -> bytes:
        """Return nothing: the column widths are not known yet."""
        return b""

    def encode(self, rows: Iterable[PredictionRow]) -> bytes:
        """Return one line per row, preceded by the column names the first time."""
        lines = [self._cells(row) for row in rows]
        if not lines:
            return b""
        if not self._widths:
            lines.insert(0, ("image", *self.rows.title))
            self._widths = [min(LONGEST, max(len(line[column]) for line in lines)) for column in range(3)]
        wide = self._widths
        text = "".join(f"{a:<{wide[0]}}  {b:<{wide[1]}}  {c:>{wide[2]}}  {d}".rstrip() + "\n" for a, b, c, d in lines)
        return text.encode("utf-8", "replace")

    def _cells(self, row: PredictionRow) -> tuple[str, str, str, str]:
        if row.prediction.error is not None:
            return printable_path(row.path), "–", "–", printable(row.prediction.error, line=True)
        return printable_path(row.path), *self.rows.table_cells(row.prediction.fields())


class Sink:
    """A destination for rows that counts them; a context manager."""

    def __init__(self) -> None:
        self.done = self.bad = 0
        """Number of rows, and of rows with an error."""
        self.first_bad: tuple[bytes, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def skip_done(self, items: Iterator[Item]) -> Iterator[Item]:
        """Return the images without a row."""
        return items

    def write(self, rows: Sequence[PredictionRow]) -> None:
        """Write rows."""
        for row in rows:
            self.count(row.path, row.prediction.error)

    def finish(self) -> None:
        """Called after the last row."""

    def count(self, path: bytes, error: str | None) -> None:
        """Count a row."""
        self.done += 1
        if error is not None:
            self.bad += 1
            self.first_bad = self.first_bad or (path, error)


class TerminalWriter(Sink):
    """Standard output."""

    def __init__(self, format: Format, rows: RowFormat, top: int) -> None:
        super().__init__()
        self.writer = open_writer(format, rows, top)

    def __enter__(self) -> Self:
        self._put(self.writer.header())
        return self

    def write(self, rows: Sequence[PredictionRow]) -> None:
        """Write and flush rows: the reader may be waiting."""
        self._put(self.writer.encode(rows))
        super().write(rows)

    def _put(self, text: bytes) -> None:
        if sys.stdout.isatty():  # files and pipes get the raw text
            text = printable(text.decode("utf-8", "surrogateescape")).encode("utf-8", "replace")
        with writing_to_stdout():
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()


# ── reading rows back ──


def complete_records(file: BinaryIO, format: Format) -> Iterator[tuple[bytes, int]]:
    """Yield the complete records of a file, each with its end offset."""
    record, end = b"", 0
    for line in file:
        record += line
        # A line break within quotes belongs to a path; quotes always come in pairs.
        if not line.endswith(b"\n") or (format == "csv" and record.count(b'"') % 2):
            continue
        end += len(record)
        yield record, end
        record = b""


def read_record(record: bytes, format: Format) -> tuple[int, bytes, str | None]:
    """Return number, path and error of a row; raise ValueError if it is not one."""
    if format == "csv":
        fields = next(csv.reader(io.StringIO(record.decode("utf-8", "surrogateescape"), newline="")), [])
        if len(fields) < 3:
            raise ValueError(record)
        return int(fields[0]), os.fsencode(fields[1]), fields[2] or None
    row = json.loads(record)
    if not isinstance(row, dict) or not {"number", "path", "error"} <= row.keys():
        raise ValueError(record)
    return int(row["number"]), os.fsencode(str(row["path"])), row["error"]


def parquet_path(path: bytes) -> bytes:
    """Return a path as Parquet stores it: UTF-8, with other bytes escaped."""
    return path.decode("utf-8", "backslashreplace").encode()


def write_parquet(lines: Iterable[bytes], target: Path, types: Mapping[str, FieldType]) -> None:
    """Write a Parquet file from JSON lines, one row group at a time; `types` are those of the task's fields."""
    arrow: Any = import_pyarrow(os.fspath(target))
    made = {
        "string": arrow.string(),
        "float": arrow.float32(),
        "strings": arrow.list_(arrow.string()),
        "floats": arrow.list_(arrow.float32()),
    }
    schema = arrow.schema(
        [
            ("number", arrow.int64()),
            ("path", arrow.string()),
            ("error", arrow.string()),
            *((name, made[kind]) for name, kind in types.items()),
        ]
    )
    with arrow.parquet.ParquetWriter(target, schema) as writer:
        held: list[dict[str, Any]] = []
        for line in lines:
            row = json.loads(line)
            row["path"] = parquet_path(os.fsencode(row["path"])).decode()
            held.append(row)
            if len(held) == ROW_GROUP:
                writer.write_table(arrow.Table.from_pylist(held, schema=schema))
                held.clear()
        if held:
            writer.write_table(arrow.Table.from_pylist(held, schema=schema))
