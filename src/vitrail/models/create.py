"""Models by name: create one, describe one, list all."""

from typing import NamedTuple, Never

import torch

from vitrail.errors import ConfigError, unknown_argument
from vitrail.models.config import FIELD_ALIASES, ViTConfig, value_here
from vitrail.models.stages import Cost, Stage, cost, sample_image, stages
from vitrail.models.variants import VARIANTS, variant_config
from vitrail.models.vit import ViT
from vitrail.runtime import OnProgress, on_stage

LARGE = 150_000_000
"""Above this many parameters, `describe` only infers shapes (meta device): initialising the weights would be slow."""


def create(
    name: str | ViTConfig,
    *,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    **unknown: Never,
) -> ViT:
    """Build a new model with random weights, from a name or a `ViTConfig`.

    `name` is a paper's name ("B/16") or timm's ("vit_small_patch16_224"); `vitrail models` lists them. The other
    arguments change the most common fields of the config. To change another field, pass a config:
    `create(variant_config("B/16").replace(pool="mean"))`. To open a pretrained model, use `load`.
    """
    for argument in unknown:
        raise _unknown_of_model(argument, unknown[argument])
    changes = {"classes": classes, "image_size": image_size, "patch_size": patch_size, "channels": channels}
    return ViT(_config(name).replace(**{field: value for field, value in changes.items() if value is not None}))


class ModelInfo(NamedTuple):
    """A named model."""

    name: str
    """The name in timm, such as "vit_base_patch16_224"."""
    paper: str
    """The name in the paper, such as "B/16"."""
    config: ViTConfig
    cost: Cost


def list_models(*, on_progress: OnProgress | None = None) -> list[ModelInfo]:
    """Return the named models with their configs, parameters and FLOPs, for 1,000 classes and the image size of the
    name."""
    listed, report = [], on_stage(on_progress, "counting")
    for number, variant in enumerate(VARIANTS):
        if report is not None:
            report(number, len(VARIANTS))
        config = variant_config(variant.paper)
        listed.append(ModelInfo(f"{variant.name}_{variant.image_size}", variant.paper, config, cost(config)))
    return listed


class Description(NamedTuple):
    """The config of a model, its cost, and the shape of each intermediate tensor."""

    config: ViTConfig
    cost: Cost
    stages: list[Stage]
    computed: bool
    """Whether the model ran on an image. For large models, only the shapes are inferred."""


def describe(name: str | ViTConfig) -> Description:
    """Return the parameters, FLOPs and intermediate shapes of a model, by running a new one on a synthetic image."""
    config = _config(name)
    spent = cost(config)
    computed = spent.parameters <= LARGE
    with torch.device("cpu" if computed else "meta"), torch.random.fork_rng(devices=[]):
        model, image = ViT(config).eval(), sample_image(config.channels, config.image_size)
    if not computed:
        model = model.to("meta")
    return Description(config, spent, stages(model, image), computed)


def _unknown_of_model(argument: str, value: object) -> ConfigError:
    """Map another library's argument to ours, or show how to change the config field."""
    ours = FIELD_ALIASES.get(argument, argument)
    hint = ""
    if ours in ("classes", "image_size", "patch_size", "channels"):
        hint = f"vitrail calls it {ours}: {ours}={value!r}"
    elif ours in ViTConfig.model_fields:
        hint = f"change it in the config: create(variant_config(…).replace({ours}={value_here(argument, value)}))"
    elif argument in ("pretrained", "checkpoint_path"):
        hint = "create builds a new model; vitrail.load opens a pretrained one, such as load('timm:name.tag')"
    return unknown_argument(create, argument, hint)


def _config(name: str | ViTConfig) -> ViTConfig:
    if isinstance(name, ViTConfig):
        return name
    if isinstance(name, str):
        return variant_config(name)
    raise ConfigError(f"expected a model name such as 'B/16', or a ViTConfig, found {name!r}")
