"""Predictions as text: a table for people, JSONL and CSV as they come, and Parquet made of JSONL at the end.

    number         counted from 1
    path           as it was given; a file in a tar has the tar's path before its own
    error          why there is no answer, or nothing
    classes        the likeliest classes, the likeliest first
    probabilities  how likely they are

A path may have any bytes. In JSON a byte that is no UTF-8 is written `\\udcXX`, which Python turns into a text that
`open` takes; in CSV it is the byte itself; in Parquet, whose text cannot hold it, the four characters `\\xXX`.
"""

import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, Self, get_args

from vitrail.data.inputs import Item
from vitrail.data.sources.index_files import shown
from vitrail.data.sources.parquet import import_pyarrow
from vitrail.errors import ConfigError, suggest
from vitrail.evaluation import percent
from vitrail.terminal import printable

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
"""Characters that a column of the table is made wide for."""


class PredictionRow(NamedTuple):
    """What is said of one image."""

    number: int
    path: bytes
    error: str | None
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]


class Writer(Protocol):
    """Turns rows into bytes."""

    def header(self) -> bytes:
        """Return what stands before the first row."""

    def encode(self, rows: Iterable[PredictionRow]) -> bytes:
        """Return rows as they are written."""


def choose_format(asked: str | None, output: Path | None, *, watched: bool) -> Format:
    """Return the format that was asked for, or that the name of the output ends with.

    Without a file it is a table where a person is `watched` by, and JSONL where a program reads.
    """
    if asked is not None:
        if asked not in get_args(Format):
            raise ConfigError(
                f"no format is called {asked!r}{suggest(asked, get_args(Format))}; there are table, jsonl, csv, parquet"
            )
        if asked == "parquet" and output is None:
            raise ConfigError("Parquet is written to a file; give one with --output")
        return asked  # type: ignore[return-value]
    if output is None:
        return "table" if watched else "jsonl"
    if output.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"the name {shown(os.fspath(output))} does not say what to write; let it end in .jsonl, .csv or .parquet, "
            f"or give --format"
        )
    return SUFFIXES[output.suffix.lower()]


def open_writer(format: Format, top: int) -> Writer:
    """Return the writer of a format for so many classes; rows for Parquet are kept as JSONL until the end."""
    match format:
        case "csv":
            return Csv(top)
        case "table":
            return Table()
        case _:
            return Jsonl()


class Jsonl:
    """A JSON object on every line."""

    def header(self) -> bytes:
        """Return nothing."""
        return b""

    def encode(self, rows: Iterable[PredictionRow]) -> bytes:
        """Return a line for each row."""
        # A byte that is no UTF-8 is half a surrogate pair in a text of Python's; written as JSON writes those.
        lines = (json.dumps(row._replace(path=os.fsdecode(row.path))._asdict(), ensure_ascii=False) for row in rows)  # type: ignore[arg-type]
        return "".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace")


class Csv:
    """Comma-separated values, with two columns for each of the likeliest classes."""

    def __init__(self, top: int) -> None:
        self.top = top
        self._lines: list[str] = []
        # The standard's line ends make the writer quote both characters; the lines themselves end as Unix's do.
        self._writer = csv.writer(self, lineterminator="\r\n")

    def write(self, line: str) -> None:
        """Take a line from the writer."""
        self._lines.append(line.removesuffix("\r\n") + "\n")

    def header(self) -> bytes:
        """Return the names of the columns."""
        places = range(1, self.top + 1)
        columns = [column for place in places for column in (f"class_{place}", f"probability_{place}")]
        self._writer.writerow(["number", "path", "error", *columns])
        return self._taken()

    def encode(self, rows: Iterable[PredictionRow]) -> bytes:
        """Return a line for each row, or several where a path has line breaks."""
        for row in rows:
            pairs = [cell for pair in zip(row.classes, row.probabilities, strict=True) for cell in pair]
            empty = [""] * (2 * self.top - len(pairs))
            self._writer.writerow([row.number, os.fsdecode(row.path), row.error or "", *pairs, *empty])
        return self._taken()

    def _taken(self) -> bytes:
        text = "".join(self._lines)
        self._lines.clear()
        return text.encode("utf-8", "surrogateescape")


