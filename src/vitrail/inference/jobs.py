"""A predict job that can be stopped at any moment and resumes without repeating or losing a row.

    FILE             JSONL, CSV: the rows, appended batch by batch; Parquet: written from the rows at the end
    FILE.rows.jsonl  Parquet only: the rows until then
    FILE.job.json    the job's settings, until it is finished

A row is done when its line is complete. To resume, the existing lines are compared with the images as listed now, so
that added or removed images are noticed; an incomplete last line is dropped.
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Self

from pydantic import TypeAdapter

from vitrail.data.inputs import Item
from vitrail.data.sources.source import reason_of
from vitrail.errors import ConfigError, DataError
from vitrail.inference.writing import (
    Format,
    PredictionRow,
    Sink,
    complete_records,
    open_writer,
    read_record,
    write_parquet,
)
from vitrail.io import full_disk_hint, read_json, try_lock
from vitrail.runtime import InferencePrecision
from vitrail.tasks.task import RowFormat
from vitrail.text import printable_path

_DESCRIPTIONS = {
    "places": "other images",
    "model": "another model",
    "top": "another number of classes (--top)",
    "engine": "another engine",
    "precision": "another precision",
    "decode": "another decoder (--decode)",
    "format": "another format",
    "calibration": "other calibration images",
    "masks": "another folder of masks (--masks)",
    "window": "another window (--window)",
}


@dataclass(frozen=True)
class PredictJob:
    """Everything the rows depend on, so that rows of two jobs are never mixed."""

    places: str
    """A digest of the input paths."""
    model: str
    """A digest of weights, preprocessing and class names."""
    top: int
    engine: str
    precision: str
    """As requested."""
    format: Format
    computed: InferencePrecision
    """The precision used: `precision`, or what "auto" resolved to."""
    decode: str = "auto"
    """Where JPEGs are decoded, as requested."""
    decoder: str = "cpu"
    """Where they are decoded."""
    calibration: str = ""
    """In int8, a digest of the quantised model."""
    masks: str = ""
    """The folder of the masks, if they are written."""
    window: float | None = None
    """The scale of the windows, if the model sees images in windows."""

    def differences(self, other: "PredictJob") -> list[str]:
        """Describe how another job differs."""
        return [text for field, text in _DESCRIPTIONS.items() if getattr(self, field) != getattr(other, field)]


def digest_places(places: Sequence[str], null: bool) -> str:
    """Return a digest of the input paths."""
    digest = hashlib.sha256(b"0" if null else b"1")
    for place in places:
        digest.update(os.fsencode(os.path.abspath(place)) + b"\0")
    return digest.hexdigest()[:32]


def check_target(target: Path, format: Format, places: Sequence[str], *, resume: bool, overwrite: bool) -> None:
    """Raise if an output cannot be written or would overwrite other data."""
    name = printable_path(os.fspath(target))
    if resume and overwrite:
        raise ConfigError("--resume keeps existing rows and --overwrite drops them; give only one of them")
    if resume and format == "table":
        raise ConfigError("a table cannot be resumed; write jsonl, csv or parquet")
    if target.is_dir():
        raise DataError(f"{name} is a folder; give the name of a file to write")
    if target.exists() and not target.is_file():
        raise DataError(f"{name} is not a regular file; omit --output to write to stdout")
    if not target.absolute().parent.is_dir():
        raise DataError(f"{name} is in a folder that does not exist; create the folder first")
    if any(os.path.exists(place) and os.path.exists(target) and os.path.samefile(place, target) for place in places):
        raise DataError(f"{name} is one of the inputs; write to another file")
    if _job_file(target).exists() and not resume and not overwrite:
        raise DataError(f"{name} belongs to an interrupted job; resume it with --resume, or restart with --overwrite")
    if not resume and not overwrite and is_finished(target):
        raise DataError(f"{name} already exists; choose another name, or replace it with --overwrite")


def is_finished(target: Path) -> bool:
    """Return whether a finished output exists."""
    return not _job_file(target).exists() and target.exists() and target.stat().st_size > 0


def earlier_job(target: Path) -> PredictJob | None:
    """Return the interrupted job, if any."""
    try:
        return TypeAdapter(PredictJob).validate_python(read_json(_job_file(target)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):  # pydantic's errors are among them
        raise DataError(
            f"{printable_path(os.fspath(_job_file(target)))} cannot be read, so the job cannot be resumed; restart it "
            f"with --overwrite"
        ) from None


class Output(Sink):
    """The file that rows are appended to. With `resume`, existing rows are kept."""

    def __init__(self, target: Path, job: PredictJob, rows: RowFormat, *, resume: bool, overwrite: bool) -> None:
        super().__init__()
        self.target, self.job, self.overwrite = target, job, overwrite
        self.lines: Format = "jsonl" if job.format == "parquet" else job.format
        self.rows, self.writer = rows, open_writer(job.format, rows, job.top)
        before = earlier_job(target) if resume else None
        if before is not None and (differences := before.differences(job)):
            raise DataError(
                f"{printable_path(os.fspath(target))} was started with {' and '.join(differences)}; use the same "
                "settings, or restart with --overwrite"
            )
        self._fresh = before is None

    def __enter__(self) -> Self:
        with _explained(self.target):
            handle = os.open(_rows_file(self.target, self.job.format), os.O_RDWR | os.O_CREAT, 0o666)
            # Unbuffered: a write that failed on a full disk must not be retried on close.
            self.file = io.FileIO(handle, "r+")
            try:
                if not try_lock(self.file):
                    raise DataError(
                        f"{printable_path(os.fspath(self.target))} is being written by another process; wait for it"
                    )
                self._check_unchanged()
                if self._fresh:
                    self._start()
            except BaseException:  # always close the file
                self.file.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _check_unchanged(self) -> None:
        """Raise if another process started or finished the output while this one was loading its model."""
        started = _job_file(self.target).exists()
        as_expected = not started and not is_finished(self.target) if self._fresh else started
        if self.overwrite or as_expected:
            return
        if not started and self.job.format == "parquet":
            _rows_file(self.target, "parquet").unlink()  # just created by us
        raise DataError(
            f"{printable_path(os.fspath(self.target))} was written by another process in the meantime; rerun the "
            "command to resume from there"
        )

    def _start(self) -> None:
        # Drop the old rows before the new job file exists, so that they are never taken for its rows.
        _job_file(self.target).unlink(missing_ok=True)
        self.file.truncate(0)
        temporary = _job_file(self.target).with_suffix(".part")
        temporary.write_text(json.dumps(asdict(self.job)) + "\n", encoding="utf-8")
        temporary.replace(_job_file(self.target))
        self._append(self.writer.header())

    def skip_done(self, items: Iterator[Item]) -> Iterator[Item]:
        """Return the images without a row, after comparing the others with theirs."""
        with self._reader() as reader:
            end = self._compare(complete_records(reader, self.lines), items)
        self.file.seek(end)
        self.file.truncate()
        if not end:
            self._append(self.writer.header())
        return items

    def _compare(self, records: Iterator[tuple[bytes, int]], items: Iterator[Item]) -> int:
        """Count the existing rows, and return where they end."""
        end = 0
        if header := self.writer.header():
            first = next(records, None)
            if first is None or first[0] != header:
                return 0
            end = first[1]
        for record, after in records:
            try:
                number, path, error = read_record(record, self.lines)
            except ValueError:  # a machine crash may leave garbage at the end
                break
            item = next(items, None)
            if item is None or number != self.done + 1 or path != item.name:
                actual = "nothing" if item is None else printable_path(item.name)
                raise DataError(
                    f"row {self.done + 1} of {printable_path(os.fspath(self.target))} is {printable_path(path)}, "
                    f"but would now be {actual}: the images have changed; restart with --overwrite"
                )
            self.count(path, error)
            end = after
        return end

    def write(self, rows: Sequence[PredictionRow]) -> None:
        """Append rows."""
        with _explained(self.target):
            self._append(self.writer.encode(rows))
        super().write(rows)

    def finish(self) -> None:
        """Complete the output and delete the job file."""
        with _explained(self.target):
            if self.job.format == "parquet":
                temporary = self.target.with_name(f".{self.target.name}.part")
                with self._reader() as reader:
                    write_parquet(reader, temporary, self.rows.types)
                temporary.replace(self.target)
            else:
                os.fsync(self.file.fileno())
            _job_file(self.target).unlink(missing_ok=True)
            if self.job.format == "parquet":
                _rows_file(self.target, "parquet").unlink(missing_ok=True)

    def _append(self, text: bytes) -> None:
        rest = memoryview(text)
        while rest:
            rest = rest[self.file.write(rest) :]

    @contextlib.contextmanager
    def _reader(self) -> Iterator[BinaryIO]:
        """Read the file from its start."""
        self.file.seek(0)
        reader = io.BufferedReader(self.file)
        try:
            yield reader
        finally:
            reader.detach()


def _job_file(target: Path) -> Path:
    return target.with_name(target.name + ".job.json")


def _rows_file(target: Path, format: Format) -> Path:
    return target.with_name(target.name + ".rows.jsonl") if format == "parquet" else target


@contextlib.contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        hint = full_disk_hint(fault, "rerun the same command with --resume")
        raise DataError(f"{printable_path(os.fspath(target))} cannot be written: {reason_of(fault)}{hint}") from None
