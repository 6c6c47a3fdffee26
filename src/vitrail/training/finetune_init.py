"""Where training begins with a model that exists: how it is fitted to the data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from vitrail.checkpoints.adapt import adapt
from vitrail.checkpoints.bundle import METRICS, Bundle
from vitrail.checkpoints.keys import Weights
from vitrail.checkpoints.load import open_checkpoint
from vitrail.checkpoints.strict import loaded_model
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.resample import Method
from vitrail.models.vit import ViT
from vitrail.schema import Frozen

FITTED = ("image_size", "patch_size", "channels", "classes", "representation")
"""Fields of a model that change with its weights; the others are taken as they are."""


class FinetuneInit(Frozen):
    """How a model that exists is fitted to the data. A recipe that has this needs such a model."""

    head: Literal["keep", "fresh", "zero"] = "keep"
    """`keep` makes a new head only where the classes are others, `fresh` always, drawn as `model.init` says; `zero` is
    always a single linear layer of zeros, as the paper fine-tunes: a hidden layer before it is dropped."""
    positions: Method = "timm"
    """Whose way of resampling positions is followed where the grid of patches is another."""


def opened_pretrained(
    pretrained: str | Path | Bundle | None, overrides: Mapping[str, Any] | None, keys: str | Path | None
) -> Bundle | None:
    """Open the model that training starts from; `overrides` and `keys` say what its file does not tell.

    What was assumed of it is said when the run begins, if nothing is refused before.
    """
    if isinstance(pretrained, str | Path):
        return open_checkpoint(pretrained, overrides=overrides, keys=keys)
    if overrides or keys is not None:
        raise ConfigError("--override and --keys say what the file of --from does not tell; name one with --from")
    return pretrained


def planned_model(pretrained: Bundle, how: FinetuneInit, fields: dict[str, Any], classes: int) -> ViTConfig:
    """Return what a model becomes: its own config, changed by the fields of a recipe, with a head for the data.

    Fields that would need other weights are refused here already, by their shapes.
    """
    without_hidden = {"representation": None} if how.head == "zero" else {}
    config = pretrained.model.config.replace(**{**fields, **without_hidden, "classes": classes})
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in pretrained.model.state_dict().items()}
    _with_fields(pretrained.model.config, config, shapes)
    return config


def fitted(pretrained: Bundle, how: FinetuneInit, config: ViTConfig, classes: tuple[str, ...]) -> Bundle:
    """Return a copy of a model that exists, made into what was planned, in float32."""
    weights = {name: tensor.detach().clone() for name, tensor in pretrained.model.state_dict().items()}
    weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    # The metrics are those of the model that it was, on other data.
    provenance = {key: value for key, value in pretrained.provenance.items() if key != METRICS}
    model = _with_fields(pretrained.model.config, config, weights)
    bundle = Bundle(model, pretrained.preprocess, pretrained.classes, provenance)
    adapt(
        bundle,
        image_size=config.image_size,
        patch_size=config.patch_size,
        channels=config.channels,
        position_method=how.positions,
    )
    if how.head == "keep":
        return adapt(bundle, classes=classes)
    _renew_head(bundle, how, classes)
    return bundle


def _with_fields(config: ViTConfig, planned: ViTConfig, weights: Weights) -> ViT:
    """Build a model again, changing what needs no other weights: dropout, stochastic depth, how a new head is drawn."""
    wanted = {name: value for name, value in planned if name not in FITTED and value != getattr(config, name)}
    try:
        return loaded_model(config.replace(**wanted), weights)[0]
    except CheckpointError as error:
        names = ", ".join(f"model.{name}" for name in wanted)
        raise ConfigError(f"{names} cannot be changed in a model that training starts from: {error}") from None


@torch.no_grad()
def _renew_head(bundle: Bundle, how: FinetuneInit, classes: tuple[str, ...]) -> None:
    model, bundle.classes = bundle.model, classes
    if how.head == "zero":
        model.reconfigure(model.config.replace(representation=None))
        model.pre_logits = nn.Identity()
    model.reset_head(len(classes))
    if how.head == "zero":
        for name, parameter in model.named_parameters():
            if name.startswith("head"):
                parameter.zero_()
    done = f"{'zero' if how.head == 'zero' else 'fresh'} head for {len(classes)} classes"
    bundle.provenance["adapted"] = [*bundle.provenance.get("adapted", []), done]
