"""Learning a task from labels."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import Batch
from vitrail.data.sources.source import Source
from vitrail.data.views import AnyBatch
from vitrail.models.vit import ViT
from vitrail.tasks.metrics import HELD_OUT, TRAINING, Metrics
from vitrail.tasks.task import Task, TrainingLoss
from vitrail.training.learner import Learner, Validation
from vitrail.training.plan import TrainingPlan
from vitrail.training.run_folder import MetricsFile
from vitrail.training.run_logger import gap_warning

if TYPE_CHECKING:
    from vitrail.training.run import TrainingRun


@dataclass(frozen=True)
class Supervised(Learner):
    """Learns a task: the module is the model."""

    task: Task
    task_loss: TrainingLoss
    mixed: bool
    """Whether mixup or CutMix is on."""

    @classmethod
    def of(cls, plan: TrainingPlan, train: Source, device: torch.device) -> "Supervised":
        """Return the learner of a run with these training images."""
        loss = plan.task.training_loss(plan.recipe.objective, train.labels, train.classes, device)
        return cls(plan.task, loss, plan.mixing.on)

    @classmethod
    def without_labels(cls, plan: TrainingPlan, device: torch.device) -> "Supervised":
        """Return the learner without class weights, which need labels, and take no memory to speak of."""
        objective = plan.recipe.objective.replace(class_weights="none")
        loss = plan.task.training_loss(objective, np.arange(len(plan.classes)), plan.classes, device)
        return cls(plan.task, loss, plan.mixing.on)

    def module(self, model: ViT) -> nn.Module:
        """Return the model."""
        return model

    def kept(self, module: nn.Module) -> ViT:
        """Return the model."""
        return cast("ViT", module)

    def inputs(self, pixels: Tensor, first: int) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return the images."""
        return (pixels,)

    def loss(self, outputs: Any, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Compare the outputs with the labels."""
        batch = cast("Batch", batch)  # views have no labels
        return self.task_loss(outputs, batch.labels, batch.lam if self.mixed else None)

    def validate(self, run: "TrainingRun") -> Validation:
        """Predict the validation split."""
        predictions = run.predict(self.kept(run.state.plain), run.validation_source)
        metrics = self.task.validation(predictions, run.validation_source.classes)
        return Validation(metrics, len(predictions.labels))

    def standard_error(self, criterion: str, value: float, images: int) -> float | None:
        """Return the task's."""
        return self.task.standard_error(criterion, value, images)

    def evaluate(self, run: "TrainingRun", best: Bundle, *, final: bool) -> Metrics:
        """Predict the test split; without one, the split that selected the model."""
        splits = run.splits
        source = splits.test or run.validation_source
        predictions = run.predict(best.model.to(run.job.device), source)
        metrics = self.task.evaluate(predictions, source, kind=TRAINING if source is splits.train else HELD_OUT)
        if run.logger is not None and splits.val is not None:
            gap = gap_warning(MetricsFile.read(run.folder), len(splits.val), self.task)
            metrics = replace(metrics, warnings=(*metrics.warnings, *gap))
        if final and run.logger is not None:
            run.logger.test_predictions(predictions, source, self.task)
        return metrics
