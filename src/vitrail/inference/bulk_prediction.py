"""Predict any number of images: decoding runs in parallel with the model, and rows keep the input order.

If the engine uses one thread per core, each thread decodes what it computes: no core waits for another, and no
processes are started. Otherwise the worker processes of `torch.utils.data.DataLoader` decode: pixels are returned in
shared memory instead of a pipe, a worker that dies is noticed, and prefetching is bounded to two batches per worker.
The list of images is consumed lazily, so memory does not grow with its length.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrail.acceleration.auto import open_best
from vitrail.acceleration.cpu.threads import LARGEST, CpuThreads
from vitrail.acceleration.engine import Engine, TorchEngine, open_engine
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.data.batches import Failure, default_workers, empty_pixels, prefetch
from vitrail.data.inputs import Item, fitted
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError, StorageError, VitrailError
from vitrail.inference.classifier import (
    BATCH,
    Predictor,
    check_counts,
    check_precision,
)
from vitrail.inference.completed import count_finished
from vitrail.inference.jobs import (
    Output,
    PredictJob,
    check_target,
    digest_model,
    digest_places,
    earlier_job,
    is_finished,
)
from vitrail.inference.listing import is_plain_file, list_items, nothing_listed, read_stdin
from vitrail.inference.skipped import SkippedFiles
from vitrail.inference.writing import Format, PredictionRow, Sink, TerminalWriter, choose_format
from vitrail.runtime import OnPlan, Precision, choose_device
from vitrail.tasks.lookup import compare_for, task_of
from vitrail.text import printable_path

SAMPLE = 64
"""Number of images that "auto" precision is chosen on."""


class Decoded(NamedTuple):
    """A decoded batch, as returned by a worker."""

    pixels: Tensor
    """(B, C, H, W), uint8, of the readable images."""
    names: tuple[bytes, ...]
    errors: tuple[str | None, ...]
    """One per image; None for readable images."""


@dataclass(frozen=True)
class Decoding(Dataset[Any]):
    """A worker's job: images in, pixels out."""

    preprocess: Preprocess

    def __getitem__(self, items: Sequence[Item]) -> Decoded | Failure:
        """Decode images; if their storage fails, return the error, because the images may be fine."""
        pixels = empty_pixels(len(items), self.preprocess)
        errors: list[str | None] = []
        good = 0
        for item in items:
            try:
                pixels.numpy()[good] = fitted(item, self.preprocess)
            except StorageError as error:
                return Failure(StorageError, str(error))
            except VitrailError as error:
                errors.append(str(error))
            else:
                errors.append(None)
                good += 1
        return Decoded(pixels[:good].permute(0, 3, 1, 2), tuple(item.name for item in items), tuple(errors))


class Summary(NamedTuple):
    """Summary of a job."""

    images: int
    """Rows in the output."""
    bad: int
    """Rows with an error."""
    earlier: int
    """Rows of an earlier, resumed job."""
    seconds: float
    """Time for the other rows, without loading the model."""
    precision: str
    """The precision used; with the reason if it was "auto"."""
    skipped: SkippedFiles
    """Files among the images that were skipped because they have no image suffix."""


def predict_items(
    predictor: Predictor[Any],
    items: Iterator[Item],
    *,
    top: int = 5,
    batch: int = BATCH,
    workers: int | None = None,
    first: int = 1,
) -> Iterator[list[PredictionRow]]:
    """Yield the rows of images, in order, batch by batch, numbered from `first`."""
    check_counts(top, batch)
    cpu_threads = predictor.engine.cpu_threads if isinstance(predictor.engine, TorchEngine) else None
    if workers is None and cpu_threads is not None and cpu_threads.one_core_each:
        made = _in_threads(predictor, cpu_threads, items, top, batch)
    else:
        made = _in_workers(predictor, items, top, batch, workers)
    for rows in made:
        yield [row._replace(number=number) for number, row in enumerate(rows, start=first)]
        first += len(rows)


def _in_threads(
    predictor: Predictor[Any], cpu_threads: CpuThreads, items: Iterator[Item], top: int, batch: int
) -> Iterator[list[PredictionRow]]:
    decoding = Decoding(predictor.preprocess)

    def work(some: list[Item]) -> list[PredictionRow]:
        return _rows(predictor, _checked(decoding[some]), top)

    results = cpu_threads.each(work, _batches(items, min(batch, LARGEST)))
    with closing(results):  # stop computing when the caller stops iterating
        rows = chain.from_iterable(results)
        while some := list(islice(rows, batch)):
            yield some


def _in_workers(
    predictor: Predictor[Any], items: Iterator[Item], top: int, batch: int, workers: int | None
) -> Iterator[list[PredictionRow]]:
    batches = _batches(items, batch)
    first = list(islice(batches, 1))
    if workers is None:  # for a few images, starting processes takes longer than decoding
        workers = default_workers() if first and len(first[0]) == batch else 0
    pin = predictor.device.type == "cuda" and workers > 0
    for decoded in prefetch(Decoding(predictor.preprocess), chain(first, batches), workers=workers, pin=pin):
        yield _rows(predictor, _checked(decoded), top)


def _batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while some := list(islice(items, size)):
        yield some


def _checked(decoded: Decoded | Failure) -> Decoded:
    if isinstance(decoded, Failure):
        raise decoded.kind(decoded.message)
    return decoded


