"""Predict any number of images: one row per image, in input order, to a file, to memory or to stdout.

The list of images is consumed lazily, so memory does not grow with its length.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.acceleration.auto import open_best
from vitrail.acceleration.engine import Engine, open_engine
from vitrail.acceleration.int8.engine import Int8Engine
from vitrail.checkpoints.bundle import Bundle, digest_model
from vitrail.checkpoints.load import ready_bundle
from vitrail.data.decoder_choice import check_decode, choose_decoder, samples
from vitrail.data.inputs import Item
from vitrail.data.item_batches import Decoding, checked
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
from vitrail.inference.row_batches import ahead, predict_items
from vitrail.inference.skipped import SkippedFiles
from vitrail.inference.windows import windows_for
from vitrail.inference.writing import Format, Sink, TerminalWriter, choose_format
from vitrail.runtime import InferencePrecision, OnPlan, Precision, choose_device
from vitrail.tasks.lookup import compare_for, task_of
from vitrail.text import printable_path

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
