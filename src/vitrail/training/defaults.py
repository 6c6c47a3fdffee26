"""What a recipe leaves open, chosen for the data and the model, each with its reason."""

import math
from typing import Any, NamedTuple

import numpy as np

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.augmentation.augment import Affine, Augmentation
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.augmentation.on_device import check_on_device
from vitrail.data.augmentation.randaugment import RandAugment
from vitrail.data.decode import decode, open_image
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError
from vitrail.models.checks import per_token
from vitrail.models.config import ConvLayer, ViTConfig
from vitrail.models.variants import PAPER, variant_config
from vitrail.training.criterion import Criterion
from vitrail.training.finetune_init import FinetuneInit, planned_model
from vitrail.training.recipe import Recipe
from vitrail.training.schedules import learning_rate

LOOKED_AT = 64
"""How many images are opened to see what they are like."""
TINY_SIDE, SMALL_SIDE = 16, 40
"""Images up to these sides are drawings or thumbnails; larger ones are photographs."""
FEW_PHOTOS = 2_000
"""Fewer photographs than these teach two blocks as much as four, in three quarters of the time, at half the learning
rate; a CPU spends what is saved on more steps (benchmarks/LOG.md)."""
NARROW, SMALL_WIDTH = 128, 256
"""Fresh models up to the first width, and trained ones up to the second, bear a higher learning rate."""
MUON_FASTER = 2.5
"""How many times AdamW's rate suits Muon: on CIFAR-10 a fresh model, 128 wide, learned better at 0.005 than at 0.002,
and one that is 384 wide better at 0.0025 than at 0.005."""


class DataFacts(NamedTuple):
    """What the images to train on are like."""

    images: int
    classes: tuple[str, ...]
    side: int
    """The middle of their shorter sides, in pixels."""
    grey: bool
    device: str = "cpu"
    """What the run computes on: "cpu", "cuda" or "mps". On a CPU a model has to be small to be done in minutes."""


class ResolvedDefault(NamedTuple):
    """Something that was left open, and how it was settled."""

    field: str
    value: Any
    reason: str


class TrainingPlan(NamedTuple):
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
    defaults: list[ResolvedDefault]


def describe_data(source: Source, device: str = "cpu") -> DataFacts:
    """Open a few images, spread over the source, to see what they are like."""
    sides: list[int] = []
    grey: list[bool] = []
    for index in np.linspace(0, len(source) - 1, min(LOOKED_AT, len(source))).astype(int).tolist():
        try:
            stored = source.read(index)
            image = open_image(stored)
            sides.append(min(image.height, image.width))
            if len(grey) < 8:
                pixels = decode(stored, 3)
                grey.append(bool((pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 1] == pixels[..., 2]).all()))
        except DataError:
            continue
    if not sides:
        raise DataError("none of the images that were tried can be read; look at them with vitrail check")
    return DataFacts(len(source), source.classes, int(np.median(sides)), all(grey), device)


def resolve_defaults(recipe: Recipe, facts: DataFacts, pretrained: Bundle | None) -> TrainingPlan:
    """Settle what a recipe leaves open."""
    defaults: list[ResolvedDefault] = []
    model = _model(recipe, facts, pretrained, defaults)
    if refusal := per_token(model):
        raise ConfigError(refusal)
    preprocess = _preprocess(recipe, model, pretrained)
    batch = recipe.batch if isinstance(recipe.batch, int) else _batch(recipe, facts, defaults)
    epochs = recipe.epochs
    if epochs is None and recipe.steps is None:
        epochs = _epochs(facts, pretrained, defaults)
    rate = _rate(recipe, facts, model, pretrained, defaults) if recipe.optimizer.lr is None else recipe.optimizer.lr
    augmentation = _augmentation(facts, defaults) if recipe.augmentation is None else recipe.augmentation
    mixing = _mixing(facts, defaults) if recipe.mixing is None else recipe.mixing
    if recipe.data.on_device:
        check_on_device(augmentation)
    settled = recipe.replace(
        model=_written(model),
        batch="auto" if recipe.batch == "auto" else batch,
        epochs=epochs,
        optimizer=recipe.optimizer.replace(lr=rate),
        augmentation=augmentation,
        mixing=mixing,
        pretrained=recipe.pretrained if pretrained is None else recipe.pretrained or FinetuneInit(),
        criterion=_criterion(recipe, defaults),
    )
    steps = _steps(settled, facts.images, batch)
    learning_rate(settled.schedule, 0, steps, rate)  # refuses a schedule that does not fit, before anything is written
    return TrainingPlan(settled, model, preprocess, batch, steps, rate, augmentation, mixing, defaults)


def with_batch(plan: TrainingPlan, batch: int, images: int, reason: str) -> TrainingPlan:
    """Settle a batch that was "auto", in a plan for so many images."""
    recipe = plan.recipe.replace(batch=batch)
    defaults = [*plan.defaults, ResolvedDefault("batch", batch, reason)]
    return plan._replace(recipe=recipe, batch=batch, steps=_steps(recipe, images, batch), defaults=defaults)