def _rows(predictor: Predictor[Any], decoded: Decoded, top: int) -> list[PredictionRow]:
    readable = [name for name, error in zip(decoded.names, decoded.errors, strict=True) if error is None]
    predictions = iter(predictor.predict_pixels(decoded.pixels, top, lambda index: printable_path(readable[index])))
    rows = []
    for name, error in zip(decoded.names, decoded.errors, strict=True):
        prediction = next(predictions) if error is None else predictor.task.unread(error)
        rows.append(PredictionRow(0, name, prediction))
    return rows


def predict_files(
    bundle: Bundle | str | Path,
    places: str | Sequence[str],
    *,
    output: str | Path | None = None,
    format: str | None = None,
    top: int = 5,
    batch: int = BATCH,
    workers: int | None = None,
    device: str = "auto",
    engine: str = "torch",
    precision: str = "float32",
    null: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    sink: Sink | None = None,
    on_progress: Callable[[int, int | None], None] | None = None,
    on_plan: OnPlan | None = None,
) -> Summary:
    """Predict the images at the given places and write one row per image, to a file, to `sink`, or to stdout.

    An unreadable image becomes a row with an error; if all images are unreadable, `DataError` is raised at the end. If
    remote storage fails, `StorageError` is raised and the rows written so far are kept.
    `on_progress` is called with the number of rows, and the total if known. With `resume`, a finished job stays as it
    is; its summary then has only earlier rows.
    """
    check_counts(top, batch)
    places = [places] if isinstance(places, str) else places
    output = None if output is None else Path(output)
    chosen = choose_format(format, output, interactive=sys.stdout.isatty())
    _check_output(output, chosen, places, resume, overwrite)
    check_precision(precision)
    choose_device(device)
    skipped = SkippedFiles()
    items = list_items(places, stdin=read_stdin(), null=null, skipped=skipped)
    first = next(items, None)
    if first is None:
        raise nothing_listed(places, skipped)
    items = chain([first], items)
    if output is not None and resume and is_finished(output):
        finished = count_finished(output, chosen, items)
        check_readable(finished)
        return Summary(finished.done, finished.bad, finished.done, 0.0, precision, skipped)
    opened = ready_bundle(bundle)
    task = task_of(opened)
    top = min(top, opened.model.config.classes)
    before = earlier_job(output) if output is not None and resume else None
    resolved: Precision | Engine
    why = None
    if before is not None and before.precision == precision:
        resolved = computed = before.computed
    else:
        resolved, items, why = resolve_precision(precision, opened, engine, choose_device(device), items)
        computed = resolved if isinstance(resolved, str) else resolved.precision
    if output is None:
        sink = TerminalWriter(chosen, task.rows, top) if sink is None else sink
    else:
        images, model = digest_places(places, null), digest_model(opened)
        job = PredictJob(images, model, top, engine, precision, chosen, computed)
        sink = Output(output, job, task.rows, resume=resume, overwrite=overwrite)
    ready = engine if isinstance(resolved, str) else resolved
    predictor: Predictor[Any] = Predictor(opened, engine=ready, precision=computed, device=device)
    total = len(places) if all(map(is_plain_file, places)) else None
    with _resumable(output if chosen != "table" else None), sink:
        items = sink.skip_done(items)
        if on_plan is not None:
            on_plan(str(predictor.engine.plan))
        earlier, started = sink.done, time.monotonic()
        for rows in predict_items(predictor, items, top=top, batch=batch, workers=workers, first=earlier + 1):
            sink.write(rows)
            if on_progress is not None:
                on_progress(sink.done, total)
        sink.finish()
    check_readable(sink)
    return Summary(sink.done, sink.bad, earlier, time.monotonic() - started, why or computed, skipped)


@contextmanager
def _resumable(output: Path | None) -> Iterator[None]:
    """Say how to resume the job after a `KeyboardInterrupt` or a failure of remote storage."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if output is not None:
            stop.add_note(f"rerun the same command with --resume to resume {output}")
        raise
    except StorageError as error:
        if output is None:
            raise
        raise StorageError(f"{error}; add --resume to keep the rows in {printable_path(os.fspath(output))}") from None


def _check_output(output: Path | None, format: Format, places: Sequence[str], resume: bool, overwrite: bool) -> None:
    if output is not None:
        check_target(output, format, places, resume=resume, overwrite=overwrite)
    elif resume or overwrite:
        raise ConfigError("--resume and --overwrite need a file; give one with --output")


def check_readable(sink: Sink) -> None:
    """Raise if every image was unreadable: then something else is wrong."""
    if sink.first_bad is None or sink.bad < sink.done:
        return
    path, error = sink.first_bad
    if sink.done == 1:
        raise DataError(f"the only image, {printable_path(path)}, cannot be read: {error}")
    raise DataError(f"none of the {sink.done:,} images can be read; the first, {printable_path(path)}: {error}")


def resolve_precision(
    precision: str, bundle: Bundle, kind: str, device: torch.device, items: Iterator[Item]
) -> tuple[Precision | Engine, Iterator[Item], str | None]:
    """Choose the precision on the first images; return it, all images, and the reason."""
    if precision != "auto":
        return check_precision(precision), items, None
    first = list(islice(items, SAMPLE))

    def engine_for(tried: Precision) -> Engine:
        return open_engine(bundle.model, bundle.preprocess, kind=kind, precision=tried, device=device)

    def pixels() -> Tensor:
        return _checked(Decoding(bundle.preprocess)[first]).pixels

    config, compare = bundle.model.config, compare_for(bundle)
    engine, why = open_best(engine_for, "auto", config, len(first), pixels, device, compare)
    return engine, chain(first, items), why
