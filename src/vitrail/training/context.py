"""What a run computes on, decided once: precision, workers, execution path, images on the device."""

from typing import NamedTuple

import torch

from vitrail.data.batches import default_workers
from vitrail.data.sources.splits import Splits
from vitrail.runtime import Precision, faster_in_bf16
from vitrail.training.defaults import TrainingPlan
from vitrail.training.distributed import Ranks, RunContext
from vitrail.training.recipe import Recipe
from vitrail.training.step import plan_step


class Job(NamedTuple):
    """A training plan and what it computes on."""

    plan: TrainingPlan
    context: RunContext

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.context.device

    @property
    def precision(self) -> Precision:
        """The precision of matmuls."""
        return self.context.precision

    @property
    def processes(self) -> int:
        """The world size."""
        return self.context.ranks.processes.size

    @property
    def images(self) -> int:
        """Micro-batch size of one process."""
        return max(1, self.plan.batch // (self.processes * self.plan.recipe.gradient_accumulation))


def run_context(plan: TrainingPlan, splits: Splits, ranks: Ranks, workers: int | None) -> RunContext:
    """Decide what a run computes on; `workers` is the number asked for, if any."""
    device, precision = ranks.device, _precision(plan.recipe, ranks.device)
    return RunContext(
        device,
        precision,
        _default_workers(device) if workers is None else workers,
        ranks,
        plan_step(plan.model, plan.recipe, precision, device, alone=ranks.alone),
        resident_images(plan, splits),
    )


def resident_images(plan: TrainingPlan, splits: Splits) -> int:
    """Return how many images are kept on the device: the training images and those of the validation split."""
    return len(splits.train) + len(splits.val or splits.train) if plan.recipe.data.on_device else 0


def _precision(recipe: Recipe, device: torch.device) -> Precision:
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16" if faster_in_bf16(device) else "float32"


def _default_workers(device: torch.device) -> int:
    """Use few workers on a CPU, where the model needs the cores."""
    return default_workers() if device.type != "cpu" else max(1, default_workers() // 4)
