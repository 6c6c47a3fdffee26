"""Attention rollout (arXiv 2005.00928): how much each token contributes to another by the end of the encoder.

Each layer counts half attention and half identity (the residual connection), and the layers are multiplied.
"""

from typing import Literal, cast, get_args

import torch
from torch import Tensor

from vitrail.errors import ConfigError, suggest
from vitrail.explanations.attention import iter_attention
from vitrail.explanations.tokens import POOL, Query, default_query, patch_grid, read_query, spread
from vitrail.models.vit import ViT

Fuse = Literal["mean", "max", "min"]


def rollout(model: ViT, pixels: Tensor, *, fuse: Fuse = "mean", discard: float = 0.0) -> Tensor:
    """Return (B, T, T): row i is the contribution of every token to token i at the end, and sums to 1.

    `fuse` combines the heads; `discard` is the fraction of each layer's smallest weights to drop as noise.
    """
    return _roll(model, pixels, fuse, discard)[0]


@torch.no_grad()
def rollout_maps(
    model: ViT, pixels: Tensor, query: Query | None = None, *, fuse: Fuse = "mean", discard: float = 0.0
) -> Tensor:
    """Return the contribution of every patch to the query token, (B, rows, columns); by default to what the head reads.

    The pool `map` counts as one more layer, without a residual.
    """
    config = model.config
    chosen = query if query is not None else default_query(config)
    row = None if chosen == POOL and config.pool == "map" else read_query(chosen, config).to(pixels.device)
    rolled, tokens = _roll(model, pixels, fuse, discard)
    pooling = model.classify(tokens)[1] if row is None else None
    if pooling is not None:
        weights = discard_smallest(fuse_heads(pooling[:, :, None], fuse), discard)[:, 0]
        row = spread(weights / weights.sum(dim=-1, keepdim=True), config)
    rows = cast("Tensor", row).expand(len(rolled), -1)
    return patch_grid((rows[:, None] @ rolled)[:, 0], config)


def _roll(model: ViT, pixels: Tensor, fuse: Fuse, discard: float) -> tuple[Tensor, Tensor]:
    """Multiply the layers; return the matrix and the output tokens of the last layer."""
    check_settings(fuse, discard)
    config = model.config
    rolled = torch.eye(config.tokens, device=pixels.device).expand(len(pixels), -1, -1)
    tokens = pixels
    for tokens, weights in iter_attention(model, pixels):  # noqa: B007 - the last tokens are returned
        rolled = with_residual(discard_smallest(fuse_heads(weights, fuse), discard)) @ rolled
        del weights  # free the memory for the next layer's
    return rolled, tokens


def fuse_heads(weights: Tensor, fuse: Fuse) -> Tensor:
    """Combine the heads of (B, heads, Q, T) into (B, Q, T)."""
    match fuse:
        case "mean":
            return weights.mean(dim=1)
        case "max":
            return weights.amax(dim=1)
        case "min":
            return weights.amin(dim=1)
    raise _unknown(fuse)


def discard_smallest(matrix: Tensor, fraction: float) -> Tensor:
    """Set the smallest `fraction` of each image's (B, Q, T) weights to 0."""
    count = int(fraction * matrix[0].numel())
    if not count:
        return matrix
    flat = matrix.flatten(1)
    smallest = flat.argsort(dim=1, stable=True)[:, :count]
    return flat.scatter(1, smallest, 0).view_as(matrix)


def with_residual(matrix: Tensor) -> Tensor:
    """Average with the identity, and renormalise the rows, which fusing and discarding may have changed."""
    mixed = 0.5 * matrix + 0.5 * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return mixed / mixed.sum(dim=-1, keepdim=True)


def check_settings(fuse: str, discard: float) -> None:
    """Raise for invalid options."""
    if fuse not in get_args(Fuse):
        raise _unknown(fuse)
    if not isinstance(discard, int | float) or not 0 <= discard < 1:
        raise ConfigError(f"discard is {discard!r}; it is the fraction of weights to drop, at least 0 and below 1")


def _unknown(fuse: str) -> ConfigError:
    return ConfigError(f"unknown fuse {fuse!r}{suggest(fuse, get_args(Fuse)) or '; choose mean, max or min'}")
