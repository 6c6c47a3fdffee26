"""Initialise fine-tuning: adapt a pretrained model to the data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from vitrail.checkpoints.adapt import adapt
from vitrail.checkpoints.bundle import CLASSIFICATION, METRICS, Bundle
from vitrail.checkpoints.keys import Weights
from vitrail.checkpoints.load import open_checkpoint
from vitrail.checkpoints.tensors import loaded_model
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.position import Method
from vitrail.models.vit import ViT
from vitrail.schema import Frozen

ADAPTED = ("image_size", "patch_size", "channels", "classes", "representation")
"""Model fields whose change also changes weights; `adapt` handles them."""


class FinetuneInit(Frozen):
    """How to adapt a pretrained model to the data. A recipe with this table requires a pretrained model."""

    head: Literal["keep", "fresh", "zero"] = "keep"
    """`keep` replaces the head only if the classes differ; `fresh` always, initialised as `model.init` says; `zero`
    always uses a single linear layer of zeros, as in the paper, and drops a hidden layer before it."""
    positions: Method = "timm"
    """How position embeddings are resampled if the patch grid differs."""


def opened_pretrained(
    pretrained: str | Path | Bundle | None, overrides: Mapping[str, Any] | None, keys: str | Path | None
) -> Bundle | None:
    """Open the pretrained model; `overrides` and `keys` supply what its file does not say.

    Assumptions made while opening it are printed when the run starts.
    """
    if isinstance(pretrained, str | Path):
        return open_checkpoint(pretrained, overrides=overrides, keys=keys)
    if overrides or keys is not None:
        raise ConfigError("--override and --keys describe the checkpoint of --from; add --from")
    if pretrained is not None and not isinstance(pretrained, Bundle):
        raise ConfigError(
            f"pretrained is {pretrained!r}; use a bundle, a path or a name, such as pretrained='timm:name.tag'"
        )
    return pretrained


def for_task(pretrained: Bundle, how: FinetuneInit | None, task: str) -> FinetuneInit:
    """Return how to adapt a pretrained model to a task: the head of another task cannot be kept."""
    how = how or FinetuneInit()
    if how.head != "keep" or task == pretrained.task or not pretrained.model.config.classes:
        return how
    if "head" in how.model_fields_set:
        raise ConfigError(
            f"pretrained.head is 'keep', but the model's task is {pretrained.task} and the recipe's is {task}; use "
            "'fresh' or 'zero'"
        )
    return how.replace(head="fresh")


def keeps_head(pretrained: Bundle, how: FinetuneInit, config: ViTConfig, names: tuple[str, ...] | None) -> bool:
    """Whether fine-tuning starts with the head of the pretrained model, whose task is the same."""
    own = pretrained.model.config
    same = config.classes == own.classes and names in (None, pretrained.classes)
    return how.head == "keep" and same and _reads_alike(own, config)


def _reads_alike(config: ViTConfig, planned: ViTConfig) -> bool:
    """Whether the heads of both models read the same: a vector per image, or the same layers of every patch."""
    if "patches" not in (config.pool, planned.pool):
        return True
    return config.pool == planned.pool and config.layers_read == planned.layers_read


def planned_config(pretrained: Bundle, how: FinetuneInit, fields: dict[str, Any], classes: int) -> ViTConfig:
    """Return the config of the adapted model: its own, with the recipe's fields and the number of classes.

    Fields that would need other weights raise an error here, from shapes alone.
    """
    without_hidden = {"representation": None} if how.head == "zero" else {}
    config = pretrained.model.config.replace(**{**fields, **without_hidden, "classes": classes})
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in pretrained.model.state_dict().items()}
    _with_fields(pretrained.model.config, config, shapes)
    return config


def adapted(
    pretrained: Bundle, how: FinetuneInit, config: ViTConfig, task: str, names: tuple[str, ...] | None
) -> Bundle:
    """Return a float32 copy of a pretrained model, adapted to the planned config; `names` are those of its outputs."""
    weights = {name: tensor.detach().clone() for name, tensor in pretrained.model.state_dict().items()}
    weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    # Its metrics are those of the original model on other data.
    provenance = {key: value for key, value in pretrained.provenance.items() if key != METRICS}
    model = _with_fields(pretrained.model.config, config, weights)
    classes = pretrained.classes if model.config.classes else None
    bundle = Bundle(model, pretrained.preprocess, classes, provenance, task=pretrained.task)
    adapt(
        bundle,
        image_size=config.image_size,
        patch_size=config.patch_size,
        channels=config.channels,
        position_method=how.positions,
    )
    if how.head == "keep" and task == pretrained.task == CLASSIFICATION:
        return adapt(bundle, classes=config.classes if names is None else names)
    if task == pretrained.task and keeps_head(pretrained, how, config, names):
        return bundle
    bundle.task = task
    _renew_head(bundle, how, config.classes, names)
    return bundle


def _with_fields(config: ViTConfig, planned: ViTConfig, weights: Weights) -> ViT:
    """Rebuild a model with fields that need no other weights: dropout, stochastic depth, head initialisation."""
    changed = {name: value for name, value in planned if name not in ADAPTED and value != getattr(config, name)}
    if not _reads_alike(config, planned):
        # The head is renewed in any case, and a pool with weights of its own is not used any more.
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(("head.", "attn_pool."))}
        changed["classes"] = 0
    try:
        return loaded_model(config.replace(**changed), weights)[0]
    except CheckpointError as error:
        names = ", ".join(f"model.{name}" for name in changed)
        raise ConfigError(f"{names} cannot be changed in a pretrained model: {error}") from None


@torch.no_grad()
def _renew_head(bundle: Bundle, how: FinetuneInit, outputs: int, names: tuple[str, ...] | None) -> None:
    model, bundle.classes = bundle.model, names
    if how.head == "zero":
        model.reconfigure(model.config.replace(representation=None))
        model.pre_logits = nn.Identity()
    model.reset_head(outputs)
    if how.head == "zero":
        for name, parameter in model.named_parameters():
            if name.startswith("head"):
                parameter.zero_()
    done = f"{'zero' if how.head == 'zero' else 'fresh'} head for {outputs} {'outputs' if names is None else 'classes'}"
    bundle.provenance["adapted"] = [*bundle.provenance.get("adapted", []), done]
