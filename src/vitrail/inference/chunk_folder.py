"""The output folder of a bulk job: one Parquet file per chunk of images, each complete or absent.

    part-000000.parquet   the rows of chunk 0; the files in order of their names hold the rows in order of the images
    _manifest.json        the job's settings; once it is finished, also its files with their rows and digests
    _chunks/              until it is finished: the lock, the listing, and a record per finished chunk

A chunk is a range of consecutive images, so its number and the listing determine its rows. A worker renames a chunk's
file into place and then writes its record; without a record, the chunk is computed again. So a killed process loses at
most the chunks it was computing, and no row is written twice. Readers of Parquet folders skip names that start with an
underscore.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from vitrail.data.sources.source import reason_of
from vitrail.errors import ConfigError, DataError
from vitrail.io import (
    atomic_write,
    file_digest,
    flush,
    full_disk_hint,
    lock_file,
    read_json,
    remove_partial_files,
)
from vitrail.text import printable_path

MANIFEST, CHUNKS, LISTING = "_manifest.json", "_chunks", "listing.parquet"
CHUNK = 4096
"""Images per file by default: seconds of work on a GPU, so that a lost chunk costs little, and starting it less."""
ATTEMPTS, ATTEMPT = 4, ".attempt"
"""How many workers may die with a chunk, and the suffix of the file that counts them."""
_DESCRIPTIONS = {
    "command": "another command",
    "listing": "other images",
    "model": "another model",
    "preprocess": "another preprocessing",
    "chunk": "another chunk size",
    "columns": "other columns",
    "settings": "other options",
}


@dataclass(frozen=True)
class ChunkJob:
    """Everything the rows depend on, so that rows of two jobs are never mixed."""

    command: str
    model: str
    """A digest of weights, preprocessing and class names."""
    preprocess: dict[str, Any]
    listing: str
    """A digest of the names and locations of all images, in order."""
    images: int
    chunk: int
    """Images per file."""
    columns: tuple[str, ...]
    settings: dict[str, Any]
    """The other options that change the rows."""

    @property
    def digest(self) -> str:
        """A digest of all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.images // self.chunk)

    def range_of(self, number: int) -> range:
        """Return the images of a chunk, counted from 0."""
        return range(number * self.chunk, min((number + 1) * self.chunk, self.images))

    def differences(self, other: "ChunkJob") -> list[str]:
        """Describe how another job differs."""
        return [text for field, text in _DESCRIPTIONS.items() if getattr(self, field) != getattr(other, field)]


@dataclass(frozen=True)
class ChunkRecord:
    """A finished chunk."""

    chunk: int
    job: str
    """The digest of its job."""
    rows: int
    bad: int
    """Images that could not be read; `predict` writes a row with an error for each, `embed` none."""
    unread: tuple[tuple[str, str], ...]
    """Their names and reasons; of `predict`, whose rows have them, only the first."""
    size: int
    sha256: str


def part_name(number: int) -> str:
    """Return the file name of a chunk."""
    return f"part-{number:06d}.parquet"


def write_chunk(
    folder: Path, number: int, job: str, write: Callable[[Path], tuple[int, int, tuple[tuple[str, str], ...]]]
) -> ChunkRecord:
    """Write a chunk's file atomically, then its record; `write` returns the numbers of rows and unreadable images."""
    target = folder / part_name(number)
    with explained(target), _attempt(folder, number):
        with atomic_write(target) as temporary:
            rows, bad, unread = write(temporary)
            flush(temporary)
            size, digest = temporary.stat().st_size, file_digest(temporary)
        flush(folder)
        record = ChunkRecord(number, job, rows, bad, unread, size, digest)
        _write_json(_record_file(folder, number), asdict(record))
    return record


@contextmanager
def _attempt(folder: Path, number: int) -> Iterator[None]:
    """Count the workers that die with a chunk, because its images might be the reason; errors do not count."""
    path = folder / CHUNKS / f"{number:06d}{ATTEMPT}"
    with path.open("ab") as file:
        file.write(b".")
    try:
        if path.stat().st_size > ATTEMPTS:
            raise DataError(
                f"{ATTEMPTS} workers died while they computed {part_name(number)}, most often because memory ran out; "
                "use a smaller batch or fewer workers, and rerun the same command with --resume"
            )
        yield
    finally:
        path.unlink(missing_ok=True)


def _record_file(folder: Path, number: int) -> Path:
    return folder / CHUNKS / f"{number:06d}.json"


def _write_json(path: Path, content: object) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        flush(temporary)


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """Turn an error of writing a file into a `DataError`."""
    try:
        yield
    except OSError as fault:
        hint = full_disk_hint(fault, "rerun the same command with --resume")
        raise DataError(f"{printable_path(os.fspath(target))} cannot be written: {reason_of(fault)}{hint}") from None


