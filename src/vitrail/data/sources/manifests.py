"""Manifests: lists of images with labels, as CSV or JSONL; and what these share with Parquet."""

import csv
import itertools
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vitrail.data.remote.filesystems import differ_by_query, is_remote, path_in, public_url
from vitrail.data.remote.stored_files import forget_versions, open_stored_text
from vitrail.data.sources.columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    Columns,
    LabelCollector,
    LabelRequest,
    ManifestRow,
    ReadRows,
    choose_columns,
    request_labels,
)
from vitrail.data.sources.index_files import Names, NamesBuilder, Progress
from vitrail.data.sources.labels import Faults, report_faults
from vitrail.data.sources.source import Labels, read_file, reason_of, stamp_file
from vitrail.data.sources.targets import AUTOMATIC, Labelling, Targets
from vitrail.errors import DataError
from vitrail.text import printable_path

DELIMITERS = ",;\t"
PROGRESS_EVERY = 10_000
MOST_FAULTS = 1000
"""Most rows of a manifest that are reported as faulty."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """Image files listed in a manifest: URLs, or paths relative to its folder."""

    place: str
    paths: Names
    classes: tuple[str, ...]
    labels: Labels
    split_of: NDArray[np.int8] | None
    """The split of every image: 0 train, 1 validation, 2 test; None if the manifest has no split column."""
    targets: Targets | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def _path(self, index: int) -> bytes:
        return listed_path(self.place, self.paths[index])

    def key(self, index: int) -> str:
        """Return the path of a file as written in the manifest; of a URL, only what is not secret."""
        written, path = self.paths[index].decode("utf-8", "backslashreplace"), self._path(index)
        if not is_remote(path):
            return written
        name = public_url(os.fsdecode(path), hashed=self._differ_by_query)
        return name if is_remote(written) else name.removeprefix(public_url(_folder(self.place)))

    @cached_property
    def _differ_by_query(self) -> bool:
        if b"?" not in self.paths.buffer.tobytes():
            return False
        return differ_by_query(os.fsdecode(self._path(index)) for index in range(len(self)))

    def name(self, index: int) -> str:
        """Return the path of a file."""
        return printable_path(self._path(index))

    def read(self, index: int) -> bytes:
        """Return the content of a file."""
        return read_file(self._path(index), self.name(index))

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the size of a file and the time of its last change; of a remote one, this needs a request."""
        return stamp_file(self._path(index), self.name(index))


def open_manifest(
    place: str | os.PathLike[str],
    *,
    labelling: Labelling = AUTOMATIC,
    unlabelled: bool = False,
    faults: Faults | None = None,
    on_progress: Progress | None = None,
) -> Manifest:
    """Open a CSV file with a header, or a JSONL file. With `unlabelled`, a label column is not required.

    With `faults`, unusable rows are skipped and named there.
    """
    place = os.fspath(place)
    read = read_jsonl if path_in(place).lower().endswith(".jsonl") else read_csv

    def rows_of(labels: tuple[str, ...]) -> Iterable[ManifestRow]:
        """Yield the rows as far as they can be read, with the labels of some columns."""
        with suppress(DataError), read_in_words(place):
            yield from read(place, Labelling(columns=labels), unlabelled=True)[1]

    with read_in_words(place):
        columns, rows = read(place, labelling, unlabelled=unlabelled)
        request = request_labels(place, columns, labelling, rows_of, unlabelled=unlabelled)
        if request.columns.labels != columns.labels:
            rows = read(place, Labelling(columns=request.columns.labels))[1]
    rows = _to_the_end(place, rows)
    return manifest_of(place, request, rows, rows_of, unit="line", faults=faults, on_progress=on_progress)


def _to_the_end(place: str, rows: Iterable[ManifestRow]) -> Iterator[ManifestRow]:
    """Yield rows; an error that stops the reader becomes a last, faulty row, so that earlier rows are not lost."""
    number = 0
    try:
        with read_in_words(place):
            for row in rows:
                number = row.number
                yield row
    except DataError as error:
        yield _faulty(number + 1, str(error))


def _faulty(number: int, fault: str) -> ManifestRow:
    return ManifestRow(number, None, fault=fault)


