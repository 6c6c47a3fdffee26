"""Predictions for a whole split, distributed over the ranks, and test_predictions.parquet."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from vitrail.data.batches import Batch, Evaluation
from vitrail.data.resident import ResidentEvaluation
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import output_names_of
from vitrail.data.stream import RankSlice
from vitrail.errors import DataError, StorageError
from vitrail.evaluation import predict_all
from vitrail.tasks.task import Predictions, Task
from vitrail.training.context import RunContext, evaluation_batch
from vitrail.training.plan import TrainingPlan
from vitrail.training.run_folder import atomic_run_file


@dataclass(frozen=True, eq=False)
class SplitPredictor:
    """Runs a model on every image of a split."""

    plan: TrainingPlan
    context: RunContext
    kept: tuple[Source, ResidentEvaluation] | None
    """The split that is kept on the device, if any."""

    def __call__(self, model: nn.Module, source: Source) -> Predictions:
        """Return the predictions for a whole split, on every rank."""
        context = self.context
        own = predict_all(
            model,
            self.batches(source),
            self.plan.preprocess,
            context.device,
            context.precision,
            name=source.name,
            task=self.plan.task,
        )
        slices = context.ranks.all_gather(own)
        bad = tuple(row for one in slices for row in one.bad)
        readable = [one for one in slices if len(one.labels)]
        if not readable:
            raise DataError(
                f"none of the {len(bad)} images to evaluate can be read; the first, {bad[0].name}: {bad[0].reason}"
            )
        return Predictions(
            np.concatenate([one.outputs for one in readable]),
            np.concatenate([one.labels for one in readable]),
            np.concatenate([one.indices for one in readable]),
            bad,
        )

    def batches(self, source: Source) -> Iterator[Batch]:
        """Yield this rank's slice of a split."""
        for batch in self._batches(source):
            self.context.ranks.doing("evaluating")  # per batch: a long evaluation is not stuck
            yield batch

    def _batches(self, source: Source) -> Iterator[Batch]:
        if self.kept is not None and source is self.kept[0]:
            return self.kept[1].batches()
        context = self.context
        return context.decoder.batches(rank_slice(source, self.plan, context), context.device, context.workers)


def split_predictor(plan: TrainingPlan, context: RunContext, often: Source) -> SplitPredictor:
    """Return a `SplitPredictor`; with `data.on_device`, it keeps the split `often` on the device if that fits."""
    on_device = plan.recipe.data.on_device and context.resident_validation
    if not on_device:
        return SplitPredictor(plan, context, None)
    images = rank_slice(often, plan, context)
    kept = ResidentEvaluation(images, context.device, context.workers, context.decoder)
    return SplitPredictor(plan, context, (often, kept))


def rank_slice(source: Source, plan: TrainingPlan, context: RunContext) -> Evaluation:
    """Return this rank's slice of a split."""
    processes = context.ranks.processes
    images = plan.batch // (processes.size * plan.recipe.gradient_accumulation)
    rank_slice = RankSlice(processes.rank, processes.size)
    return Evaluation(source, plan.preprocess, evaluation_batch(images), rank_slice, bad_files="skip")


# ── test_predictions.parquet ──


def digest_of(source: Source, index: int) -> str:
    """Return a digest of an image's stored content, independent of its name."""
    try:
        stored = source.read(index)
    except StorageError:
        raise
    except DataError:  # deleted since it was predicted
        return ""
    content = stored if isinstance(stored, bytes) else np.ascontiguousarray(stored).tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def write_test_predictions(predictions: Predictions, source: Source, path: Path, task: Task) -> None:
    """Write a row for each readable image, in the order of the source."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    order = np.argsort(predictions.indices, kind="stable")
    indices = predictions.indices[order]
    sorted_rows = Predictions(predictions.outputs[order], predictions.labels[order], indices)
    table = pa.table(
        {
            "index": pa.array(indices, pa.int64()),
            "name": pa.array([source.name(int(index)) for index in indices], pa.string()),
            "digest": pa.array([digest_of(source, int(index)) for index in indices], pa.string()),
            **task.columns(sorted_rows, output_names_of(source)),
        },
        metadata={"classes": json.dumps(output_names_of(source), ensure_ascii=False)},
    )
    with atomic_run_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
