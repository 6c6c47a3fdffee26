"""What a model predicts for a whole split while it trains: every process takes its share, and all get everything."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import nn

from vitrail.data.batches import Batch, Evaluation, evaluation_batches
from vitrail.data.resident import ResidentEvaluation
from vitrail.data.sources.source import Source
from vitrail.data.stream import RankSlice
from vitrail.errors import DataError
from vitrail.evaluation import Predictions, predict_all
from vitrail.training.defaults import TrainingPlan
from vitrail.training.distributed import RunContext
from vitrail.training.memory import evaluation_batch


@dataclass(frozen=True, eq=False)
class Predictor:
    """Asks a model about every image of a split."""

    plan: TrainingPlan
    context: RunContext
    kept: tuple[Source, ResidentEvaluation] | None
    """The split that stays on the device, where images live there."""

    def __call__(self, model: nn.Module, source: Source) -> Predictions:
        """Return the predictions for a whole split, in every process."""
        context = self.context
        own = predict_all(
            model, self._batches(source), self.plan.preprocess, context.device, context.precision, name=source.name
        )
        shares = context.ranks.gathered(own)
        bad = tuple(row for share in shares for row in share.bad)
        answered = [share for share in shares if len(share.labels)]
        if not answered:
            raise DataError(
                f"none of the {len(bad)} images to measure by can be read; the first, {bad[0].name}: {bad[0].reason}"
            )
        return Predictions(
            np.concatenate([share.probabilities for share in answered]),
            np.concatenate([share.labels for share in answered]),
            np.concatenate([share.indices for share in answered]),
            bad,
        )

    def _batches(self, source: Source) -> Iterator[Batch]:
        """Give this process's share of a split."""
        if self.kept is not None and source is self.kept[0]:
            return self.kept[1].batches()
        pin = self.context.device.type == "cuda"
        return evaluation_batches(share_of(source, self.plan, self.context), workers=self.context.workers, pin=pin)


def predictor(plan: TrainingPlan, context: RunContext, often: Source) -> Predictor:
    """Return what predicts splits; the one that is asked about `often` stays on the device, where images live there."""
    on_device = plan.recipe.data.on_device
    kept = (
        (often, ResidentEvaluation(share_of(often, plan, context), context.device, context.workers))
        if on_device
        else None
    )
    return Predictor(plan, context, kept)


def share_of(source: Source, plan: TrainingPlan, context: RunContext) -> Evaluation:
    """Return the share of a split that is this process's to evaluate."""
    processes = context.ranks.processes
    images = plan.batch // (processes.size * plan.recipe.gradient_accumulation)
    rank_slice = RankSlice(processes.rank, processes.size)
    return Evaluation(source, plan.preprocess, evaluation_batch(images), rank_slice, bad_files="skip")
