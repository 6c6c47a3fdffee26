"""Learning a task from labels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import Batch
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import label_rows, output_names_of
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
    outputs: int
    """How many outputs the head has."""

    @classmethod
    def of(cls, plan: TrainingPlan, train: Source, device: torch.device) -> "Supervised":
        """Return the learner of a run with these training images."""
        loss = plan.task.training_loss(plan.recipe.objective, label_rows(train), output_names_of(train), device)
        return cls(plan.task, loss, plan.mixing.on, plan.model.classes)

    @classmethod
    def without_labels(cls, plan: TrainingPlan, device: torch.device) -> "Supervised":
        """Return the learner without class weights, which need labels, and take no memory to speak of."""
        objective = plan.recipe.objective.replace(class_weights="none")
        loss = plan.task.training_loss(objective, np.arange(len(plan.classes)), plan.classes, device)
        return cls(plan.task, loss, plan.mixing.on, plan.model.classes)

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

    def placeholders(self, pixels: Tensor) -> Tensor:
        """Return the task's."""
        return self.task.placeholders(pixels, self.outputs)

    def validate(self, run: "TrainingRun") -> Validation:
        """Predict the validation split."""
        predictions = run.predict(self.kept(run.state.plain), run.validation_source)
        metrics = self.task.validation(predictions, output_names_of(run.validation_source))
        return Validation(metrics, len(predictions.labels), self.task.tuned(predictions).constants)

    def constants(self, run: "TrainingRun") -> Mapping[str, Any]:
        """Return the constants of the task that follow from predictions for the validation split."""
        if not self.task.is_tuned:
            return {}
        return self.task.tuned(run.predict(self.kept(run.state.plain), run.validation_source)).constants

    def standard_error(self, criterion: str, value: float, images: int) -> float | None:
        """Return the task's."""
        return self.task.standard_error(criterion, value, images)

    def evaluate(self, run: "TrainingRun", best: Bundle, *, final: bool) -> Metrics:
        """Predict the test split; without one, the split that selected the model."""
        splits = run.splits
        source = splits.test or run.validation_source
        predictions = run.predict(best.model.to(run.job.device), source)
        task = self.task.with_constants(best.task_constants, self.outputs)
        metrics = task.evaluate(predictions, source, kind=TRAINING if source is splits.train else HELD_OUT)
        if run.logger is not None and splits.val is not None:
            gap = gap_warning(MetricsFile.read(run.folder), len(splits.val), self.task)
            metrics = replace(metrics, warnings=(*metrics.warnings, *gap))
        if final and run.logger is not None:
            run.logger.test_predictions(predictions, source, task)
        return metrics
