"""Resolve what a pretraining recipe leaves unset from the images and the device, each with a reason."""

import math
from typing import Any

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.augmentation.on_device import check_on_device
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.variants import variant_config
from vitrail.tasks.objective import Objective
from vitrail.training.optimizers import learning_rate
from vitrail.training.plan import (
    SMALL_SIDE,
    TINY_SIDE,
    DataFacts,
    ResolvedDefault,
    TrainingPlan,
    compiles,
    steps_of,
    steps_per_epoch_text,
    written_model,
)
from vitrail.training.pretraining.dino_defaults import (
    DINO_LR,
    LEAST_DINO_LR,
    MODEL,
    NO_AUGMENTATION,
    check_dino_recipe,
    dino_data,
    dino_momenta,
    dino_settings,
)
from vitrail.training.pretraining.distill import check_distill
from vitrail.training.pretraining.mae import MaeSettings, check_mae
from vitrail.training.pretraining.masked_patches import check_masked_patches
from vitrail.training.recipe import Recipe
from vitrail.training.small_models import heads_for, image_size_for, patch_of, width_of
from vitrail.training.teacher import Teacher

BASE_BATCH, BASE_LR = 256, 1.5e-4
"""The paper's learning rate, for this batch size; it grows in proportion to the batch."""
LEAST_LR = 5e-4
"""Small batches take many steps, and small models tolerate larger ones."""


def resolve_pretraining(
    recipe: Recipe, facts: DataFacts, pretrained: Bundle | None, teacher: Teacher | None = None
) -> TrainingPlan:
    """Resolve every field that a pretraining recipe leaves unset."""
    if pretrained is not None:
        raise ConfigError("pretraining starts from random weights; leave out --from")
    _check_recipe(recipe)
    defaults: list[ResolvedDefault] = []
    model = _model(recipe, facts, defaults)
    if not model.has_pool:  # found by the first validation, which may be hours later
        raise ConfigError(
            f"pretraining measures one vector per image, but model.pool is {model.pool!r}; use model.pool=mean, cls or "
            f"map"
        )
    half = (0.5,) * model.channels
    preprocess = Preprocess(size=model.image_size, channels=model.channels, mean=half, std=half, resize="cover")
    preprocess = preprocess.replace(**recipe.preprocess)
    if recipe.masked_patches is not None:
        check_masked_patches(model, recipe.masked_patches, preprocess.mean, preprocess.std)
    if recipe.distill is not None and teacher is not None:
        check_distill(model, recipe.distill, teacher)
    mae = None if recipe.mae is None else _with_decoder(recipe.mae, model, defaults)
    dino = None if recipe.dino is None else dino_settings(recipe.dino, facts, model, defaults)
    batch = recipe.batch if isinstance(recipe.batch, int) else _batch(recipe, facts, defaults)
    epochs = recipe.epochs
    if epochs is None and recipe.steps is None:
        epochs = _epochs(facts, defaults)
    lr = recipe.optimizer.lr
    if lr is None:
        base, least = (BASE_LR, LEAST_LR) if dino is None else (DINO_LR, LEAST_DINO_LR)
        lr = max(least, base * batch / BASE_BATCH)
        paper = "the paper's" if recipe.mae is not None or dino is not None else "that of masked autoencoders"
        why = f"{paper}, scaled to a batch of {batch}" if lr > least else "usual for small batches"
        defaults.append(ResolvedDefault("optimizer.lr", lr, why))
    augmentation = recipe.augmentation or (_augmentation(facts, recipe, defaults) if dino is None else NO_AUGMENTATION)
    data = recipe.data if dino is None else dino_data(recipe.data, facts, defaults)
    if recipe.data.on_device:
        check_on_device(augmentation)
    resolved = recipe.replace(
        model=written_model(model),
        batch="auto" if recipe.batch == "auto" else batch,
        epochs=epochs,
        compile=compiles(recipe, facts, defaults),
        optimizer=recipe.optimizer.replace(lr=lr),
        augmentation=augmentation,
        mixing=Mixing(),
        criterion="loss",
        mae=mae,
        data=data,
    )
    steps = steps_of(resolved, facts.images, batch)
    if dino is not None and recipe.dino is not None:
        resolved = resolved.replace(dino=dino_momenta(dino, recipe.dino.model_fields_set, steps, defaults))
    learning_rate(resolved.schedule, 0, steps, lr)  # raises if the schedule does not fit, before anything is written
    return TrainingPlan(
        resolved, model, preprocess, facts.classes, batch, steps, lr, augmentation, Mixing(), defaults, teacher
    )  # fmt: skip


def _check_recipe(recipe: Recipe) -> None:
    """Raise for settings that would have no effect, or that need labels."""
    if recipe.mixing is not None and recipe.mixing.on:
        raise ConfigError("pretraining does not mix images; leave out mixing")
    if recipe.data.subset is not None:
        raise ConfigError(f"pretraining uses all images of the training split; leave out {recipe.data.subset}")
    about_labels = {
        "task": recipe.task is not None,
        "data.balance": recipe.data.balance,
        "objective": recipe.objective != Objective(),
    }
    for name, used in about_labels.items():
        if used:
            raise ConfigError(f"pretraining learns without labels, which {name} is about; leave it out")
    if recipe.criterion not in (None, "loss"):
        raise ConfigError(f"criterion is {recipe.criterion!r}, but pretraining keeps the last checkpoint; leave it out")
    if recipe.dino is not None:
        check_dino_recipe(recipe)


