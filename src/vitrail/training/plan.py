"""The plan of a run: a fully resolved recipe, the data it follows from, and what was chosen and why."""

import math
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.decode import decode, open_image
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import Kind, output_names_of, targets_of
from vitrail.errors import ConfigError, DataError, StorageError
from vitrail.models.config import ViTConfig
from vitrail.tasks.lookup import CLASSIFICATION
from vitrail.tasks.task import Task
from vitrail.training.recipe import Recipe
from vitrail.training.teacher import Teacher

TINY_SIDE, SMALL_SIDE = 16, 40
"""Images up to these sides count as tiny or small; larger ones as photos."""
SAMPLED_IMAGES = 64
"""Number of images to open when describing the data."""


class DataFacts(NamedTuple):
    """Properties of the training images."""

    images: int
    classes: tuple[str, ...]
    """What the images are labelled with: the names of the classes, labels or columns."""
    side: int
    """Median of the shorter sides, in pixels."""
    grey: bool
    device: str = "cpu"
    """Device type: "cpu", "cuda" or "mps". On a CPU the model has to be small to train in minutes."""
    kind: Kind = "classes"
    kind_reason: str = "every image has one class"


class ResolvedDefault(NamedTuple):
    """A field that was left unset, the value chosen for it, and why."""

    field: str
    value: Any
    reason: str


def compiles(recipe: Recipe, facts: DataFacts, defaults: list[ResolvedDefault]) -> bool:
    """Return whether a run is compiled."""
    if recipe.compile != "auto":
        return recipe.compile
    on_gpu = facts.device == "cuda"
    why = "a GPU runs compiled steps faster" if on_gpu else "compiling takes minutes, and is for GPUs"
    defaults.append(ResolvedDefault("compile", on_gpu, why))
    return on_gpu


class TrainingPlan(NamedTuple):
    """A fully resolved recipe, and what follows from it."""

    recipe: Recipe
    """Only `batch = "auto"` is resolved later, by `fit_batch_to_memory`: it must not change the folder's name."""
    model: ViTConfig
    preprocess: Preprocess
    classes: tuple[str, ...]
    """The classes of the data, which labels count; or the names of its labels or columns."""
    batch: int
    """If the recipe's batch is "auto": its upper bound."""
    steps: int
    peak_lr: float
    """The peak learning rate."""
    augmentation: Augmentation
    mixing: Mixing
    defaults: list[ResolvedDefault]
    teacher: Teacher | None = None
    task: Task = CLASSIFICATION
    """What the model learns, with the constants that follow from the training labels."""


def describe_data(source: Source, device: str = "cpu") -> DataFacts:
    """Describe the data from a few images, spread evenly over the source."""
    sides: list[int] = []
    grey: list[bool] = []
    for index in np.linspace(0, len(source) - 1, min(SAMPLED_IMAGES, len(source))).astype(int).tolist():
        try:
            stored = source.read(index)
            image = open_image(stored)
            sides.append(min(image.height, image.width))
            if len(grey) < 8:
                pixels = decode(stored, 3)
                grey.append(bool((pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 1] == pixels[..., 2]).all()))
        except StorageError:
            raise  # defaults must not depend on the network
        except DataError:
            continue
    if not sides:
        raise DataError("none of the sampled images can be read; run vitrail check on the data")
    targets = targets_of(source)
    kind = () if targets is None else (targets.kind, targets.reason)
    return DataFacts(len(source), output_names_of(source), int(np.median(sides)), all(grey), device, *kind)


def with_batch(plan: TrainingPlan, batch: int, images: int, reason: str) -> TrainingPlan:
    """Return the plan with its "auto" batch size resolved."""
    recipe = plan.recipe.replace(batch=batch)
    defaults = [*plan.defaults, ResolvedDefault("batch", batch, reason)]
    return plan._replace(recipe=recipe, batch=batch, steps=steps_of(recipe, images, batch), defaults=defaults)


def check_batch(plan: TrainingPlan, ranks: int) -> None:
    """Raise unless the batch can be split into equal micro-batches on all ranks."""
    micro_batches = ranks * plan.recipe.gradient_accumulation
    unit = 2 * micro_batches if plan.mixing.on else micro_batches
    if plan.batch % unit:
        pairs = " of whole pairs, which mixing needs" if plan.mixing.on else ""
        raise ConfigError(
            f"a batch of {plan.batch} cannot be split into {micro_batches} equal micro-batches{pairs} (ranks × "
            f"gradient_accumulation); use a batch that is a multiple of {unit}"
        )


def steps_per_epoch_text(images: int, batch: int) -> str:
    """Say how many steps an epoch takes."""
    steps = max(1, round(images / batch))
    return f"about {steps:,} {'step' if steps == 1 else 'steps'} per epoch of {images:,} images"


def steps_of(recipe: Recipe, images: int, batch: int) -> int:
    """Return the length of a run in steps."""
    if recipe.steps is not None:
        return recipe.steps
    return max(1, math.ceil((recipe.epochs or 1) * images * recipe.data.repeats / batch))


def written_model(model: ViTConfig) -> dict[str, Any]:
    """Return every set field of a model for TOML; an omitted field could resolve differently on another device."""
    return {name: value for name, value in model.model_dump(mode="json").items() if value is not None}
