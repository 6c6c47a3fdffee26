"""What a worker of a bulk job does: hold the model on its device, and turn the number of a chunk into its file.

The driver sends the work to the workers, which may be on other machines; they open it once and then compute chunk after
chunk. Nothing here knows how the workers are started.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import BadImage
from vitrail.data.sources.source import Source
from vitrail.data.sources.splits import split_of
from vitrail.inference.chunk_folder import ChunkJob, ChunkRecord, write_chunk
from vitrail.inference.chunk_listing import read_listing
from vitrail.inference.classifier import Predictor
from vitrail.inference.embed import facts_of, feature_rows
from vitrail.inference.feature_files import DType, open_rows
from vitrail.inference.features import ComputeOptions, FeatureModel, FeatureRequest
from vitrail.inference.row_batches import predict_items
from vitrail.inference.writing import Jsonl, PredictionRow, Sink, write_parquet
from vitrail.runtime import Precision
from vitrail.text import printable_path


class WorkerPlace(NamedTuple):
    """What a worker computes on."""

    device: str
    threads: int
    decoders: int | None
    """Decoder processes; None: the threads that compute also decode."""


class OpenWork(NamedTuple):
    """Work with its model on the device."""

    plan: str
    """The execution plan."""
    compute: Callable[[int], ChunkRecord]
    """Writes the file of a chunk."""


class ChunkWork(Protocol):
    """The work of a job."""

    def open(self, place: WorkerPlace) -> OpenWork:
        """Load the model onto a device."""


@dataclass(frozen=True)
class PredictWork:
    """Predict the images of a listing."""

    job: ChunkJob
    folder: Path
    listing: Path
    bundle: Bundle
    top: int
    batch: int
    engine: str
    precision: Precision

    def open(self, place: WorkerPlace) -> OpenWork:
        """Load the model onto a device."""
        predictor: Predictor[Any] = Predictor(
            self.bundle, engine=self.engine, precision=self.precision, device=place.device
        )

        def compute(number: int) -> ChunkRecord:
            return write_chunk(
                self.folder, number, self.job.digest, lambda target: self._write(predictor, place, number, target)
            )

        return OpenWork(str(predictor.engine.plan), compute)

    def _write(
        self, predictor: Predictor[Any], place: WorkerPlace, number: int, target: Path
    ) -> tuple[int, int, tuple[tuple[str, str], ...]]:
        first = self.job.range_of(number).start + 1
        made = predict_items(
            predictor,
            read_listing(self.listing, number),
            top=self.top,
            batch=self.batch,
            workers=place.decoders,
            first=first,
        )
        rows, counted, encode = list(chain.from_iterable(made)), Sink(), Jsonl().encode
        counted.write(rows)
        write_parquet(map(_line(encode), rows), target, predictor.task.row_format(predictor.names).types)
        first_bad = () if counted.first_bad is None else (counted.first_bad,)
        return counted.done, counted.bad, tuple((printable_path(path), error) for path, error in first_bad)


def _line(encode: Callable[[list[PredictionRow]], bytes]) -> Callable[[PredictionRow], bytes]:
    return lambda row: encode([row])


@dataclass(frozen=True)
class EmbedWork:
    """Compute the features of a source."""

    job: ChunkJob
    folder: Path
    bundle: Bundle
    source: Source
    request: FeatureRequest
    batch: int
    precision: Precision
    dtype: DType

    def open(self, place: WorkerPlace) -> OpenWork:
        """Load the model onto a device."""
        decoders = 0 if place.decoders is None else place.decoders
        ready = FeatureModel(
            self.bundle, self.request, ComputeOptions(place.device, self.precision, self.batch, decoders)
        )

        def compute(number: int) -> ChunkRecord:
            return write_chunk(self.folder, number, self.job.digest, lambda target: self._write(ready, number, target))

        return OpenWork(str(ready.plan), compute)

    def _write(self, ready: FeatureModel, number: int, target: Path) -> tuple[int, int, tuple[tuple[str, str], ...]]:
        indices, config = self.job.range_of(number), self.bundle.model.config
        images = split_of(self.source, np.arange(indices.start, indices.stop))
        facts = facts_of(self.request, config.depth, images)
        file = open_rows(target, None, ".parquet", len(images), self.request.shape(config), self.dtype, facts)
        written = 0
        unread: list[BadImage] = []
        try:
            for some in ready.batches(images):
                unread += some.bad
                rows = feature_rows(some, images, self.dtype)
                if rows.indices:
                    file.add(rows._replace(indices=[index + indices.start for index in rows.indices]))
                written += len(rows.indices)
            file.close()
        except BaseException:  # close the file, whatever happened
            file.abandon()
            raise
        return written, len(unread), tuple((image.name, image.reason) for image in unread)
