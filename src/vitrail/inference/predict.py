"""Predicting any number of images: they are decoded in parallel with computing, and rows come in input order.

Where the engine has lanes of one core each, each lane decodes what it computes: no core waits for another, and there
are no processes to start. Otherwise worker processes decode, those of `torch.utils.data.DataLoader`, as everywhere
here: pixels come back in shared memory and not through a pipe, a worker that dies is noticed, and what is asked of them
is bounded, two batches for each. What is to be decoded is read from the list as it goes, so that memory does not grow
with the list.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrail.acceleration.auto import settle_precision
from vitrail.acceleration.cpu_threads import LARGEST, CpuThreads
from vitrail.acceleration.engine import Engine, TorchEngine, open_engine
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.data.batches import default_workers, empty_pixels, prefetch
from vitrail.data.inputs import Item, fitted
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.index_files import shown
from vitrail.data.sources.source import SUFFIXES
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.inference.classifier import (
    BATCH,
    Prediction,
    Classifier,
    check_counts,
    check_head,
    check_precision,
)
from vitrail.inference.completed import count_finished
from vitrail.inference.jobs import Job, Output, check_target, digest_model, digest_places, earlier_job, is_finished
from vitrail.inference.listing import is_plain_file, list_items, read_stdin
from vitrail.inference.skipped import SkippedFiles
from vitrail.inference.writing import Format, PredictionRow, Sink, TerminalWriter, choose_format
from vitrail.runtime import Precision, choose_device

SAMPLE = 64
"""How many images are looked at where the precision is to be settled."""


class Decoded(NamedTuple):
    """A batch as it comes from a worker."""

    pixels: Tensor
    """(B, C, H, W), uint8, of the images that could be read."""
    names: tuple[bytes, ...]
    errors: tuple[str | None, ...]
    """Of every image; None for those whose pixels are there."""


@dataclass(frozen=True)
class Decoding(Dataset[Any]):
    """What a worker does: images in, pixels out."""

    preprocess: Preprocess

    def __getitem__(self, items: Sequence[Item]) -> Decoded:
        """Decode some images."""
        pixels = empty_pixels(len(items), self.preprocess)
        errors: list[str | None] = []
        good = 0
        for item in items:
            try:
                pixels.numpy()[good] = fitted(item, self.preprocess)
            except VitrailError as error:
                errors.append(str(error))
            else:
                errors.append(None)
                good += 1
        return Decoded(pixels[:good].permute(0, 3, 1, 2), tuple(item.name for item in items), tuple(errors))


class Summary(NamedTuple):
    """How a job went."""

    images: int
    """Rows in the output."""
    bad: int
    """Those with an error."""
    earlier: int
    """Rows that were there already."""
    seconds: float
    """What the others took, the opening of the model not counted."""
    precision: str
    """In which numbers it was computed; where that was to be settled, with the reason."""
    skipped: SkippedFiles
    """The files among the images that were not read, because their names do not end as an image's."""


def predict_items(
    classifier: Classifier,
    items: Iterator[Item],
    *,
    top: int = 5,
    batch: int = BATCH,
    workers: int | None = None,
    first: int = 1,
) -> Iterator[list[PredictionRow]]:
    """Give the rows of images, in their order, a batch at a time; they are numbered from `first` on."""
    check_counts(top, batch)
    cpu_threads = classifier.engine.cpu_threads if isinstance(classifier.engine, TorchEngine) else None
    if workers is None and cpu_threads is not None and cpu_threads.one_core_each:
        made = _in_lanes(classifier, cpu_threads, items, top, batch)
    else:
        made = _by_workers(classifier, items, top, batch, workers)
    for rows in made:
        yield [row._replace(number=number) for number, row in enumerate(rows, start=first)]
        first += len(rows)


def _in_lanes(
    classifier: Classifier, cpu_threads: CpuThreads, items: Iterator[Item], top: int, batch: int
) -> Iterator[list[PredictionRow]]:
    decoding = Decoding(classifier.preprocess)

    def work(some: list[Item]) -> list[PredictionRow]:
        return _rows(classifier, decoding[some], top)

    parts = cpu_threads.each(work, _batches(items, min(batch, LARGEST)))
    with closing(parts):  # so that nothing goes on being computed for somebody who left
        rows = chain.from_iterable(parts)
        while some := list(islice(rows, batch)):
            yield some


def _by_workers(
    classifier: Classifier, items: Iterator[Item], top: int, batch: int, workers: int | None
) -> Iterator[list[PredictionRow]]:
    batches = _batches(items, batch)
    begun = list(islice(batches, 1))
    if workers is None:  # starting processes for a few images takes longer than decoding them
        workers = default_workers() if begun and len(begun[0]) == batch else 0
    pin = classifier.device.type == "cuda" and workers > 0
    for decoded in prefetch(Decoding(classifier.preprocess), chain(begun, batches), workers=workers, pin=pin):
        yield _rows(classifier, decoded, top)


