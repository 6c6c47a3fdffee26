"""The learner of a plan: supervised, or a pretraining method."""

import torch

from vitrail.data.sources.source import Source
from vitrail.training.learner import Learner, ShownMetrics
from vitrail.training.plan import TrainingPlan
from vitrail.training.pretraining.dino_learner import SelfDistillation
from vitrail.training.pretraining.learner import Pretraining
from vitrail.training.pretraining.metrics import PretrainingShown
from vitrail.training.supervised import Supervised


def learner_of(plan: TrainingPlan, device: torch.device, train: Source | None = None) -> Learner:
    """Return what a run trains; without the training images it has no class weights, and suits a forecast only."""
    if plan.recipe.dino is not None:
        return SelfDistillation(plan, labelled=len(plan.classes) > 1)
    if plan.recipe.method is not None:
        return Pretraining(plan, labelled=len(plan.classes) > 1)
    return Supervised.without_labels(plan, device) if train is None else Supervised.of(plan, train, device)


def shown_metrics(plan: TrainingPlan) -> ShownMetrics:
    """Return the metrics that a run shows while it trains."""
    return plan.task if plan.recipe.method is None else PretrainingShown(labelled=len(plan.classes) > 1)
