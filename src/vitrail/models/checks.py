"""Input checks with one-sentence errors: what was found and what to do."""

import operator
from collections.abc import Iterable
from typing import SupportsIndex

import torch
from torch import Tensor

from vitrail.errors import InputError
from vitrail.models.config import ViTConfig


def check_images(x: Tensor, config: ViTConfig, weight: Tensor) -> None:
    """Raise unless `x` is a valid batch of images for the config; `weight` gives the model's device and dtype."""
    if not isinstance(x, Tensor):
        raise InputError(f"expected a tensor of images, found {type(x).__name__}; preprocess the image first")
    if x.ndim != 4:
        hint = "; add a batch axis with x[None]" if x.ndim == 3 else ""
        raise InputError(
            f"expected images (batch, channels, height, width), found {x.ndim} axes, {tuple(x.shape)}{hint}"
        )
    if 0 in x.shape[1:]:
        raise InputError(f"expected images with pixels, found a tensor of shape {tuple(x.shape)}")
    if x.shape[1] != config.channels:
        if x.shape[3] == config.channels:
            remedy = "the channels seem to be last, so use x.permute(0, 3, 1, 2)"
        else:
            remedy = f"convert the image, or build the model with channels={x.shape[1]}"
        raise InputError(f"this model takes images of {config.channels} channels, found {x.shape[1]}; {remedy}")
    if tuple(x.shape[2:]) != config.image_size:
        actual, expected = (f"{h}×{w}" for h, w in (x.shape[2:], config.image_size))
        raise InputError(
            f"this model takes images of {expected} pixels, found {actual}; resize the images, "
            f"or call model.resize(({x.shape[2]}, {x.shape[3]}))"
        )
    if not x.is_floating_point():
        raise InputError(f"expected normalised floating-point images, found {x.dtype}; preprocess the image first")
    if x.device != weight.device:
        raise InputError(f"the model is on {weight.device}, the images on {x.device}; move one with .to(...)")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise InputError(
            f"the model computes in {weight.dtype}, the images are {x.dtype}; use x.to({weight.dtype}), or autocast"
        )


def per_token(config: ViTConfig) -> str:
    """Return why a model with logits per token or patch cannot classify images; "" if it can."""
    if config.has_pool or not config.classes:
        return ""
    what = f"{config.tokens:,} tokens" if config.pool == "none" else f"{config.patches:,} patches"
    gives = f"this model gives logits for each of its {what} (pool = '{config.pool}'), not for the image"
    if config.head_layers:
        return f"{gives}; use a model whose head reads one vector per image"
    pool = "mean" if config.class_token == "none" else "cls"
    return (
        f"{gives}; pool={pool} works: --set model.pool={pool} in training, --override pool={pool} for a weight file, "
        f"'pool': '{pool}' in the config.json of a bundle"
    )


def read_layers(layers: Iterable[int], depth: int) -> dict[int, int]:
    """Map each requested layer, which may be negative, to its index."""
    if not isinstance(layers, Iterable) or isinstance(layers, str):
        raise InputError(f"expected layer indices, such as (0, -1), found {layers!r}")
    if isinstance(layers, Tensor):
        layers = layers.tolist()
    return {layer: read_layer(layer, depth) for layer in layers}


def read_layer(layer: int, depth: int) -> int:
    """Resolve a layer index, which may be negative."""
    return read_number(layer, depth, "layer")


def read_number(value: int, count: int, what: str) -> int:
    """Resolve an index below `count`, which may be negative."""
    if not count:
        raise InputError(f"this model has no {what}s; it is a ResNet without encoder blocks (depth = 0)")
    number = as_int(value)
    if number is None:
        raise InputError(f"expected an integer {what}, found {value!r}; this model has {what}s 0 to {count - 1}")
    if not -count <= number < count:
        raise InputError(
            f"{what} {number} does not exist: this model has {what}s 0 to {count - 1} (or -1 for the last)"
        )
    return number % count


def as_int(value: object) -> int | None:
    """Convert an integer, also one of NumPy or torch, to int; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # not an integer tensor
        return None
