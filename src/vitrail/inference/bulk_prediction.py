"""Predict any number of images: decoding runs in parallel with the model, and rows keep the input order.

If the engine uses one thread per core, each thread decodes what it computes: no core waits for another, and no
processes are started. Otherwise the worker processes of `torch.utils.data.DataLoader` decode: pixels are returned in
shared memory instead of a pipe, a worker that dies is noticed, and prefetching is bounded to two batches per worker.
While a GPU computes a batch, this process makes the rows of the previous one.
The list of images is consumed lazily, so memory does not grow with its length.
"""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vitrail.acceleration.auto import open_best
from vitrail.acceleration.cpu.threads import LARGEST, CpuThreads, one_thread
from vitrail.acceleration.engine import Engine, TorchEngine, open_engine
from vitrail.acceleration.int8.engine import Int8Engine
from vitrail.checkpoints.bundle import Bundle, digest_model
from vitrail.checkpoints.load import ready_bundle
from vitrail.data.batches import default_workers, prefetch
from vitrail.data.decoder_choice import ON_CPU, Decoder, check_decode, choose_decoder, samples
from vitrail.data.inputs import Item
from vitrail.data.item_batches import Decoded, Decoding, checked, gpu_decoded_items, item_batches
from vitrail.errors import ConfigError, DataError, StorageError
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
    digest_places,
    earlier_job,
    is_finished,
)
from vitrail.inference.listing import is_plain_file, list_items, nothing_listed, read_stdin
from vitrail.inference.mask_files import MaskFolder, check_mask_folder, check_masks, check_whole
from vitrail.inference.skipped import SkippedFiles
from vitrail.inference.windows import Canvas, CanvasDecoding, Windows, windows_for
from vitrail.inference.writing import Format, PredictionRow, Sink, TerminalWriter, choose_format
from vitrail.runtime import InferencePrecision, OnPlan, Precision, choose_device
from vitrail.tasks.lookup import compare_for, task_of
from vitrail.text import printable_path

In = TypeVar("In")
Out = TypeVar("Out")
Quantise = Callable[[Bundle], Int8Engine]
"""Opens the int8 engine of a bundle, which may take a minute."""
SAMPLE = 64
"""Number of images that "auto" precision is chosen on."""


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
    decoder: Decoder = ON_CPU,
) -> Iterator[list[PredictionRow]]:
    """Yield the rows of images, in order, batch by batch, numbered from `first`."""
    check_counts(top, batch)
    engine = predictor.engine
    cpu_threads = engine.cpu_threads if isinstance(engine, TorchEngine | Int8Engine) else None
    if predictor.windows is not None:
        made = _in_windows(predictor, predictor.windows, items, top, batch, workers)
    elif decoder.device is not None:
        made = _on_device(predictor, decoder.device, items, top, batch, workers)
    elif workers is None and cpu_threads is not None and cpu_threads.one_core_each:
        made = _in_threads(predictor, cpu_threads, items, top, batch)
    else:
        made = _in_workers(predictor, items, top, batch, workers)
    for rows in made:
        yield [row._replace(number=number) for number, row in enumerate(rows, start=first)]
        first += len(rows)


def _in_threads(
    predictor: Predictor[Any], cpu_threads: CpuThreads, items: Iterator[Item], top: int, batch: int
) -> Iterator[list[PredictionRow]]:
    decoding = decoding_for(predictor)

    def work(some: list[Item]) -> list[PredictionRow]:
        decoded = checked(decoding[some])
        return _rows(predictor, decoded, _outputs(predictor, decoded), top)

    results = cpu_threads.each(work, item_batches(items, min(batch, LARGEST)))
    with closing(results):  # stop computing when the caller stops iterating
        rows = chain.from_iterable(results)
        while some := list(islice(rows, batch)):
            yield some


def _on_device(
    predictor: Predictor[Any], device: torch.device, items: Iterator[Item], top: int, batch: int, workers: int | None
) -> Iterator[list[PredictionRow]]:
    workers = default_workers() if workers is None else workers
    decoded = gpu_decoded_items(items, predictor.preprocess, device, batch, workers)
    with closing(decoded), closing(ahead(partial(_outputs, predictor), decoded)) as computed:
        for one, outputs in computed:
            with one_thread():
                rows = _rows(predictor, one, outputs, top)
            yield rows


