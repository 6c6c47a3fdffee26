"""The learner of a plan: supervised, with or without a teacher, or a pretraining method."""

import torch

from vitrail.data.sources.source import Source
from vitrail.runtime import Precision
from vitrail.training.distillation import Distillation
from vitrail.training.learner import Learner, ShownMetrics
from vitrail.training.plan import TrainingPlan
from vitrail.training.pretraining.dino_learner import SelfDistillation
from vitrail.training.pretraining.feature_learner import FeatureDistillation
from vitrail.training.pretraining.learner import Pretraining
from vitrail.training.pretraining.metrics import PretrainingShown
from vitrail.training.supervised import Supervised


def learner_of(
    plan: TrainingPlan, device: torch.device, train: Source | None = None, precision: Precision = "float32"
) -> Learner:
    """Return what a run trains; `precision` is that of its teacher, if it has one.

    Without the training images it has no class weights and no teacher, and suits a forecast only.
    """
    if plan.recipe.distill is not None:
        labelled = len(plan.classes) > 1
        return FeatureDistillation.of(plan, device, precision, labelled=labelled, forecast=train is None)
    if plan.recipe.dino is not None:
        return SelfDistillation(plan, labelled=len(plan.classes) > 1)
    if plan.recipe.method is not None:
        return Pretraining(plan, labelled=len(plan.classes) > 1)
    if train is None:
        return Supervised.without_labels(plan, device)
    if plan.teacher is not None:
        return Distillation.taught(plan, plan.teacher, train, device, precision)
    return Supervised.of(plan, train, device)


def shown_metrics(plan: TrainingPlan) -> ShownMetrics:
    """Return the metrics that a run shows while it trains."""
    return plan.task if plan.recipe.method is None else PretrainingShown(labelled=len(plan.classes) > 1)