@contextmanager
def read_in_words(place: str) -> Iterator[None]:
    """Turn errors of reading a manifest into `DataError`."""
    try:
        yield
    except UnicodeDecodeError as fault:
        raise DataError(
            f"{printable_path(place)} is not UTF-8 ({fault.reason} at byte {fault.start}); save it as UTF-8"
        ) from None
    except OSError as fault:
        raise DataError(f"{printable_path(place)} cannot be read: {reason_of(fault)}") from None


def manifest_of(
    place: str,
    request: LabelRequest,
    rows: Iterable[ManifestRow],
    rows_of: ReadRows,
    *,
    unit: str,
    names: Sequence[str] | None = None,
    faults: Faults | None = None,
    on_progress: Progress | None = None,
) -> Manifest:
    """Create a source from rows whose images are paths."""
    forget_versions()
    labels = LabelCollector(place, request, rows_of, unit=unit, names=names)
    paths = NamesBuilder()
    first: dict[bytes, tuple[int, tuple[int, ...]]] = {}
    wrong, missing = _Several(), _Several()
    for count, row in enumerate(rows, start=1):
        try:
            path = path_of(row, f"{printable_path(place)}, {unit} {row.number}")
            codes, split = labels.read(row)
            file = listed_path(place, path)
            file = file if is_remote(file) else os.path.normpath(file)
            before, its_codes = first.setdefault(file, (row.number, codes))
            if before != row.number:
                _raise_duplicate(place, unit, path, (before, row.number), several=codes != its_codes)
        except DataError as fault:
            wrong.add(str(fault))
            continue
        if is_file(file):
            paths.extend([path])
            labels.keep(codes, split)
        else:
            missing.add(printable_path(path))
        if on_progress is not None and not count % PROGRESS_EVERY:
            on_progress(count)
    report_faults([*wrong.sentences(), *_not_there(place, missing, faults is not None)], printable_path(place), faults)
    labelled, split_of = labels.finish()
    return Manifest(place, Names(*paths.arrays()), labelled.classes, labelled.labels, split_of, labelled.targets)


