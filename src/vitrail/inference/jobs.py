"""A predict job that may be stopped at any moment and goes on without repeating or losing a row.

    FILE             JSONL, CSV: the rows, appended a batch at a time; Parquet: made of the rows at the end
    FILE.rows.jsonl  Parquet only: the rows until then
    FILE.job.json    what the job is, as long as it is not finished

A row is done when its line is whole. Going on, the lines that are there are compared with the images as they are
listed now, so that an image that came or went is noticed, and a line that was cut off is dropped.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Self

import torch
from pydantic import TypeAdapter

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.inputs import Item
from vitrail.data.sources.index_files import shown
from vitrail.data.sources.source import reason_of
from vitrail.errors import ConfigError, DataError
from vitrail.inference.writing import (
    Format,
    PredictionRow,
    Sink,
    open_writer,
    read_record,
    whole_records,
    write_parquet,
)
from vitrail.io import read_json
from vitrail.runtime import Precision

_SAID = {
    "places": "other images",
    "model": "another model",
    "top": "another number of classes (--top)",
    "engine": "another engine",
    "precision": "another precision",
    "format": "another format",
}


@dataclass(frozen=True)
class Job:
    """All that the rows depend on, so that rows of two jobs are never mixed."""

    places: str
    """A digest of what was given to predict."""
    model: str
    """A digest of weights, preprocessing and names."""
    top: int
    engine: str
    precision: str
    """As it was asked for."""
    format: Format
    computed: Precision
    """The precision that is used; the same as `precision`, or what "auto" was settled to."""

    def differences(self, other: "Job") -> list[str]:
        """Say what another job has that differs."""
        return [said for field, said in _SAID.items() if getattr(self, field) != getattr(other, field)]


def digest_places(places: Sequence[str], null: bool) -> str:
    """Return a name for what was given to predict."""
    digest = hashlib.sha256(b"0" if null else b"1")
    for place in places:
        digest.update(os.fsencode(os.path.abspath(place)) + b"\0")
    return digest.hexdigest()[:32]


def digest_model(bundle: Bundle) -> str:
    """Return a name for a model that says the same of every image."""
    words = [bundle.model.config.model_dump_json(), bundle.preprocess.model_dump_json(), json.dumps(bundle.classes)]
    digest = hashlib.sha256("\0".join(words).encode())
    for name, tensor in bundle.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def check_target(target: Path, format: Format, places: Sequence[str], *, resume: bool, overwrite: bool) -> None:
    """Refuse an output whose loss would be somebody's loss, or that cannot be."""
    name = shown(os.fspath(target))
    if resume and overwrite:
        raise ConfigError("--resume keeps the rows that are there and --overwrite drops them; give one of them")
    if resume and format == "table":
        raise ConfigError("a table is for reading and cannot be gone on with; write jsonl, csv or parquet")
    if target.is_dir():
        raise DataError(f"{name} is a folder; give the name of a file to write")
    if target.exists() and not target.is_file():
        raise DataError(f"{name} is no ordinary file; leave --output away to write to stdout")
    if not target.absolute().parent.is_dir():
        raise DataError(f"{name} is in a folder that is not there; make the folder first")
    if any(os.path.exists(place) and os.path.exists(target) and os.path.samefile(place, target) for place in places):
        raise DataError(f"{name} is among what is to be predicted; write to another file")
    if _job_file(target).exists() and not resume and not overwrite:
        raise DataError(
            f"{name} is of a job that was interrupted; go on with it with --resume, or start again with --overwrite"
        )
    if not resume and not overwrite and is_finished(target):
        raise DataError(f"{name} exists already; choose another name, or replace it with --overwrite")


def is_finished(target: Path) -> bool:
    """Say whether an output is there that no job is to go on with."""
    return not _job_file(target).exists() and target.exists() and target.stat().st_size > 0


