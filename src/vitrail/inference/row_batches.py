"""The rows of images, batch by batch and in order: decoding runs in parallel with the model.

If the engine uses one thread per core, each thread decodes what it computes: no core waits for another, and no
processes are started. Otherwise the worker processes of `torch.utils.data.DataLoader` decode: pixels are returned in
shared memory instead of a pipe, a worker that dies is noticed, and prefetching is bounded to two batches per worker.
While a GPU computes a batch, this process makes the rows of the previous one.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitrail.acceleration.cpu.threads import LARGEST, CpuThreads, one_thread
from vitrail.acceleration.engine import TorchEngine
from vitrail.acceleration.int8.engine import Int8Engine
from vitrail.data.batches import default_workers, prefetch
from vitrail.data.decoder_choice import ON_CPU, Decoder
from vitrail.data.inputs import Item
from vitrail.data.item_batches import Decoded, Decoding, checked, gpu_decoded_items, item_batches
from vitrail.inference.classifier import BATCH, Predictor, check_counts
from vitrail.inference.windows import Canvas, CanvasDecoding, Windows
from vitrail.inference.writing import PredictionRow
from vitrail.text import printable_path

In = TypeVar("In")
Out = TypeVar("Out")


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