class _Several:
    """Counts texts and keeps the first ones."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.count = 0

    def add(self, text: str) -> None:
        self.count += 1
        self.kept += [text] if len(self.kept) < MOST_FAULTS else []

    def sentences(self) -> list[str]:
        more = self.count - len(self.kept)
        return [*self.kept, *([f"{more:,} more rows cannot be used"] if more else [])]


def _not_there(place: str, missing: _Several, each: bool) -> list[str]:
    """Report missing files: in one message, or one message for `each`."""
    help = "correct the paths, which are relative to the manifest's folder"
    if each or not missing.count:
        return [f"{name}, listed in {printable_path(place)}, does not exist; {help}" for name in missing.sentences()]
    files = "1 file" if missing.count == 1 else f"{missing.count} files"
    more = " and others" if missing.count > 3 else ""
    return [f"{files} listed in {printable_path(place)} not found ({', '.join(missing.kept[:3])}{more}); {help}"]


def path_of(row: ManifestRow, where: str) -> bytes:
    """Return the path in a row; `where` names the row in messages."""
    if row.fault is not None:
        raise DataError(row.fault)
    value = row.image.get("path") if isinstance(row.image, dict) else row.image
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where} has {value!r} instead of an image path; write a path")
    try:
        return os.fsencode(value)
    except UnicodeEncodeError:
        raise DataError(f"{where} has {value!r}, which is not a valid path; correct it") from None


def _raise_duplicate(place: str, unit: str, path: bytes, lines: tuple[int, int], *, several: bool) -> None:
    where = f"{printable_path(path)} is listed twice in {printable_path(place)}, on {unit}s {lines[0]} and {lines[1]}"
    if several:
        raise DataError(f"{where}, with different labels; list each image once, several labels in one {unit}: cat;dog")
    raise DataError(f"{where}; list each image once")


def listed_path(place: str, path: bytes) -> bytes:
    """Return a path or URL that is listed in the manifest at `place`."""
    if is_remote(path):
        return path
    if is_remote(place) and os.path.isabs(path):  # a file of this machine is none of the server's business
        raise DataError(f"{printable_path(path)} is a path on this machine, in a remote manifest; list a URL")
    return os.path.join(os.fsencode(_folder(place)), path)


def _folder(place: str) -> str:
    """Return the folder of a manifest; what is listed there is relative to it."""
    return os.path.join(os.path.dirname(path_in(place)), "")


def is_file(path: bytes) -> bool:
    """Return whether a file exists; a request for every remote file would take too long."""
    if is_remote(path):
        return True
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_csv(
    place: str, labelling: Labelling = AUTOMATIC, *, unlabelled: bool = False
) -> tuple[Columns, Iterator[ManifestRow]]:
    """Return the columns and rows of a CSV file, with commas, semicolons or tabs as separators."""
    delimiter, header = _header(place)
    columns = choose_columns(place, header, labelling, unlabelled=unlabelled)
    return columns, _csv_rows(place, delimiter, header, columns)


def _header(place: str) -> tuple[str, list[str]]:
    """Return the delimiter that gives the header the most known columns, and the header."""
    with open_stored_text(place, newline="") as file:
        headers = {}
        for delimiter in DELIMITERS:
            file.seek(0)
            headers[delimiter] = next(_csv_lines(place, csv.reader(file, delimiter=delimiter)), [])
    names = {*IMAGE_COLUMNS, *LABEL_COLUMNS, "split"}

    def known_columns(delimiter: str) -> int:
        return sum(column.strip().lower() in names for column in headers[delimiter])

    chosen = max(DELIMITERS, key=known_columns)  # on ties the first: a comma
    return chosen, headers[chosen]


def _csv_rows(place: str, delimiter: str, header: list[str], columns: Columns) -> Iterator[ManifestRow]:
    image, labels = header.index(columns.image), [header.index(column) for column in columns.labels]
    name, split = (None if column is None else header.index(column) for column in (columns.name, columns.split))
    separator = {",": "commas", ";": "semicolons", "\t": "tabs"}[delimiter]
    with open_stored_text(place, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        lines = _csv_lines(place, reader)
        next(lines, None)
        for fields in lines:
            if not fields:
                continue  # an empty line
            if len(fields) != len(header):
                actual = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
                yield _faulty(
                    reader.line_num,
                    f"{printable_path(place)}, line {reader.line_num} has {actual}, but the header has "
                    f"{len(header)}; put "
                    f"fields with {separator} in quotes",
                )
                continue
            yield ManifestRow(
                reader.line_num,
                fields[image],
                tuple([fields[at] for at in labels]),
                None if name is None else fields[name],
                None if split is None else fields[split],
            )


def _csv_lines(place: str, reader: Iterator[list[str]]) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as fault:
        raise DataError(f"{printable_path(place)} is not a valid CSV file: {fault}") from None


def read_jsonl(
    place: str, labelling: Labelling = AUTOMATIC, *, unlabelled: bool = False
) -> tuple[Columns, Iterator[ManifestRow]]:
    """Return the columns and rows of a file with one JSON object per line."""
    lines = [fields for _, fields in itertools.islice(_json_lines(place), 1)]
    first = next((fields for _, fields in _json_lines(place) if isinstance(fields, dict)), None)
    if first is None:
        raise DataError(str(lines[0]) if lines else f"{printable_path(place)} lists no images; add one line per image")
    columns = choose_columns(place, list(first), labelling, unlabelled=unlabelled)
    return columns, _json_rows(place, columns)


def _json_rows(place: str, columns: Columns) -> Iterator[ManifestRow]:
    for number, fields in _json_lines(place):
        if isinstance(fields, str):
            yield _faulty(number, fields)
        else:
            labels = tuple([fields.get(column) for column in columns.labels])
            name, split = (None if column is None else fields.get(column) for column in (columns.name, columns.split))
            yield ManifestRow(number, fields.get(columns.image), labels, name, split)


def _json_lines(place: str) -> Iterator[tuple[int, dict[str, object] | str]]:
    """Yield the number of each line with its object, or with an error message."""
    with open_stored_text(place) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                yield number, f"{printable_path(place)}, line {number} is not JSON; write one object per line"
                continue
            if isinstance(fields, dict):
                yield number, fields
            else:
                yield number, f"{printable_path(place)}, line {number} is not a JSON object; write one object per line"
