"""Resolve what a DINO recipe leaves unset: the model's features, views, head, temperature and momentum."""

import math
from collections.abc import Set
from typing import Any

from vitrail.data.augmentation.augment import Augmentation
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.training.plan import SMALL_SIDE, TINY_SIDE, DataFacts, ResolvedDefault
from vitrail.training.pretraining.dino import DinoSettings, centre_momentum_for, check_dino, momentum_for
from vitrail.training.recipe import DataSettings, Recipe

DINO_LR = 5e-4
"""The paper's learning rate, for a batch of 256; it grows in proportion to the batch."""
LEAST_DINO_LR = 5e-4
"""For small batches. Higher ones made the features of the digits worse (benchmarks/LOG.md)."""
MODEL = {"class_token": "first", "pool": "cls", "final_norm": "before_pool", "init": "paper"}
"""The paper's features, and an initialisation whose features already differ between images."""
NO_AUGMENTATION = Augmentation(crop="none", flip=0.0)
"""Of whole images; DINO makes its own views of them."""


def check_dino_recipe(recipe: Recipe) -> None:
    """Raise for settings that do not go with DINO."""
    if recipe.augmentation not in (None, NO_AUGMENTATION):
        raise ConfigError("DINO makes its own views; leave out augmentation, and use dino.global_area, dino.local_area")
    if recipe.averaging.on:
        raise ConfigError(
            f"averaging.kind is {recipe.averaging.kind!r}, but DINO keeps its teacher, which is an average already; "
            f"leave out averaging"
        )


def dino_data(data: DataSettings, facts: DataFacts, defaults: list[ResolvedDefault]) -> DataSettings:
    """Return where small images are kept: on the device, which makes the views of a whole batch at once."""
    if "on_device" in data.model_fields_set or facts.side > SMALL_SIDE:
        return data
    defaults.append(ResolvedDefault("data.on_device", True, "small images: views are made for whole batches"))
    return data.replace(on_device=True)


def dino_settings(
    settings: DinoSettings, facts: DataFacts, model: ViTConfig, defaults: list[ResolvedDefault]
) -> DinoSettings:
    """Return the settings with views, head and temperature for these images, unless the recipe sets them."""
    chosen: dict[str, tuple[Any, str]] = {}
    tiny = facts.side <= TINY_SIDE
    if tiny or facts.grey:
        chosen["flip"] = 0.0, "they may be letters"
    if tiny:
        chosen["colours"] = "jitter", "blur leaves too little of tiny images"
        chosen["local_crops"] = 0, "small crops of tiny images show too little"
        chosen["global_area"] = (0.7, 1.0), "smaller crops of tiny images have little in common"
        sharp = "views of tiny images agree less, and softer targets become uniform"
        chosen["teacher_temperature"] = 0.03, sharp
        chosen["warmup_teacher_temperature"] = 0.03, "same reason"
    prototypes = 1 << max(6, min(12, math.ceil(math.log2(max(1, facts.images / 2)))))
    chosen["prototypes"] = prototypes, f"for {facts.images:,} images; the paper's 65536 are for a million"
    if model.width < 192:
        chosen["hidden"] = 4 * model.width, f"4 × the model's width {model.width}"
        chosen["bottleneck"] = model.width, "the model's width"
    resolved = _with(settings, settings.model_fields_set, chosen, defaults)
    check_dino(model, resolved)
    return resolved


def dino_momenta(settings: DinoSettings, given: Set[str], steps: int, defaults: list[ResolvedDefault]) -> DinoSettings:
    """Return the settings with momenta for a run of `steps`, unless they are among the `given` fields of the recipe."""
    momentum = settings.momentum if "momentum" in given else momentum_for(steps)
    why = (
        f"the teacher averages over {1 / (1 - momentum):,.0f} steps; the run has {steps:,}"
        if momentum < 1
        else "as set"
    )
    chosen = {
        "momentum": (momentum, why),
        "centre_momentum": (centre_momentum_for(momentum), "it has to be much faster than the teacher"),
    }
    return _with(settings, given, chosen, defaults)


def _with(
    settings: DinoSettings, given: Set[str], chosen: dict[str, tuple[Any, str]], defaults: list[ResolvedDefault]
) -> DinoSettings:
    """Return the settings with what was chosen, except the `given` fields; `replace` marks every field as set."""
    free = {name: pair for name, pair in chosen.items() if name not in given}
    defaults += [ResolvedDefault(f"dino.{name}", value, why) for name, (value, why) in free.items()]
    return settings.replace(**{name: value for name, (value, _) in free.items()})