def _batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while some := list(islice(items, size)):
        yield some


def _rows(classifier: Classifier, decoded: Decoded, top: int) -> list[PredictionRow]:
    readable = [name for name, error in zip(decoded.names, decoded.errors, strict=True) if error is None]
    answers = iter(classifier.answers(decoded.pixels, top, lambda index: shown(readable[index])))
    rows = []
    for name, error in zip(decoded.names, decoded.errors, strict=True):
        answer = next(answers) if error is None else Prediction(error=error)
        rows.append(PredictionRow(0, name, answer.error, answer.names, answer.probabilities))
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
    on_progress: Callable[[int, int | None], None] | None = None,
) -> Summary:
    """Predict what lies at some places and write a row for each image, to a file or to stdout.

    What cannot be read is a row with an error; where that is all there is, a `DataError` says so at the end.
    `on_progress` is told how many rows there are, and of how many where that is known. With `resume`, a job that was
    finished stays as it is; the summary then has no rows but earlier ones.
    """
    check_counts(top, batch)
    places = [places] if isinstance(places, str) else places
    output = None if output is None else Path(output)
    chosen = choose_format(format, output, watched=sys.stdout.isatty())
    _check_output(output, chosen, places, resume, overwrite)
    check_precision(precision)
    choose_device(device)
    skipped = SkippedFiles()
    items = _some(list_items(places, stdin=read_stdin(), null=null, skipped=skipped), skipped)
    if output is not None and resume and is_finished(output):
        found = count_finished(output, chosen, items)
        _check_readable(found)
        return Summary(found.done, found.bad, found.done, 0.0, precision, skipped)
    opened = ready_bundle(bundle)
    top = min(top, check_head(opened))
    before = earlier_job(output) if output is not None and resume else None
    settled: Precision | Engine
    why = None
    if before is not None and before.precision == precision:
        settled = computed = before.computed
    else:
        settled, items, why = _settled(precision, opened, engine, choose_device(device), items)
        computed = settled if isinstance(settled, str) else settled.precision
    if output is None:
        sink: Sink = TerminalWriter(chosen, top)
    else:
        images, model = digest_places(places, null), digest_model(opened)
        sink = Output(
            output, Job(images, model, top, engine, precision, chosen, computed), resume=resume, overwrite=overwrite
        )
    ready = engine if isinstance(settled, str) else settled
    classifier = Classifier(opened, engine=ready, precision=computed, device=device)
    total = len(places) if all(map(is_plain_file, places)) else None
    with sink:
        items = sink.skip_done(items)
        earlier, started = sink.done, time.monotonic()
        for rows in predict_items(classifier, items, top=top, batch=batch, workers=workers, first=earlier + 1):
            sink.write(rows)
            if on_progress is not None:
                on_progress(sink.done, total)
        sink.finish()
    _check_readable(sink)
    return Summary(sink.done, sink.bad, earlier, time.monotonic() - started, why or computed, skipped)


def _check_output(output: Path | None, format: Format, places: Sequence[str], resume: bool, overwrite: bool) -> None:
    if output is not None:
        check_target(output, format, places, resume=resume, overwrite=overwrite)
    elif resume or overwrite:
        raise ConfigError("--resume and --overwrite are about a file; give one with --output")


def _check_readable(sink: Sink) -> None:
    """See to it that not every image was bad: then something else is wrong."""
    if sink.first_bad is None or sink.bad < sink.done:
        return
    path, error = sink.first_bad
    if sink.done == 1:
        raise DataError(f"the only image, {shown(path)}, cannot be read: {error}")
    raise DataError(f"none of the {sink.done:,} images can be read; the first, {shown(path)}: {error}")


def _some(items: Iterator[Item], skipped: SkippedFiles) -> Iterator[Item]:
    """See to it that there is an image at all."""
    first = next(items, None)
    if first is None:
        endings = ", ".join(sorted(SUFFIXES))
        raise DataError("; ".join([f"no images were found; an image's name ends in {endings}", *skipped.said()]))
    return chain([first], items)


def _settled(
    precision: str, bundle: Bundle, kind: str, device: torch.device, items: Iterator[Item]
) -> tuple[Precision | Engine, Iterator[Item], str | None]:
    """Settle the precision on the first images, which are given back with the others; say why."""
    if precision != "auto":
        return check_precision(precision), items, None
    first = list(islice(items, SAMPLE))

    def engine_for(tried: Precision) -> Engine:
        return open_engine(bundle.model, bundle.preprocess, kind=kind, precision=tried, device=device)

    engine, why = settle_precision(engine_for, Decoding(bundle.preprocess)[first].pixels, device)
    return engine, chain(first, items), why