def _in_workers(
    predictor: Predictor[Any], items: Iterator[Item], top: int, batch: int, workers: int | None
) -> Iterator[list[PredictionRow]]:
    batches = item_batches(items, batch)
    first = list(islice(batches, 1))
    if workers is None:  # for a few images, starting processes takes longer than decoding
        workers = default_workers() if first and len(first[0]) == batch else 0
    pin = predictor.device.type == "cuda" and workers > 0
    size = batch * predictor.preprocess.pixel_bytes
    prefetched = prefetch(decoding_for(predictor), chain(first, batches), workers=workers, pin=pin, batch_bytes=size)
    compute, decoded = partial(_outputs, predictor), map(checked, prefetched)
    computed = ahead(compute, decoded) if pin else ((one, compute(one)) for one in decoded)
    with closing(computed):
        for one, outputs in computed:
            with one_thread() if workers else nullcontext():
                rows = _rows(predictor, one, outputs, top)
            yield rows


def _in_windows(
    predictor: Predictor[Any], windows: Windows, items: Iterator[Item], top: int, batch: int, workers: int | None
) -> Iterator[list[PredictionRow]]:
    """Yield one row at a time: every image has windows of its own."""
    batches = item_batches(items, 1)
    first = list(islice(batches, batch))
    if workers is None:
        workers = default_workers() if len(first) == batch else 0

    def compute(canvas: Canvas) -> Tensor | None:
        return windows.outputs(predictor.engine, canvas.pixels, batch) if canvas.error is None else None

    decoded = map(checked, prefetch(CanvasDecoding(windows), chain(first, batches), workers=workers))
    on_gpu = predictor.device.type == "cuda" and workers > 0
    computed = ahead(compute, decoded) if on_gpu else ((one, compute(one)) for one in decoded)
    with closing(computed):
        for canvas, outputs in computed:
            named = Decoded(canvas.pixels, (canvas.name,), (canvas.error,))
            yield _rows(predictor, named, outputs, top)


def decoding_for(predictor: Predictor[Any]) -> Decoding:
    """Return the decoding for a predictor.

    In float32 the pixels are those of other libraries. Lower precisions change the outputs more than the fast resize
    does.
    """
    return Decoding(predictor.preprocess, quick=predictor.engine.precision != "float32")


def ahead(compute: Callable[[In], Out], items: Iterable[In]) -> Generator[tuple[In, Out], None, None]:
    """Yield each item with what `compute` makes of it, in a thread of its own, which is one item ahead."""
    with ThreadPoolExecutor(1, thread_name_prefix="model") as pool:
        waiting: tuple[In, Future[Out]] | None = None
        for item in items:
            coming = item, pool.submit(compute, item)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = coming
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def _outputs(predictor: Predictor[Any], decoded: Decoded) -> Tensor | None:
    return predictor.engine(decoded.pixels) if len(decoded.pixels) else None


def _rows(predictor: Predictor[Any], decoded: Decoded, outputs: Tensor | None, top: int) -> list[PredictionRow]:
    readable = [name for name, error in zip(decoded.names, decoded.errors, strict=True) if error is None]
    named = partial(_nth_path, readable)
    predictions = iter(() if outputs is None else predictor.predict_outputs(outputs, top, named))
    rows = []
    for name, error in zip(decoded.names, decoded.errors, strict=True):
        prediction = next(predictions) if error is None else predictor.task.unread(error)
        rows.append(PredictionRow(0, name, prediction))
    return rows


