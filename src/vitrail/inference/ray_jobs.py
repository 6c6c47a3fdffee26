"""Bulk inference on Ray: Ray Data hands out the numbers of chunks, and actors that hold the model write their files.

Only numbers and records pass through Ray; images are read, and rows are written, by the workers themselves. If a worker
dies, Ray starts another and repeats its chunk. If the driver dies, finished chunks stay in the folder (`ChunkFolder`).
"""

import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

import vitrail.errors
from vitrail.checkpoints.bundle import Bundle, digest_model
from vitrail.data.batches import BadImage
from vitrail.data.sources.selection import all_keys_of
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError, StorageError, VitrailError
from vitrail.inference.bulk_prediction import Summary, check_readable
from vitrail.inference.chunk_folder import CHUNK, ChunkFolder, ChunkJob, ChunkRecord
from vitrail.inference.chunk_listing import write_listing
from vitrail.inference.chunk_work import ChunkWork, EmbedWork, OpenWork, PredictWork, WorkerPlace
from vitrail.inference.classifier import check_precision
from vitrail.inference.embed import EmbedResult
from vitrail.inference.feature_files import DType, check_dtype
from vitrail.inference.features import FeatureRequest, nothing_to_read
from vitrail.inference.listing import list_items, nothing_listed, read_stdin
from vitrail.inference.ray_cluster import Placement, RayOptions, connected, nodes_of, place_workers
from vitrail.inference.skipped import SkippedFiles
from vitrail.inference.writing import Sink
from vitrail.runtime import OnPlan, PrecisionChoice
from vitrail.tasks.lookup import task_of

AHEAD = 2
"""Chunks assigned to a worker at a time, so that it does not wait for the driver."""
OnCount = Callable[[int, int], None]
Pool = Callable[[], tuple[Any, Placement]]
"""Returns the module `ray`, connected to the cluster, and the workers."""


def options_of(ray: str | RayOptions) -> RayOptions:
    """Return options, checked."""
    options = RayOptions(ray) if isinstance(ray, str) else ray
    options.check()
    return options


def predict_on_ray(
    bundle: Bundle,
    places: Sequence[str],
    output: str | Path | None,
    ray: str | RayOptions,
    *,
    format: str | None,
    top: int,
    batch: int,
    workers: int | None,
    device: str,
    engine: str,
    precision: str,
    null: bool,
    resume: bool,
    overwrite: bool,
    on_progress: OnCount | None,
    on_plan: OnPlan | None,
) -> Summary:
    """Predict images and write a folder of Parquet files; the arguments are those of `predict`."""
    options = options_of(ray)
    if output is None or format not in (None, "parquet"):
        raise ConfigError("with --ray, predictions are written to a folder of Parquet files; name it with --output")
    task, used = task_of(bundle), check_precision(precision)  # auto is float32: workers may differ
    folder = ChunkFolder(output, resume=resume, overwrite=overwrite)
    with _pool(options, device, folder) as pool:
        skipped, top = SkippedFiles(), min(top, bundle.model.config.classes)
        items = list_items(places, stdin=read_stdin(), null=null, skipped=skipped)
        first = next(items, None)
        if first is None:
            raise nothing_listed(places, skipped)
        with folder:
            chunk = _chunk_size(options, folder)
            images, listing = write_listing(chain([first], items), folder.listing, chunk)
            columns = ("number", "path", "error", *task.row_format(bundle.classes).types)
            settings = {"top": top, "engine": engine, "precision": used}
            job = _job("predict", bundle, listing, images, chunk, columns, settings)
            work = PredictWork(job, folder.path.absolute(), folder.listing.absolute(), bundle, top, batch, engine, used)
            records, earlier, seconds = _run(pool, folder, job, work, workers, on_progress, on_plan)
    counted = Sink()
    counted.done, counted.bad = sum(record.rows for record in records), sum(record.bad for record in records)
    first_bad = next((record.unread[0] for record in records if record.unread), None)
    counted.first_bad = None if first_bad is None else (first_bad[0].encode(), first_bad[1])
    check_readable(counted)
    return Summary(counted.done, counted.bad, earlier, seconds, used, skipped)


def embed_on_ray(
    bundle: Bundle,
    source: Source,
    output: str | Path | None,
    ray: str | RayOptions,
    request: FeatureRequest,
    *,
    dtype: DType,
    batch: int,
    workers: int | None,
    device: str,
    precision: PrecisionChoice,
    resume: bool,
    overwrite: bool,
    on_progress: OnCount | None,
    on_plan: OnPlan | None,
) -> EmbedResult:
    """Compute features and write a folder of Parquet files; the arguments are those of `embed`."""
    options = options_of(ray)
    if output is None:
        raise ConfigError("with --ray, features are written to a folder of Parquet files; name it with --output")
    check_dtype(dtype)
    used = check_precision(precision)  # auto is float32: workers may differ
    request.check(bundle.model.config)
    folder = ChunkFolder(output, resume=resume, overwrite=overwrite)
    with _pool(options, device, folder) as pool, folder:
        settings = {**asdict(request), "dtype": dtype, "precision": used}
        columns, chunk = ("index", "name", "label", "features"), _chunk_size(options, folder)
        job = _job("embed", bundle, _digest_source(source), len(source), chunk, columns, settings)
        work = EmbedWork(job, folder.path.absolute(), bundle, source, request, batch, used, dtype)
        records, _, _ = _run(pool, folder, job, work, workers, on_progress, on_plan)
    bad = [BadImage(*image) for record in records for image in record.unread]
    rows = sum(record.rows for record in records)
    if not rows:
        raise nothing_to_read(bad)
    return EmbedResult(folder.path, None, (rows, *request.shape(bundle.model.config)), tuple(bad))


