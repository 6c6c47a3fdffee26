"""DINO in a run: its views, what happens before and after an optimizer step, and how a collapse is noticed."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from vitrail.data.augmentation.device_views import DRAWS, device_views
from vitrail.data.augmentation.multicrop import GLOBAL_VIEWS
from vitrail.data.batches import Batch
from vitrail.data.views import AnyBatch
from vitrail.errors import Diverged
from vitrail.models.vit import ViT
from vitrail.training.distributed import Ranks
from vitrail.training.learner import Validation
from vitrail.training.pretraining.dino import Dino, DinoSettings, teacher_temperature_at
from vitrail.training.pretraining.draws import uniform
from vitrail.training.pretraining.learner import Pretraining

if TYPE_CHECKING:
    from vitrail.training.run import TrainingRun

LEAST_INFORMATION = 0.05
"""How far, in nats, the entropy of the teacher's outputs must stay below that of uniform outputs. Runs that collapsed
ended at most 0.03 below it, runs that learned more than 1 (benchmarks/LOG.md)."""


@dataclass(frozen=True)
class SelfDistillation(Pretraining):
    """Pretrains a model with DINO; the teacher is kept."""

    means: list[Tensor] = field(default_factory=list, compare=False)
    """The mean outputs of the teacher in the micro-batches of the current step."""

    @property
    def settings(self) -> DinoSettings:
        """The settings of the method."""
        return self.plan.recipe.dino or DinoSettings()

    def kept(self, module: nn.Module) -> ViT:
        """Return the teacher's encoder."""
        return cast("ViT", module.teacher)

    def inputs(self, pixels: Tensor, first: int) -> tuple[Tensor, ...]:
        """Return views of images, made on their device, and the teacher's temperature."""
        return self.view_inputs(self._views(pixels, first, "views"), first)

    def view_inputs(self, views: tuple[Tensor, Tensor], first: int) -> tuple[Tensor, ...]:
        """Return the views and the teacher's temperature; as a tensor, so that a compiled model is not recompiled."""
        return *views, self._temperature(first // self.plan.batch, views[0])

    def loss(self, outputs: Any, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Return the module's loss, and keep the teacher's mean output for the end of the step."""
        self.means.append(outputs.teacher_mean.detach())
        return outputs.loss, outputs.loss.detach() * len(batch.indices)

    def before_step(self, step: int) -> None:  # noqa: ARG002
        """Clear the outputs of the previous step."""
        self.means.clear()

    def before_update(self, module: nn.Module, step: int) -> None:
        """Freeze the head's last layer in the first steps."""
        cast("Dino", module).before_step(step, self.plan.steps)

    def after_update(self, module: nn.Module, step: int, ranks: Ranks) -> None:
        """Update teacher and centre, the centre with the mean over all micro-batches and ranks."""
        mean = torch.stack(self.means).mean(dim=0)
        ranks.all_reduce_sum(mean)
        cast("Dino", module).after_step(step, self.plan.steps, mean / ranks.processes.size)

    def validate(self, run: "TrainingRun") -> Validation:
        """Compute loss and features on the validation split; raise if features or outputs have collapsed."""
        validation = super().validate(run)
        uniform_entropy = math.log(self.settings.prototypes)
        if validation.metrics["val_entropy"] > uniform_entropy - LEAST_INFORMATION:
            raise Diverged(
                f"the teacher's outputs have collapsed after step {run.progress.step:,}: they are uniform for all "
                f"images (entropy {validation.metrics['val_entropy']:.3f} of {uniform_entropy:.3f}), so nothing is "
                f"learned; use a lower dino.teacher_temperature and dino.warmup_teacher_temperature, or views that "
                f"show more of the image (dino.global_area, dino.local_area), in a new run"
            )
        return validation

    def _validation(self, run: "TrainingRun", module: nn.Module, pixels: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return loss and entropy of the targets, with the same views every time."""
        views = self._views(pixels, int(batch.indices[0]), "validation views")
        temperature = self._temperature(run.progress.step, pixels)
        entropy = cast("Dino", module).target_entropy(views[0], temperature)
        return {"val_loss": module(*views, temperature).loss, "val_entropy": entropy}

    def _views(self, pixels: Tensor, first: int, purpose: str) -> tuple[Tensor, Tensor]:
        """Make views of normalised images from the seed and the positions in the stream."""
        preprocess, crops = self.plan.preprocess, self.settings.crops(self.plan.model)
        count = (GLOBAL_VIEWS + crops.local_crops) * DRAWS
        drawn = uniform(self.plan.recipe.seed, purpose, first, len(pixels), count, pixels.device)
        mean, std = (
            torch.tensor(values, device=pixels.device)[:, None, None] for values in (preprocess.mean, preprocess.std)
        )
        large, small = device_views(pixels * std + mean, drawn, crops)
        return (large - mean) / std, (small - mean) / std

    def _temperature(self, step: int, like: Tensor) -> Tensor:
        value = teacher_temperature_at(self.settings, step, self.plan.steps)
        return torch.full((), value, device=like.device, dtype=torch.float32)
