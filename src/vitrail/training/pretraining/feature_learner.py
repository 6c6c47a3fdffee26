"""Learning a teacher's features: pretraining whose targets are computed by a frozen model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from vitrail.data.batches import Batch
from vitrail.data.views import AnyBatch
from vitrail.runtime import Precision
from vitrail.training.plan import TrainingPlan
from vitrail.training.pretraining.distill import DistillSettings, FeatureTeacher, PairedFeatures, distillation_loss
from vitrail.training.pretraining.learner import Pretraining

if TYPE_CHECKING:
    from vitrail.training.run import TrainingRun


@dataclass(frozen=True)
class FeatureDistillation(Pretraining):
    """Pretrains a model to have the features of a teacher."""

    teacher: FeatureTeacher | None
    """None for a memory forecast, which needs no real targets."""

    @classmethod
    def of(
        cls, plan: TrainingPlan, device: torch.device, precision: Precision, *, labelled: bool, forecast: bool
    ) -> "FeatureDistillation":
        """Return the learner of a run, or of its memory forecast."""
        if forecast or plan.teacher is None:
            return cls(plan, labelled, None)
        return cls(plan, labelled, FeatureTeacher(plan.teacher, plan.model.grid, device, precision))

    def inputs(self, pixels: Tensor, first: int) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return the images."""
        return (pixels,)

    def loss(self, outputs: Any, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Compare the mapped features with those of the teacher for the same images."""
        batch = cast("Batch", batch)  # views are for DINO only
        if self.teacher is None:
            target = PairedFeatures(*(torch.zeros(()) if own is None else torch.zeros_like(own) for own in outputs))
        else:
            target = self.teacher(batch)
        loss = distillation_loss(outputs, target, self.plan.recipe.distill or DistillSettings())
        return loss, loss.detach() * len(batch.labels)

    def _validation(self, run: "TrainingRun", module: nn.Module, pixels: Tensor, batch: Batch) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the loss."""
        return {"val_loss": self.loss(module(pixels), batch)[0]}
