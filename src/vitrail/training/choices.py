"""What a recipe leaves open, chosen for the data and the model, each with its reason."""

import math
from typing import Any, NamedTuple

import numpy as np

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.augmentation.augment import Affine, Augmentation
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.augmentation.randaugment import RandAugment
from vitrail.data.decode import decode, open_picture
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError
from vitrail.models.config import ViTConfig
from vitrail.models.variants import variant_config
from vitrail.training.recipe import Recipe
from vitrail.training.schedules import learning_rate
from vitrail.training.starting import Start, planned_model

LOOKED_AT = 64
"""How many pictures are opened to see what they are like."""
TINY_SIDE, SMALL_SIDE = 16, 40
"""Pictures up to these sides are drawings or thumbnails; larger ones are photographs."""


class Facts(NamedTuple):
    """What the pictures to train on are like."""

    pictures: int
    classes: tuple[str, ...]
    side: int
    """The middle of their shorter sides, in pixels."""
    grey: bool


class Choice(NamedTuple):
    """Something that was left open, and how it was settled."""

    field: str
    value: Any
    reason: str


class Plan(NamedTuple):
    """A recipe with nothing left open, and what follows from it."""

    recipe: Recipe
    """Only a batch that is "auto" is still open, until `fitting.settle_batch`: the run's folder is named before it."""
    model: ViTConfig
    preprocess: Preprocess
    batch: int
    """Where the recipe's is "auto": the most it can become."""
    steps: int
    rate: float
    """The highest learning rate."""
    augmentation: Augmentation
    mixing: Mixing
    choices: list[Choice]


def look_at(source: Source) -> Facts:
    """Open a few pictures, spread over the source, to see what they are like."""
    sides: list[int] = []
    grey: list[bool] = []
    for index in np.linspace(0, len(source) - 1, min(LOOKED_AT, len(source))).astype(int).tolist():
        try:
            stored = source.read(index)
            picture = open_picture(stored)
            sides.append(min(picture.height, picture.width))
            if len(grey) < 8:
                pixels = decode(stored, 3)
                grey.append(bool((pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 1] == pixels[..., 2]).all()))
        except DataError:
            continue
    if not sides:
        raise DataError("none of the pictures that were tried can be read; look at them with vitrail check")
    return Facts(len(source), source.classes, int(np.median(sides)), all(grey))


def choose(recipe: Recipe, facts: Facts, start: Bundle | None) -> Plan:
    """Settle what a recipe leaves open."""
    choices: list[Choice] = []
    model = _model(recipe, facts, start, choices)
    preprocess = _preprocess(recipe, model, start)
    batch = recipe.batch if isinstance(recipe.batch, int) else _batch(recipe, facts, choices)
    epochs = recipe.epochs
    if epochs is None and recipe.steps is None:
        epochs = _epochs(facts, start, choices)
    rate = _rate(recipe, start, choices) if recipe.optimizer.lr is None else recipe.optimizer.lr
    augmentation = _augmentation(facts, choices) if recipe.augmentation is None else recipe.augmentation
    mixing = _mixing(facts, choices) if recipe.mixing is None else recipe.mixing
    settled = recipe.replace(
        model=_written(model),
        batch="auto" if recipe.batch == "auto" else batch,
        epochs=epochs,
        optimizer=recipe.optimizer.replace(lr=rate),
        augmentation=augmentation,
        mixing=mixing,
        start=recipe.start if start is None else recipe.start or Start(),
    )
    steps = _steps(settled, facts.pictures, batch)
    learning_rate(settled.schedule, 0, steps, rate)  # refuses a schedule that does not fit, before anything is written
    return Plan(settled, model, preprocess, batch, steps, rate, augmentation, mixing, choices)


def with_batch(plan: Plan, batch: int, pictures: int, reason: str) -> Plan:
    """Settle a batch that was "auto", in a plan for so many pictures."""
    recipe = plan.recipe.replace(batch=batch)
    choices = [*plan.choices, Choice("batch", batch, reason)]
    return plan._replace(recipe=recipe, batch=batch, steps=_steps(recipe, pictures, batch), choices=choices)


def _steps(recipe: Recipe, pictures: int, batch: int) -> int:
    if recipe.steps is not None:
        return recipe.steps
    return max(1, math.ceil((recipe.epochs or 1) * pictures * recipe.data.repeats / batch))


def _written(model: ViTConfig) -> dict[str, Any]:
    """Return every field of a model that is not None, fit for TOML: what is left out would be chosen again."""
    return {name: value for name, value in model.model_dump(mode="json").items() if value is not None}


