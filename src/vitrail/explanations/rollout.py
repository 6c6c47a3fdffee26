"""Attention rollout (arXiv 2005.00928): how far each token has mixed into another by the end of the encoder.

Every layer's attention is taken half, the other half stays where it is (the residual), and the layers are multiplied.
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
    """Return (B, T, T): row i says what token i is made of at the end, and sums to 1.

    `fuse` says how heads become one; `discard` is the share of a layer's smallest weights that is taken for noise.
    """
    return _roll(model, pixels, fuse, discard)[0]


@torch.no_grad()
def rollout_maps(
    model: ViT, pixels: Tensor, query: Query | None = None, *, fuse: Fuse = "mean", discard: float = 0.0
) -> Tensor:
    """Return what the token asked about is made of, (B, rows, columns); without `query`, what the head reads.

    The pool `map` is one layer more, without a residual.
    """
    config = model.config
    asked = query if query is not None else default_query(config)
    row = None if asked == POOL and config.pool == "map" else read_query(asked, config).to(pixels.device)
    product, tokens = _roll(model, pixels, fuse, discard)
    pooling = model.classify(tokens)[1] if row is None else None
    if pooling is not None:
        looks = discard_smallest(fuse_heads(pooling[:, :, None], fuse), discard)[:, 0]
        row = spread(looks / looks.sum(dim=-1, keepdim=True), config)
    rows = cast("Tensor", row).expand(len(product), -1)
    return patch_grid((rows[:, None] @ product)[:, 0], config)


def _roll(model: ViT, pixels: Tensor, fuse: Fuse, discard: float) -> tuple[Tensor, Tensor]:
    """Multiply the layers, and return also the tokens that leave the last."""
    check_settings(fuse, discard)
    config = model.config
    product = torch.eye(config.tokens, device=pixels.device).expand(len(pixels), -1, -1)
    tokens = pixels
    for tokens, weights in iter_attention(model, pixels):  # noqa: B007 - the last ones are returned
        product = with_residual(discard_smallest(fuse_heads(weights, fuse), discard)) @ product
        del weights  # the next layer's take its place
    return product, tokens


def fuse_heads(weights: Tensor, fuse: Fuse) -> Tensor:
    """Make one matrix (B, Q, T) of the heads' (B, heads, Q, T)."""
    match fuse:
        case "mean":
            return weights.mean(dim=1)
        case "max":
            return weights.amax(dim=1)
        case "min":
            return weights.amin(dim=1)
    raise _unknown(fuse)


def discard_smallest(matrix: Tensor, share: float) -> Tensor:
    """Set the smallest `share` of each image's (B, Q, T) weights to 0."""
    count = int(share * matrix[0].numel())
    if not count:
        return matrix
    flat = matrix.flatten(1)
    smallest = flat.argsort(dim=1, stable=True)[:, :count]
    return flat.scatter(1, smallest, 0).view_as(matrix)


def with_residual(matrix: Tensor) -> Tensor:
    """Leave every token half of itself; rows, which fusing and discarding may have changed, sum to 1 again."""
    mixed = 0.5 * matrix + 0.5 * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return mixed / mixed.sum(dim=-1, keepdim=True)


def check_settings(fuse: str, discard: float) -> None:
    """Refuse what means nothing."""
    if fuse not in get_args(Fuse):
        raise _unknown(fuse)
    if not isinstance(discard, int | float) or not 0 <= discard < 1:
        raise ConfigError(f"discard is {discard!r}; it is the share of weights that is left out, from 0 to below 1")


def _unknown(fuse: str) -> ConfigError:
    return ConfigError(f"heads are not fused by {fuse!r}{suggest(fuse, get_args(Fuse)) or '; use mean, max or min'}")