def _steps(recipe: Recipe, images: int, batch: int) -> int:
    if recipe.steps is not None:
        return recipe.steps
    return max(1, math.ceil((recipe.epochs or 1) * images * recipe.data.repeats / batch))


def _written(model: ViTConfig) -> dict[str, Any]:
    """Return every field of a model that is set, fit for TOML: one left out would be chosen anew, on another device."""
    return {name: value for name, value in model.model_dump(mode="json").items() if value is not None}


def _model(recipe: Recipe, facts: DataFacts, pretrained: Bundle | None, defaults: list[ResolvedDefault]) -> ViTConfig:
    fields = dict(recipe.model)
    classes = len(facts.classes)
    paper = fields.pop("paper", False)
    if not isinstance(paper, bool) or (paper and pretrained is not None):
        raise ConfigError(
            f"model.paper is {paper!r}; it is true for a fresh model as the ViT paper has it, else left out"
        )
    if paper and "name" not in fields:  # a named model is the paper's already
        fields = {**PAPER, **fields}
    if fields.get("classes", classes) != classes:
        raise ConfigError(f"model.classes is {fields['classes']}, but the data has {classes} classes; leave it out")
    if pretrained is not None:
        if "name" in fields:
            raise ConfigError("model.name and a model to start from contradict each other; leave one of them out")
        return planned_model(pretrained, recipe.pretrained or FinetuneInit(), fields, classes)
    name = fields.pop("name", None)
    if name is not None:
        return variant_config(name).replace(**{**fields, "classes": classes})
    return ViTConfig.model_validate({**_small_model(facts, fields, defaults), **fields, "classes": classes})