def _model(recipe: Recipe, facts: Facts, start: Bundle | None, choices: list[Choice]) -> ViTConfig:
    fields = dict(recipe.model)
    classes = len(facts.classes)
    if fields.get("classes", classes) != classes:
        raise ConfigError(f"model.classes is {fields['classes']}, but the data has {classes} classes; leave it out")
    if start is not None:
        if "name" in fields:
            raise ConfigError("model.name and a model to start from contradict each other; leave one of them out")
        return planned_model(start, recipe.start or Start(), fields, classes)
    name = fields.pop("name", None)
    if name is not None:
        return variant_config(name).replace(**{**fields, "classes": classes})
    return ViTConfig.model_validate({**_small_model(facts, fields, choices), **fields, "classes": classes})


def _small_model(facts: Facts, given: dict[str, Any], choices: list[Choice]) -> dict[str, Any]:
    """Return a model that learns from little data in little time."""
    patch = 2 if facts.side <= TINY_SIDE else 4 if facts.side <= SMALL_SIDE else 8
    largest = 48 if facts.pictures < 5_000 else 64 if facts.pictures < 50_000 else 96
    side = max(patch, min(facts.side, largest) // patch * patch)
    width, depth = (96, 4) if facts.side <= TINY_SIDE else (192, 6) if facts.pictures < 50_000 else (256, 8)
    found: dict[str, Any] = {
        "image_size": (side, side),
        "patch_size": (patch, patch),
        "width": width,
        "depth": depth,
        "heads": width // 32,
        "channels": 1 if facts.grey else 3,
        "pool": "mean",
        "final_norm": "after_pool",
        "class_token": "none",
        "stochastic_depth": 0.0 if facts.side <= TINY_SIDE else 0.1,
        "init": "timm",
    }
    reasons = {
        "image_size": f"the shorter sides are about {facts.side} pixels, and {largest} are enough for so few pictures",
        "patch_size": f"gives {(side // patch) ** 2} patches",
        "width": f"{facts.pictures:,} pictures are too few for a larger model",
        "depth": "as for the width",
        "channels": "the pictures are grey" if facts.grey else "the pictures are in colour",
    }
    choices += [Choice(f"model.{name}", found[name], why) for name, why in reasons.items() if name not in given]
    return found


def _preprocess(recipe: Recipe, model: ViTConfig, start: Bundle | None) -> Preprocess:
    if start is not None:
        own = start.preprocess.resized(model.image_size).with_channels(model.channels)
        return own.replace(**recipe.preprocess)
    half = (0.5,) * model.channels
    fresh = Preprocess(size=model.image_size, channels=model.channels, mean=half, std=half, resize="cover")
    return fresh.replace(**recipe.preprocess)


def _batch(recipe: Recipe, facts: Facts, choices: list[Choice]) -> int:
    power = 1 << max(5, min(9, round(math.log2(max(1, facts.pictures / 24)))))
    needed = 2 * recipe.data.repeats * recipe.micro_batches
    batch = -(-power // needed) * needed
    if recipe.batch is None:
        why = f"about 24 steps for each time the {facts.pictures:,} pictures are shown"
        choices.append(Choice("batch", batch, why))
    return batch


def _epochs(facts: Facts, start: Bundle | None, choices: list[Choice]) -> float:
    shown = 30_000 if start is not None else 160_000
    epochs = float(max(10, min(150, round(shown / facts.pictures))))
    choices.append(Choice("epochs", epochs, f"about {round(epochs * facts.pictures, -3):,} pictures shown in all"))
    return epochs


def _rate(recipe: Recipe, start: Bundle | None, choices: list[Choice]) -> float:
    rate = 0.01 if recipe.optimizer.kind == "sgd" else 1e-4 if start is not None else 1e-3
    what = "a model that knows something" if start is not None else "a fresh model"
    choices.append(Choice("optimizer.lr", rate, f"usual for {recipe.optimizer.kind} and {what}"))
    return rate


def _augmentation(facts: Facts, choices: list[Choice]) -> Augmentation:
    if facts.side <= TINY_SIDE:
        affine = Affine(translate=(0.1, 0.1), scale=(0.9, 1.1), shear=5.0)
        found = Augmentation(crop="none", flip=0.0, rotation=10.0, affine=affine)
        why = "tiny pictures: small turns and shifts; not mirrored, because they may be letters or digits"
    elif facts.side <= SMALL_SIDE:
        found = Augmentation(crop="padded", crop_padding=4, flip=0.0 if facts.grey else 0.5)
        why = "small pictures: shifted by a few pixels" + ("" if facts.grey else " and mirrored")
    else:
        found = Augmentation(crop_area=(0.35, 1.0), randaugment=RandAugment(layers=2, magnitude=7))
        why = "photographs: cut out, mirrored, changed by RandAugment"
    choices.append(Choice("augmentation", found.crop, why))
    return found


def _mixing(facts: Facts, choices: list[Choice]) -> Mixing:
    found = Mixing() if facts.side <= TINY_SIDE else Mixing(mixup=0.2, cutmix=1.0, chance=0.5)
    choices.append(
        Choice("mixing", "off" if not found.on else "mixup and CutMix", "keeps a model from learning by heart")
    )
    return found