def _nth_path(paths: Sequence[bytes], index: int) -> str:
    return printable_path(paths[index])


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
    decode: str = "auto",
    quantise: Quantise | None = None,
    null: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    masks: str | Path | None = None,
    window: float | None = None,
    sink: Sink | None = None,
    on_progress: Callable[[int, int | None], None] | None = None,
    on_plan: OnPlan | None = None,
) -> Summary:
    """Predict the images at the given places and write one row per image, to a file, to `sink`, or to stdout.

    An unreadable image becomes a row with an error; if all images are unreadable, `DataError` is raised at the end. If
    remote storage fails, `StorageError` is raised and the rows written so far are kept.
    `masks` is a folder for the masks of a segmentation model, and `window` the scale of its windows.
    `quantise` opens the engine of int8. `on_progress` is called with the number of rows, and the total if known. With
    `resume`, a finished job stays as it is; its summary then has only earlier rows.
    """
    check_counts(top, batch)
    places = [places] if isinstance(places, str) else places
    output = None if output is None else Path(output)
    chosen = choose_format(format, output, interactive=sys.stdout.isatty())
    _check_output(output, chosen, places, resume, overwrite, masks=masks is not None)
    before = earlier_job(output) if output is not None and resume else None
    ended = output is not None and resume and is_finished(output)
    if masks is not None:
        masks = Path(masks)
        check_mask_folder(masks, places, resume=ended or before is not None, overwrite=overwrite)
    if quantise is None:
        check_precision(precision)
    check_decode(decode)
    place = choose_device(device)
    skipped = SkippedFiles()
    items = list_items(places, stdin=read_stdin(), null=null, skipped=skipped)
    first = next(items, None)
    if first is None:
        raise nothing_listed(places, skipped)
    items = chain([first], items)
    if output is not None and ended:
        earlier_masks = None if masks is None else MaskFolder(masks, places)
        finished = count_finished(output, chosen, items if earlier_masks is None else earlier_masks.named(items))
        if earlier_masks is not None:
            earlier_masks.start(finished)
        check_readable(finished)
        return Summary(finished.done, finished.bad, finished.done, 0.0, precision, skipped)
    opened = ready_bundle(bundle)
    task = task_of(opened)
    top = min(top, opened.model.config.classes)
    if masks is not None:
        check_masks(opened)
        if window is None:
            check_whole(opened.preprocess)
    if window is not None:
        windows_for(opened, window)  # raises before anything is opened
        if decode == "gpu":
            raise ConfigError("windows are cut from images that a CPU decodes; leave out --decode, or --window")
        decode = "cpu"
    resolved: Precision | Engine
    why = None
    computed: InferencePrecision
    if quantise is not None:
        resolved = quantise(opened)
        computed = resolved.precision
    elif before is not None and before.precision == precision and before.computed != "int8":
        resolved = computed = before.computed
    else:
        resolved, items, why = resolve_precision(precision, opened, engine, place, items)
        computed = resolved if isinstance(resolved, str) else resolved.precision
    total = len(places) if all(map(is_plain_file, places)) else None
    same = before is not None and before.decode == decode  # a resumed job decodes as before
    wanted = before.decoder if before is not None and same else decode
    sample = list(islice(items, samples(wanted, place)))
    items = chain(sample, items)
    decoder = choose_decoder(wanted, place, opened.preprocess, sample, count=total, workers=workers)
    if output is None:
        sink = TerminalWriter(chosen, task.row_format(opened.classes), top) if sink is None else sink
    else:
        images, model = digest_places(places, null), digest_model(opened)
        calibration = resolved.digest if isinstance(resolved, Int8Engine) else ""
        job = PredictJob(
            images, model, top, engine, precision, chosen, computed, decode, decoder.name, calibration,
            masks="" if masks is None else os.path.abspath(masks), window=window,
        )  # fmt: skip
        sink = Output(output, job, task.row_format(opened.classes), resume=resume, overwrite=overwrite)
    predictor: Predictor[Any] = (
        Predictor(opened, engine=engine, precision=resolved, device=device, window=window)
        if isinstance(resolved, str)
        else Predictor(opened, engine=resolved, device=device, window=window)
    )
    folder = None if masks is None else MaskFolder(masks, places, opened.preprocess.channels)
    with _resumable(output if chosen != "table" else None), sink, folder or nullcontext():
        items = sink.skip_done(items if folder is None else folder.named(items))
        if folder is not None:
            folder.start(sink)
        if on_plan is not None:
            on_plan(str(predictor.engine.plan))
        decoder.announce(on_plan)
        earlier, started = sink.done, time.monotonic()
        made = predict_items(
            predictor, items, top=top, batch=batch, workers=workers, first=earlier + 1, decoder=decoder
        )
        # Files of masks are written while the model computes the next batch.
        written = made if folder is None else (rows for _, rows in ahead(folder.write, made))
        for rows in written:
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


def _check_output(
    output: Path | None, format: Format, places: Sequence[str], resume: bool, overwrite: bool, *, masks: bool
) -> None:
    if output is not None:
        check_target(output, format, places, resume=resume, overwrite=overwrite)
    elif resume or (overwrite and not masks):
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
        return checked(Decoding(bundle.preprocess)[first]).pixels

    config, compare = bundle.model.config, compare_for(bundle)
    engine, why = open_best(engine_for, "auto", config, len(first), pixels, device, compare)
    return engine, chain(first, items), why
