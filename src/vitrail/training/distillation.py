"""Learning a task from labels and from a teacher (arXiv 1503.02531, and DeiT, arXiv 2012.12877).

    loss = (1 - weight) · label loss + weight · teacher loss

A model with a distillation token has two heads, as in DeiT: that of the class token learns the labels, that of the
distillation token learns from the teacher, and the prediction is the mean of both. Any other model learns both with its
one head.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.batches import Batch
from vitrail.data.sources.source import Source
from vitrail.data.views import AnyBatch
from vitrail.models.vit import ViT
from vitrail.runtime import Precision
from vitrail.training.plan import TrainingPlan
from vitrail.training.supervised import Supervised
from vitrail.training.teacher import ClassTeacher, Teacher, TeacherSettings


def soft_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the mean KL divergence of softened probabilities from logits (B, K), times the squared temperature.

    Gradients shrink with the square of the temperature; the factor keeps their scale.
    """
    learned, taught = ((_wide(logits) / temperature).log_softmax(dim=1) for logits in (student, teacher))
    return F.kl_div(learned, taught, reduction="batchmean", log_target=True) * temperature**2


def hard_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, K) with the classes that the teacher predicts."""
    return F.cross_entropy(_wide(student), teacher.argmax(dim=1))


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class TwoHeads(nn.Module):
    """A model with a distillation token, whose output is the logits of both heads."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the class token and of the distillation token."""
        return self.model.distilled(x)


@dataclass(frozen=True)
class Distillation(Supervised):
    """Learns a task from labels and from a teacher."""

    settings: TeacherSettings
    teacher: ClassTeacher

    @classmethod
    def taught(
        cls, plan: TrainingPlan, teacher: Teacher, train: Source, device: torch.device, precision: Precision
    ) -> "Distillation":
        """Return the learner of a run with these training images."""
        base = Supervised.of(plan, train, device)
        opened = ClassTeacher(teacher, train.classes, device, precision, mixed=base.mixed)
        return cls(
            base.task, base.task_loss, base.mixed, base.outputs, plan.recipe.teacher or TeacherSettings(), opened
        )

    def module(self, model: ViT) -> nn.Module:
        """Return the model; with a distillation token, with the outputs of both heads."""
        return TwoHeads(model) if model.config.distillation_token else model

    def kept(self, module: nn.Module) -> ViT:
        """Return the model."""
        return module.model if isinstance(module, TwoHeads) else cast("ViT", module)

    def loss(self, outputs: Any, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Compare the outputs with the labels, and with the teacher's outputs for the same images."""
        by_label, by_teacher = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        own, total = super().loss(by_label, batch)
        if by_label is not by_teacher:  # the prediction is the mean of both heads
            total = super().loss((by_label.detach() + by_teacher.detach()) / 2, batch)[1]
        weight, taught = self.settings.weight, self.teacher(cast("Batch", batch))
        if self.settings.targets == "hard":
            return (1 - weight) * own + weight * hard_loss(by_teacher, taught), total
        return (1 - weight) * own + weight * soft_loss(by_teacher, taught, self.settings.temperature), total
