"""What the masked pretraining methods share: the choice of patches, the encoder's output, checks, reconstructions.

Axes: B batch, N patches, D width. The methods are deterministic functions of the images and of uniform noise, so that
the caller decides where randomness comes from.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from vitrail.errors import ConfigError, InputError
from vitrail.models.config import ViTConfig
from vitrail.models.position import TokenPositions
from vitrail.models.stems import Order, patchify, unpatchify
from vitrail.models.vit import ViT

PATCHWISE_STEMS = ("linear", "conv", "linear_norm")
"""Stems that embed every patch from its own pixels."""


class Reconstruction(NamedTuple):
    """Images and what a model predicts of their masked patches, normalised like the input."""

    images: Tensor
    """(B, C, H, W): the predicted patches, and the visible patches of the input."""
    masked: Tensor
    """(B, C, H, W): the input with its masked patches set to 0, the mean colour."""
    mask: Tensor
    """(B, N): True for masked patches."""


# ── the choice of patches ──


class Ranking(NamedTuple):
    """The patches of each image in the order of their noise."""

    order: Tensor
    """(B, N): the index of the patch at each rank."""
    rank: Tensor
    """(B, N): the rank of each patch."""


def rank_patches(noise: Tensor) -> Ranking:
    """Rank the patches of each image by noise (B, N), lowest first; of equal values, the first patch comes first."""
    order = noise.argsort(dim=1, stable=True)
    return Ranking(order, order.argsort(dim=1))


def check_noise(noise: Tensor, pixels: Tensor, config: ViTConfig, draws: int | None = None) -> None:
    """Raise unless the noise has a value for each patch of each image, or `draws` values."""
    shape = (len(pixels), config.patches) + (() if draws is None else (draws,))
    if tuple(noise.shape) != shape:
        raise InputError(
            f"expected noise of shape {shape} for {len(pixels)} images of {config.patches} patches, found "
            f"{tuple(noise.shape)}; draw it with torch.rand{shape}"
        )


# ── the encoder ──


def encode(encoder: ViT, tokens: Tensor, positions: TokenPositions) -> Tensor:
    """Run tokens through all blocks and the final norm, also if the config puts the norm after the pooling."""
    tokens = encoder.run_blocks(tokens, positions)
    return cast("Tensor", encoder.fc_norm(encoder.norm(tokens)))  # at most one of them is not the identity


def without_pooling(encoder: ViT) -> ViT:
    """Freeze what only pools tokens: masked patches do not train it, and several ranks would wait for its gradients."""
    for module in (encoder.attn_pool, encoder.pre_logits):
        if module is not None:
            module.requires_grad_(False)
    return encoder


def check_encoder(config: ViTConfig, method: str, masked: int) -> None:
    """Raise a `ConfigError` if no method can mask `masked` patches of images for this encoder."""
    if not config.depth:
        raise ConfigError(f"{method} needs encoder blocks, but depth is 0; use a ViT, or train this ResNet with labels")
    if config.stem not in PATCHWISE_STEMS:
        raise ConfigError(
            f"{method} hides patches, but the stem {config.stem!r} mixes the pixels of neighbouring patches; use stem "
            f"{' or '.join(map(repr, PATCHWISE_STEMS))}"
        )
    if config.patch_dropout:
        raise ConfigError(
            f"{method} masks patches itself, but patch_dropout is {config.patch_dropout}; set patch_dropout to 0"
        )
    if config.classes:
        raise ConfigError(
            f"{method} trains without labels, but the encoder has {config.classes} classes; set classes=0"
        )
    if not 0 < masked < config.patches:
        raise ConfigError(
            f"{method} needs a masked and a visible patch, but would mask {masked} of {config.patches}; change "
            f"mask_ratio, or use smaller patches"
        )


# ── reconstructions ──


def reconstruction(pixels: Tensor, predicted: Tensor, mask: Tensor, config: ViTConfig, order: Order) -> Reconstruction:
    """Combine images (B, C, H, W) and the predicted pixels of all patches (B, N, …), flattened in `order`."""
    patches, hidden = patchify(pixels, config.patch_size, order), mask[..., None]
    images, masked = (
        unpatchify(torch.where(hidden, filling, patches), config.grid, config.patch_size, config.channels, order)
        for filling in (predicted.to(patches.dtype), patches.new_zeros(()))
    )
    return Reconstruction(images, masked, mask)
