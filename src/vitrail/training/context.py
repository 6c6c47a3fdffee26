"""What a run computes on, decided once: its images, precision, workers, execution path, images on the device."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vitrail.acceleration.planner import ExecutionPlan, hardware_of, usual_precision
from vitrail.data.batches import default_workers
from vitrail.data.decoder_choice import ON_CPU, Decoder, choose_for_source
from vitrail.data.sources.given import Data
from vitrail.data.sources.opening import open_data, open_unlabelled
from vitrail.data.sources.splits import Splits
from vitrail.data.sources.targets import kind_of_labels
from vitrail.errors import ConfigError
from vitrail.runtime import Precision
from vitrail.training.distributed import Ranks
from vitrail.training.plan import TrainingPlan
from vitrail.training.recipe import Recipe
from vitrail.training.sharding import check_shardable
from vitrail.training.step import plan_step

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class RunContext:
    """What a run computes on; `run_context` decides it once."""

    device: torch.device
    precision: Precision
    workers: int
    """Worker processes that read images."""
    ranks: Ranks
    execution: ExecutionPlan
    """The execution path of the steps."""
    sharded: bool = False
    """Whether each rank holds a slice of the model."""
    resident: int = 0
    """Number of images kept on the device."""
    resident_validation: bool = True
    """Whether those of the validation split are among them."""
    placement: str = ""
    """Which images are kept on the device, and why, in one line; empty if all are read from files."""
    decoder: Decoder = ON_CPU
    """Where JPEGs are decoded."""


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


def open_splits(data: Data, recipe: Recipe) -> Splits:
    """Open the data of a run; whatever depends on the training images sees only those that the recipe keeps."""
    kept = recipe.data
    if recipe.method is not None:
        return open_unlabelled(data, seed=recipe.seed, val=kept.val, labelling=recipe.labelling)
    splits = open_data(
        data, seed=recipe.seed, val=kept.val, test=kept.test, fraction=kept.fraction, per_class=kept.per_class,
        labelling=recipe.labelling,
    )  # fmt: skip
    if kind_of_labels(splits.train) == "masks":
        _check_masks(recipe)
    return splits


def _check_masks(recipe: Recipe) -> None:
    """Raise for settings that images with masks do not support."""
    reasons = {
        "cache": "a mask has the size of its image, not of a smaller one",
        "on_device": "images with masks are augmented on the CPU",
    }
    for name, reason in reasons.items():
        if value := getattr(recipe.data, name):
            raise ConfigError(f"data.{name} is {str(value).lower()}, but {reason}; leave it out")


def run_context(plan: TrainingPlan, splits: Splits, ranks: Ranks, workers: int | None) -> RunContext:
    """Decide what a run computes on; `workers` is the number asked for, if any."""
    device, precision = ranks.device, _precision(plan.recipe, ranks.device)
    sharded = plan.recipe.distributed.shard is True
    if sharded:
        check_shardable(plan.recipe, precision)
    workers = _default_workers(device) if workers is None else workers
    return RunContext(
        device,
        precision,
        workers,
        ranks,
        plan_step(plan.model, plan.recipe, precision, device, alone=ranks.alone, sharded=sharded),
        sharded,
        resident_images(plan, splits),
        decoder=_decoder(plan, splits, device, workers),
    )


def _decoder(plan: TrainingPlan, splits: Splits, device: torch.device, workers: int) -> Decoder:
    """Choose where JPEGs are decoded; some recipes leave no choice."""
    recipe, on_device = plan.recipe, plan.recipe.data.on_device
    reasons = {
        "data.cache keeps decoded images": recipe.data.cache is not None,
        # Decoding takes memory of the GPU, which the images may fill: only if it is asked for.
        "data.on_device reads each image once": on_device and recipe.data.decode != "gpu",
        "the views of dino are made on the CPU": recipe.dino is not None and not on_device,
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    if reason is None:
        return choose_for_source(
            recipe.data.decode, device, plan.preprocess, splits.train, count=plan.steps * plan.batch,
            workers=workers, augmentation=None if on_device else plan.augmentation,
        )  # fmt: skip
    if recipe.data.decode == "gpu":
        raise ConfigError(f"data.decode is gpu, but {reason}; use data.decode=cpu or auto")
    return ON_CPU


def resident_images(plan: TrainingPlan, splits: Splits) -> int:
    """Return how many images are kept on the device: the training images and those of the validation split."""
    return len(splits.train) + len(splits.val or splits.train) if plan.recipe.data.on_device else 0


def evaluation_batch(images: int) -> int:
    """Return the batch size for evaluation, given the micro-batch size: it fits wherever training fits."""
    return min(EVALUATION_BATCH, 2 * max(1, images))


def _precision(recipe: Recipe, device: torch.device) -> Precision:
    return usual_precision(hardware_of(device)) if recipe.precision == "auto" else recipe.precision


def _default_workers(device: torch.device) -> int:
    """Use few workers on a CPU, where the model needs the cores."""
    return default_workers() if device.type != "cpu" else max(1, default_workers() // 4)