class Table:
    """A line for each image, for people; the first rows say how wide the columns are."""

    def __init__(self) -> None:
        self._widths: list[int] = []

    def header(self) -> bytes:
        """Return nothing: the columns' widths are not known yet."""
        return b""

    def encode(self, rows: Iterable[PredictionRow]) -> bytes:
        """Return a line for each row, and before the first the names of the columns."""
        lines = [_cells(row) for row in rows]
        if not lines:
            return b""
        if not self._widths:
            lines.insert(0, ("image", "class", "sure", "then"))
            self._widths = [min(LONGEST, max(len(line[column]) for line in lines)) for column in range(3)]
        wide = self._widths
        text = "".join(f"{a:<{wide[0]}}  {b:<{wide[1]}}  {c:>{wide[2]}}  {d}".rstrip() + "\n" for a, b, c, d in lines)
        return text.encode("utf-8", "replace")


def _cells(row: PredictionRow) -> tuple[str, str, str, str]:
    if row.error is not None:
        return shown(row.path), "–", "–", printable(row.error, line=True)
    shares = [f"{percent(p)}%" for p in row.probabilities]
    names = [printable(name, line=True) for name in row.classes]  # also in a file: this one is for people to look at
    others = ", ".join(f"{name} {share}" for name, share in zip(names[1:], shares[1:], strict=True))
    return shown(row.path), names[0], shares[0], others


class Sink:
    """Where rows go; it counts them. Used in a `with`, for as long as it is open."""

    def __init__(self) -> None:
        self.done = self.bad = 0
        """Rows, and those of them with an error."""
        self.first_bad: tuple[bytes, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def skip_done(self, items: Iterator[Item]) -> Iterator[Item]:
        """Return the images that have no row yet."""
        return items

    def write(self, rows: Sequence[PredictionRow]) -> None:
        """Take rows."""
        for row in rows:
            self.count(row.path, row.error)

    def finish(self) -> None:
        """Do what is to be done after the last row."""

    def count(self, path: bytes, error: str | None) -> None:
        """Count a row."""
        self.done += 1
        if error is not None:
            self.bad += 1
            self.first_bad = self.first_bad or (path, error)


class TerminalWriter(Sink):
    """Standard output."""

    def __init__(self, format: Format, top: int) -> None:
        super().__init__()
        self.writer = open_writer(format, top)

    def __enter__(self) -> Self:
        self._put(self.writer.header())
        return self

    def write(self, rows: Sequence[PredictionRow]) -> None:
        """Write rows at once: whoever reads them may be waiting."""
        self._put(self.writer.encode(rows))
        super().write(rows)

    def _put(self, text: bytes) -> None:
        if sys.stdout.isatty():  # what goes into a file or to a program stays as it is
            text = printable(text.decode("utf-8", "surrogateescape")).encode("utf-8", "replace")
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


# ── reading back what was written ──


def whole_records(file: BinaryIO, format: Format) -> Iterator[tuple[bytes, int]]:
    """Give the records of a file from its start, each with where it ends; one that was cut off is left out."""
    record, end = b"", 0
    for line in file:
        record += line
        # Within quotes a line break belongs to a path; quotes are always written in pairs.
        if not line.endswith(b"\n") or (format == "csv" and record.count(b'"') % 2):
            continue
        end += len(record)
        yield record, end
        record = b""


def read_record(record: bytes, format: Format) -> tuple[int, bytes, str | None]:
    """Return number, path and error of a row; ValueError where it is none."""
    if format == "csv":
        fields = next(csv.reader(io.StringIO(record.decode("utf-8", "surrogateescape"), newline="")), [])
        if len(fields) < 3:
            raise ValueError(record)
        return int(fields[0]), os.fsencode(fields[1]), fields[2] or None
    found = json.loads(record)
    if not isinstance(found, dict) or not {"number", "path", "error"} <= found.keys():
        raise ValueError(record)
    return int(found["number"]), os.fsencode(str(found["path"])), found["error"]


def parquet_path(path: bytes) -> bytes:
    """Return a path as Parquet has it: in UTF-8, with other bytes written out."""
    return path.decode("utf-8", "backslashreplace").encode()


def write_parquet(lines: Iterable[bytes], target: Path) -> None:
    """Make a Parquet file of JSON lines, a row group at a time."""
    arrow: Any = import_pyarrow(os.fspath(target))
    schema = arrow.schema(
        [
            ("number", arrow.int64()),
            ("path", arrow.string()),
            ("error", arrow.string()),
            ("classes", arrow.list_(arrow.string())),
            ("probabilities", arrow.list_(arrow.float32())),
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