class ChunkFolder:
    """The folder as the driver uses it; a context manager that holds its lock."""

    def __init__(self, path: str | Path, *, resume: bool, overwrite: bool) -> None:
        self.path, self.resume, self.overwrite = Path(path), resume, overwrite
        self.name = printable_path(os.fspath(path))
        if resume and overwrite:
            raise ConfigError("--resume keeps existing rows and --overwrite drops them; give only one of them")
        if self.path.exists() and not self.path.is_dir():
            raise DataError(f"{self.name} is a file; with --ray the output is a folder, so name a new one")
        self.before = self._earlier_job()
        if self._has_files() and self.before is None and not (self.path / CHUNKS).is_dir():
            raise DataError(f"{self.name} has files that no bulk job wrote; choose another folder")
        if self._has_files() and not resume and not overwrite:
            state = "already exists" if self.is_finished() else "belongs to an interrupted job"
            raise DataError(f"{self.name} {state}; resume it with --resume, or replace it with --overwrite")

    def _has_files(self) -> bool:
        return self.path.is_dir() and any(self.path.iterdir())

    def _manifest(self) -> dict[str, Any] | None:
        try:
            content = read_json(self.path / MANIFEST)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            content = None
        if not isinstance(content, dict):
            if self.overwrite:
                return None
            raise DataError(f"{self.name}/{MANIFEST} cannot be read, so the job cannot be resumed; use --overwrite")
        return content

    def _earlier_job(self) -> ChunkJob | None:
        manifest = self._manifest()
        try:
            return None if manifest is None else TypeAdapter(ChunkJob).validate_python(manifest.get("job"))
        except ValueError:  # pydantic's error is one
            raise DataError(f"{self.name}/{MANIFEST} is not that of a bulk job; choose another folder") from None

    def is_finished(self) -> bool:
        """Return whether the folder has a finished job."""
        manifest = self._manifest()
        return manifest is not None and manifest.get("files") is not None

    def __enter__(self) -> Self:
        with explained(self.path):
            (self.path / CHUNKS).mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.path / CHUNKS / "lock")
            try:
                self._lock.__enter__()
            except BlockingIOError:
                raise DataError(f"{self.name} is being written by another process; wait for it") from None
            try:
                self._check_unchanged()
            except BaseException:  # `__exit__` is not called
                self._lock.__exit__(None, None, None)
                raise
            for folder in (self.path, self.path / CHUNKS):
                remove_partial_files(folder)
            for file in (self.path / CHUNKS).glob(f"*{ATTEMPT}"):
                file.unlink(missing_ok=True)
        return self

    def _check_unchanged(self) -> None:
        """Look again once the folder is locked: another job may have written it while this one connected to Ray."""
        now = self._earlier_job()
        if now is not None and self.before is None and not self.resume and not self.overwrite:
            raise DataError(
                f"another job has written {self.name} meanwhile; resume it with --resume, or replace it with "
                "--overwrite"
            )
        self.before = now

    def __exit__(self, *_: object) -> None:
        try:
            if self.is_finished():  # still locked, so that no other job has begun to use it
                shutil.rmtree(self.path / CHUNKS, ignore_errors=True)
        finally:
            self._lock.__exit__(None, None, None)

    @property
    def listing(self) -> Path:
        """The listing, with a row group per chunk."""
        return self.path / CHUNKS / LISTING

    def start(self, job: ChunkJob) -> dict[int, ChunkRecord]:
        """Begin or resume a job; return its finished chunks."""
        if self.before is not None and self.resume:
            if differences := self.before.differences(job):
                raise DataError(
                    f"{self.name} was started with {' and '.join(differences)}; use the same settings, or restart "
                    "with --overwrite"
                )
            return self._finished_chunks(job)
        with explained(self.path):
            for file in self._old_files():
                file.unlink()
            _write_json(self.path / MANIFEST, {"job": asdict(job)})
        return {}

    def _old_files(self) -> list[Path]:
        # The records before the files they describe, and the manifest first: without it, nothing counts as finished.
        records = list((self.path / CHUNKS).glob("*.json"))
        manifest = [self.path / MANIFEST] if (self.path / MANIFEST).exists() else []
        return [*manifest, *records, *self.path.glob("part-*.parquet")]

    def _finished_chunks(self, job: ChunkJob) -> dict[int, ChunkRecord]:
        """Return the records of chunks whose file has the recorded size."""
        if self.is_finished():
            content: Iterable[Any] = (self._manifest() or {})["files"]
        else:
            content = map(_read_record, sorted((self.path / CHUNKS).glob("*.json")))
        done: dict[int, ChunkRecord] = {}
        for entry in content:
            with suppress(ValueError, OSError):  # a corrupt record: its chunk is computed again
                record = TypeAdapter(ChunkRecord).validate_python(entry)
                size = (self.path / part_name(record.chunk)).stat().st_size
                if record.job == job.digest and size == record.size and record.chunk < job.chunks:
                    done[record.chunk] = record
        return done

    def finish(self, job: ChunkJob, records: dict[int, ChunkRecord]) -> None:
        """Write the manifest of the finished job."""
        files = [{"file": part_name(number), **asdict(records[number])} for number in range(job.chunks)]
        with explained(self.path):
            _write_json(
                self.path / MANIFEST,
                {
                    "job": asdict(job),
                    "rows": sum(r.rows for r in records.values()),
                    "bad": sum(r.bad for r in records.values()),
                    "files": files,
                },
            )
            flush(self.path)


def _read_record(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None