def _model(recipe: Recipe, facts: DataFacts, defaults: list[ResolvedDefault]) -> ViTConfig:
    fields = dict(recipe.model)
    if fields.pop("classes", 0):
        raise ConfigError("pretraining learns without classes; leave out model.classes")
    if fields.pop("paper", False):
        raise ConfigError("model.paper is for training with labels; use model.name to select one of its models")
    name = fields.pop("name", None)
    position = {"position": "sincos_2d"} if recipe.mae is not None and "position" not in fields else {}
    if position:
        why = "the paper's; learned from a quarter of the patches, they would be noisy"
        defaults.append(ResolvedDefault("model.position", position["position"], why))
    if name is not None:
        return variant_config(name).replace(**{**position, **fields, "classes": 0})
    small = _small_model(facts, fields, defaults)
    if recipe.dino is not None:
        small |= MODEL
    return ViTConfig.model_validate({**small, **position, **fields, "classes": 0})


def _small_model(facts: DataFacts, fields: dict[str, Any], defaults: list[ResolvedDefault]) -> dict[str, Any]:
    """Return a model that pretrains quickly; `fields` are those already set."""
    tiny, small, on_cpu = facts.side <= TINY_SIDE, facts.side <= SMALL_SIDE, facts.device == "cpu"
    patch = patch_of(fields, 2 if tiny else 4 if small else 8)
    size = image_size_for(patch, facts.side, 64 if on_cpu else 96)
    width, depth = (64, 4) if tiny else (96, 4) if on_cpu else (384, 8)
    model: dict[str, Any] = {
        "image_size": size,
        "patch_size": patch,
        "stem": "conv",
        "width": width,
        "depth": depth,
        "heads": heads_for(width_of(fields, width), 32 if on_cpu else 64),
        "channels": 1 if facts.grey else 3,
        "class_token": "none",
        "pool": "mean",
        "final_norm": "after_pool",
        "position": "learned_1d",
        "init": "timm",
    }
    reasons = {
        "image_size": f"the shorter sides are about {facts.side} pixels",
        "patch_size": f"gives {math.prod(s // p for s, p in zip(size, patch, strict=True))} patches",
        "width": "small enough for a CPU" if on_cpu else "a common small size",
        "depth": "same reason as width",
        "channels": "the images are greyscale" if facts.grey else "the images are in colour",
    }
    defaults += [
        ResolvedDefault(f"model.{name}", model[name], why) for name, why in reasons.items() if name not in fields
    ]
    return model


def _with_decoder(settings: MaeSettings, model: ViTConfig, defaults: list[ResolvedDefault]) -> MaeSettings:
    """Return the settings with a decoder that suits the encoder, unless the recipe names one."""
    if not settings.model_fields_set & {"decoder_width", "decoder_depth", "decoder_heads"} and model.width < 512:
        heads = max(1, model.width // 64)
        width = heads * 32
        settings = settings.replace(decoder_width=width, decoder_depth=2, decoder_heads=heads)
        why = f"at most half of the encoder's {model.width}, in heads of 32" if model.width >= 64 else "one head of 32"
        defaults.append(ResolvedDefault("mae.decoder_width", width, why))
        defaults.append(ResolvedDefault("mae.decoder_depth", 2, "enough for a small encoder"))
    check_mae(model, settings)
    return settings


def _batch(recipe: Recipe, facts: DataFacts, defaults: list[ResolvedDefault]) -> int:
    most = 8 if facts.device == "cpu" else 10
    power = 1 << max(5, min(most, round(math.log2(max(1, facts.images / 24)))))
    batch = -(-power // recipe.gradient_accumulation) * recipe.gradient_accumulation
    if recipe.batch is None:
        defaults.append(ResolvedDefault("batch", batch, steps_per_epoch_text(facts.images, batch)))
    return batch


def _epochs(facts: DataFacts, defaults: list[ResolvedDefault]) -> float:
    samples, most = (100_000, 200) if facts.device == "cpu" else (20_000_000, 800)
    epochs = float(max(10, min(most, round(samples / facts.images))))
    seen = round(int(epochs) * facts.images, -3)
    defaults.append(ResolvedDefault("epochs", epochs, f"about {seen:,} training samples in total"))
    return epochs


def _augmentation(facts: DataFacts, recipe: Recipe, defaults: list[ResolvedDefault]) -> Augmentation:
    tiny = facts.side <= TINY_SIDE
    flip = 0.0 if tiny or facts.grey else 0.5
    area = (0.5, 1.0) if tiny else (0.2, 1.0)
    flips = "no flips, because they may be letters" if not flip else "flips"
    masking = "" if recipe.distill is not None else "; masking is the main augmentation"
    why = f"random resized crops, {flips}{masking}"
    defaults.append(ResolvedDefault("augmentation", "crops", why))
    return Augmentation(crop_area=area, flip=flip)