def earlier_job(target: Path) -> Job | None:
    """Return the job that was interrupted, if one was."""
    try:
        return TypeAdapter(Job).validate_python(read_json(_job_file(target)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):  # pydantic's errors are among them
        raise DataError(
            f"{shown(os.fspath(_job_file(target)))} cannot be read, so it is not known what was begun; start again "
            f"with --overwrite"
        ) from None


class Output(Sink):
    """The file that rows are appended to. With `resume`, those that are there are kept."""

    def __init__(self, target: Path, job: Job, *, resume: bool, overwrite: bool) -> None:
        super().__init__()
        self.target, self.job, self.overwrite = target, job, overwrite
        self.lines: Format = "jsonl" if job.format == "parquet" else job.format
        self.writer = open_writer(job.format, job.top)
        before = earlier_job(target) if resume else None
        if before is not None and (differences := before.differences(job)):
            raise DataError(
                f"{shown(os.fspath(target))} was begun with {' and '.join(differences)}; give the same as then, or "
                f"start again with --overwrite"
            )
        self._fresh = before is None

    def __enter__(self) -> Self:
        with _explained(self.target):
            handle = os.open(_rows_file(self.target, self.job.format), os.O_RDWR | os.O_CREAT, 0o666)
            # Not buffered: what a full disk refuses must not be tried again when the file is closed.
            self.file = io.FileIO(handle, "r+")
            try:
                _lock(self.target, self.file)
                self._check_unchanged()
                if self._fresh:
                    self._begin()
            except BaseException:  # whatever happened, the file is not left open
                self.file.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _check_unchanged(self) -> None:
        """Refuse where another process began or finished the output while this one was opening its model."""
        begun = _job_file(self.target).exists()
        as_expected = not begun and not is_finished(self.target) if self._fresh else begun
        if self.overwrite or as_expected:
            return
        if not begun and self.job.format == "parquet":
            _rows_file(self.target, "parquet").unlink()  # which was made a moment ago
        raise DataError(
            f"{shown(os.fspath(self.target))} was written by another process meanwhile; give the command again to go "
            f"on from there"
        )

    def _begin(self) -> None:
        # The old rows go before the new job is there, so that nobody ever takes them for its own.
        _job_file(self.target).unlink(missing_ok=True)
        self.file.truncate(0)
        temporary = _job_file(self.target).with_suffix(".part")
        temporary.write_text(json.dumps(asdict(self.job)) + "\n", encoding="utf-8")
        temporary.replace(_job_file(self.target))
        self._append(self.writer.header())

    def skip_done(self, items: Iterator[Item]) -> Iterator[Item]:
        """Return the images that have no row yet, after comparing the others with their rows."""
        with self._reader() as reader:
            end = self._compare(whole_records(reader, self.lines), items)
        self.file.seek(end)
        self.file.truncate()
        if not end:
            self._append(self.writer.header())
        return items

    def _compare(self, records: Iterator[tuple[bytes, int]], items: Iterator[Item]) -> int:
        """Count the rows that are there, and return where they end."""
        end = 0
        if header := self.writer.header():
            first = next(records, None)
            if first is None or first[0] != header:
                return 0
            end = first[1]
        for record, after in records:
            try:
                number, path, error = read_record(record, self.lines)
            except ValueError:  # a crash of the whole machine may leave anything at the end
                break
            item = next(items, None)
            if item is None or number != self.done + 1 or path != item.name:
                found = "nothing" if item is None else shown(item.name)
                raise DataError(
                    f"row {self.done + 1} of {shown(os.fspath(self.target))} is {shown(path)}, and now {found} would "
                    f"be there: the images have changed; start again with --overwrite"
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
        """Make the output whole, and forget the job."""
        with _explained(self.target):
            if self.job.format == "parquet":
                temporary = self.target.with_name(f".{self.target.name}.part")
                with self._reader() as reader:
                    write_parquet(reader, temporary)
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
        """Read the file from its start, through the handle that has the lock: closing another one would give it up."""
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


def _lock(target: Path, file: io.FileIO) -> None:
    """Keep two processes from writing rows of one job; the lock goes with the process, however it ends."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{shown(os.fspath(target))} is being written by another process; wait for it") from None
    except OSError:  # a file system without locks
        return


@contextlib.contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise DataError(f"{shown(os.fspath(target))} cannot be written: {reason_of(fault)}") from None