def _small_model(facts: DataFacts, given: dict[str, Any], defaults: list[ResolvedDefault]) -> dict[str, Any]:
    """Return a model that learns from little data in little time, around those of its fields that are given."""
    tiny, small, on_cpu = facts.side <= TINY_SIDE, facts.side <= SMALL_SIDE, facts.device == "cpu"
    patch = _pair(given.get("patch_size"), 2 if tiny else 4 if small else 8)
    largest = 64 if on_cpu else 96
    size = tuple(max(side, min(facts.side, largest) // side * side) for side in patch)
    few = _few_photos(facts)
    width, depth = (64, 4) if tiny else (96, 2 if few else 4) if on_cpu else (256, 8)
    width = given["width"] if isinstance(given.get("width"), int) else width
    stem = () if "stem" in given else _early_convolutions(patch, width, small, again=1 if on_cpu else 2)
    found: dict[str, Any] = {
        "image_size": size,
        "patch_size": patch,
        **({"stem": "conv_stem", "conv_stem": stem} if stem else {}),
        "width": width,
        "depth": depth,
        "heads": next(heads for heads in range(max(1, width // 32), 0, -1) if width % heads == 0),
        "activation": "relu" if on_cpu else "gelu",
        "channels": 1 if facts.grey else 3,
        "pool": "mean",
        "final_norm": "after_pool",
        "class_token": "none",
        "stochastic_depth": 0.0 if tiny else 0.1,
        "init": "timm",
    }
    cut = f", and {largest} are enough for a small model" if facts.side > largest else ""
    reasons = {
        "image_size": f"the shorter sides are about {facts.side} pixels{cut}",
        "patch_size": f"gives {math.prod(s // p for s, p in zip(size, patch, strict=True))} patches",
        "stem": "a few convolutions before the patches, which few images teach much sooner than a plain projection",
        "width": "small enough for a CPU" if on_cpu else f"{facts.images:,} images need no larger model",
        "depth": f"{facts.images:,} images teach more blocks no more" if on_cpu and few else "as for the width",
        "activation": "as good in a small model, and quicker on a CPU" if on_cpu else "the usual one",
        "channels": "the images are grey" if facts.grey else "the images are in colour",
    }
    defaults += [
        ResolvedDefault(f"model.{name}", found[name], why)
        for name, why in reasons.items()
        if name in found and name not in given
    ]
    return found


def _few_photos(facts: DataFacts) -> bool:
    return facts.side > SMALL_SIDE and facts.images < FEW_PHOTOS


def _pair(given: Any, default: int) -> tuple[int, int]:
    """Return a given size as height and width; one that is no size is left for the config to refuse."""
    sides = (given, given) if isinstance(given, int) else given
    fits = isinstance(sides, (list, tuple)) and len(sides) == 2 and all(isinstance(s, int) and s > 0 for s in sides)
    return (sides[0], sides[1]) if fits else (default, default)


def _early_convolutions(patch: tuple[int, int], width: int, small: bool, again: int) -> tuple[ConvLayer, ...]:
    """Return convolutions that halve an image until a patch is one pixel; () where halving does not lead there.

    Each that halves is followed by `again` that do not, but for a last single one, which would cost most and add least.
    Small images, which have no pixels to lose, begin with one that does not.
    """
    halvings = patch[0].bit_length() - 1
    if patch[0] != patch[1] or patch[0] != 1 << halvings or not halvings or width % patch[0]:
        return ()
    layers = [ConvLayer(channels=width >> halvings, stride=1)] if small else []
    for left in reversed(range(halvings)):
        layers.append(ConvLayer(channels=width >> left))
        layers += [ConvLayer(channels=width >> left, stride=1)] * (again if left else again // 2 * 2)
    return tuple(layers)


def _preprocess(recipe: Recipe, model: ViTConfig, pretrained: Bundle | None) -> Preprocess:
    if pretrained is not None:
        own = pretrained.preprocess.resized(model.image_size).with_channels(model.channels)
        return own.replace(**recipe.preprocess)
    half = (0.5,) * model.channels
    fresh = Preprocess(size=model.image_size, channels=model.channels, mean=half, std=half, resize="cover")
    return fresh.replace(**recipe.preprocess)


def _batch(recipe: Recipe, facts: DataFacts, defaults: list[ResolvedDefault]) -> int:
    power = 1 << max(5, min(9, round(math.log2(max(1, facts.images / 24)))))
    needed = 2 * recipe.data.repeats * recipe.gradient_accumulation
    batch = -(-power // needed) * needed
    if recipe.batch is None:
        defaults.append(ResolvedDefault("batch", batch, steps_said(facts.images, batch)))
    return batch


def steps_said(images: int, batch: int) -> str:
    """Say how many steps it takes to show every image."""
    steps = max(1, round(images / batch))
    return f"about {steps:,} {'step' if steps == 1 else 'steps'} for each time the {images:,} images are shown"


def _epochs(facts: DataFacts, pretrained: Bundle | None, defaults: list[ResolvedDefault]) -> float:
    if facts.device != "cpu":
        shown, most = (300_000, 50) if pretrained is not None else (6_000_000, 300)
    elif pretrained is not None:
        shown, most = 30_000, 50
    else:
        shown, most = (57_000, 150) if facts.side <= TINY_SIDE else (80_000, 225)
    epochs = float(max(10, min(most, round(shown / facts.images))))
    defaults.append(
        ResolvedDefault("epochs", epochs, f"about {round(int(epochs) * facts.images, -3):,} images shown in all")
    )
    return epochs


def _rate(
    recipe: Recipe, facts: DataFacts, model: ViTConfig, pretrained: Bundle | None, defaults: list[ResolvedDefault]
) -> float:
    kind = recipe.optimizer.kind
    if kind == "sgd":
        rate, why = 0.01, "usual for sgd"
    elif pretrained is None:
        gently = model.width > NARROW or _few_photos(facts)
        rate, why = (1e-3, "a fresh model") if gently else (2e-3, "a fresh narrow model")
        rate, why = rate * (MUON_FASTER if kind == "muon" else 1), f"for {kind} and {why}"
        why += f", taught by {facts.images:,} images" if _few_photos(facts) else ""
    else:
        small = model.width <= SMALL_WIDTH
        rate = 1e-3 if small else 1e-4
        why = f"for {kind} and a model that knows {'a little' if small else 'much'}, judged by its width {model.width}"
    defaults.append(ResolvedDefault("optimizer.lr", rate, why))
    return rate


def _criterion(recipe: Recipe, defaults: list[ResolvedDefault]) -> Criterion:
    found = recipe.settled_criterion()
    if recipe.criterion is None and found != "accuracy":
        defaults.append(
            ResolvedDefault("criterion", found, "classes are weighted, so the best checkpoint is best over classes")
        )
    return found


def _augmentation(facts: DataFacts, defaults: list[ResolvedDefault]) -> Augmentation:
    if facts.side <= TINY_SIDE:
        affine = Affine(translate=(0.09, 0.09), scale=(0.95, 1.05), shear=3.0)
        found = Augmentation(crop="none", flip=0.0, rotation=6.0, affine=affine)
        why = "tiny images: small turns and shifts; not mirrored, because they may be letters or digits"
    elif facts.side <= SMALL_SIDE and facts.grey:
        found = Augmentation(crop="padded", flip=0.0, erasing=0.25)
        why = "small grey images: shifted by a few pixels, a part erased; not mirrored, because they may be letters"
    elif facts.side <= SMALL_SIDE:
        found = Augmentation(crop="padded", randaugment=RandAugment(layers=2, magnitude=9))
        why = "small images: shifted by a few pixels, mirrored, changed by RandAugment"
    else:
        found = Augmentation(crop_area=(0.6, 1.0), randaugment=RandAugment(layers=2, magnitude=7))
        why = "photographs: cut out, mirrored, changed by RandAugment"
    defaults.append(ResolvedDefault("augmentation", "affine" if found.crop == "none" else found.crop, why))
    return found


def _mixing(facts: DataFacts, defaults: list[ResolvedDefault]) -> Mixing:
    if facts.side <= TINY_SIDE or facts.device == "cpu":
        defaults.append(
            ResolvedDefault("mixing", "off", "the model is small and the run short, so little is learned by heart")
        )
        return Mixing()
    defaults.append(ResolvedDefault("mixing", "mixup and CutMix", "keeps a model from learning by heart"))
    often = facts.side <= SMALL_SIDE and not facts.grey
    return Mixing(mixup=0.2, cutmix=1.0, chance=0.7 if often else 0.5)