@contextmanager
def _pool(options: RayOptions, device: str, folder: ChunkFolder) -> Iterator[Pool]:
    """Yield what connects to the cluster: now, so that nothing is written if it fails, unless all work is done."""
    with ExitStack() as stack:

        @functools.cache
        def connect() -> tuple[Any, Placement]:
            cluster = stack.enter_context(connected(options.address))
            return cluster, place_workers(nodes_of(cluster), options.workers, device)

        if not (folder.resume and folder.is_finished()):
            connect()
        yield connect


def _chunk_size(options: RayOptions, folder: ChunkFolder) -> int:
    if options.chunk is None and folder.resume and folder.before is not None:
        return folder.before.chunk
    return options.chunk or CHUNK


def _job(
    command: str,
    bundle: Bundle,
    listing: str,
    images: int,
    chunk: int,
    columns: tuple[str, ...],
    settings: dict[str, Any],
) -> ChunkJob:
    preprocess = bundle.preprocess.model_dump(mode="json")
    return ChunkJob(command, digest_model(bundle), preprocess, listing, images, chunk, columns, settings)


def _digest_source(source: Source) -> str:
    """Return a digest of names, labels and keys, which of data in memory contain its fingerprint."""
    digest = hashlib.sha256("\0".join(source.classes).encode("utf-8", "surrogateescape"))
    digest.update(np.ascontiguousarray(source.labels).data)
    for index, key in enumerate(all_keys_of(source)):
        digest.update(f"{source.name(index)}\0{key}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _run(
    pool: Pool,
    folder: ChunkFolder,
    job: ChunkJob,
    work: ChunkWork,
    decoders: int | None,
    on_progress: OnCount | None,
    on_plan: OnPlan | None,
) -> tuple[list[ChunkRecord], int, float]:
    """Compute the chunks without a file; return all records, the images of an earlier run, and the time."""
    records = folder.start(job)
    done = earlier = sum(len(job.range_of(number)) for number in records)
    pending, started = [number for number in range(job.chunks) if number not in records], time.monotonic()
    with _explained(folder):
        for record, plan in _compute(pool, work, pending, decoders):
            if on_plan is not None:
                count = pool()[1].workers
                on_plan(f"{count} Ray {'worker' if count == 1 else 'workers'}: {plan}")
                on_plan = None
            records[record.chunk] = record
            done += len(job.range_of(record.chunk))
            if on_progress is not None:
                on_progress(done, job.images)
    folder.finish(job, records)
    return [records[number] for number in range(job.chunks)], earlier, time.monotonic() - started


def _compute(
    pool: Pool, work: ChunkWork, pending: Sequence[int], decoders: int | None
) -> Iterator[tuple[ChunkRecord, str]]:
    """Yield the records of chunks as they finish, with the worker's execution plan."""
    if not pending:
        return
    cluster, placement = pool()
    data = cluster.data
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if decoders is None and (placement.gpus or placement.cpus < 2):
        decoders = placement.cpus if placement.gpus else 0
    place = WorkerPlace(placement.device, max(1, placement.cpus), decoders)
    # One block per chunk: results arrive one by one, and a lost worker repeats one chunk.
    numbers = data.from_items([{"chunk": number} for number in pending], override_num_blocks=len(pending))
    results = numbers.map_batches(
        ChunkWorker,
        batch_size=1,
        compute=data.ActorPoolStrategy(size=min(placement.workers, len(pending)), max_tasks_in_flight_per_actor=AHEAD),
        fn_constructor_args=(cluster.put(work), place, os.getcwd()),
        num_cpus=placement.cpus,
        num_gpus=placement.gpus,
    )
    for row in results.iter_rows():
        result = json.loads(row["result"])
        if "error" in result:
            raise getattr(vitrail.errors, result["kind"], DataError)(result["error"])
        yield TypeAdapter(ChunkRecord).validate_python(result["record"]), result["plan"]


class ChunkWorker:
    """An actor: holds the model and writes the files of chunks."""

    def __init__(self, work: Any, place: WorkerPlace, folder: str) -> None:
        self.work, self.place, self.folder = work, place, folder
        self.opened: OpenWork | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Write the file of one chunk; an error that a user can cause is returned, so that the driver raises it."""
        try:
            if self.opened is None:
                self.opened = self._open()
            record = self.opened.compute(int(batch["chunk"][0]))
            result = {"record": asdict(record), "plan": self.opened.plan}
        except VitrailError as error:
            result = {"kind": type(error).__name__, "error": str(error)}
        return {"result": [json.dumps(result)]}

    def _open(self) -> OpenWork:
        import ray

        with suppress(OSError):  # relative paths mean those of the driver, if this machine has the folder
            os.chdir(self.folder)
        torch.set_num_threads(self.place.threads)
        work: ChunkWork = ray.get(self.work)
        return work.open(self.place)


@contextmanager
def _explained(folder: ChunkFolder) -> Iterator[None]:
    """Turn the loss of workers or of the cluster into one sentence: finished chunks are kept."""
    from ray.exceptions import RayError

    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(f"rerun the same command with --resume to resume {folder.name}")
        raise
    except StorageError as error:
        raise StorageError(f"{error}; add --resume to keep the finished chunks of {folder.name}") from None
    except (RayError, ConnectionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"the Ray workers stopped ({type(error).__name__}: {reason}); finished chunks are kept, so rerun the same "
            "command with --resume"
        ) from None
