"""Attention maps: of one layer, of every layer in turn, of attention pooling, and attention rollout.

A query is a row of weights over the tokens, (T,), that sums to 1: one-hot for a single token. So every map is that row
times a matrix whose row i is the attention of token i.

In rollout (arXiv 2005.00928), each layer counts half attention and half identity (the residual connection), and the
layers are multiplied.
"""

import re
from collections.abc import Iterator
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from vitrail.errors import ConfigError, InputError, suggest
from vitrail.models.blocks import Block
from vitrail.models.checks import read_layer, read_number
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

Query = str | tuple[int, int]
"""class, distillation, register:N, mean, pool, or a patch as "row,column" or a pair of ints."""
Fuse = Literal["mean", "max", "min"]
POOL = "pool"
_PATCH = re.compile(r"\(?\s*(-?\d{1,7})\s*,\s*(-?\d{1,7})\s*\)?")


# ── queries ──


def default_query(config: ViTConfig) -> str:
    """Return what the head reads: the class token, the mean of the tokens, or the query of the pool `map`.

    A head that reads every token has the class token, if there is one, or else the mean; one that reads every patch has
    their mean.
    """
    if config.pool == "none":
        return "class" if config.class_token != "none" else "mean"
    return {"cls": "class", "mean": "mean", "map": POOL, "patches": "mean"}[config.pool]


def read_query(query: Query, config: ViTConfig) -> Tensor:
    """Return a query's row of weights over the tokens, (T,); raises for `pool`, whose row depends on the image."""
    if query == "mean":
        return pooled_tokens(config)
    return torch.zeros(config.tokens).index_fill(0, torch.tensor(read_token(query, config)), 1)


def read_token(query: Query, config: ViTConfig) -> int:
    """Return the index of a single token."""
    layout = config.layout
    pair = isinstance(query, tuple | list) and len(query) == 2
    name = f"{query[0]},{query[1]}" if pair else str(query).strip().lower()
    kind, _, number = name.partition(":")
    if name in ("class", "distillation"):
        place = layout.class_token if name == "class" else layout.distillation_token
        if place is None:
            raise InputError(f"this model has no {name} token; {_possible(config)}")
        return place
    if kind == "register":
        if not number.isascii() or not number.isdigit() or int(number) >= config.registers:
            have = f"registers register:0 to register:{config.registers - 1}" if config.registers else "no registers"
            raise InputError(f"unknown token {name!r}: this model has {have}; {_possible(config)}")
        return int(layout.registers.start) + int(number)
    if patch := _PATCH.fullmatch(name):
        row, column = int(patch[1]), int(patch[2])
        rows, columns = config.grid
        if not (0 <= row < rows and 0 <= column < columns):
            raise InputError(
                f"row {row}, column {column} is outside the patch grid: this model has rows 0 to {rows - 1} and "
                f"columns 0 to {columns - 1}"
            )
        return int(layout.patches.start) + row * columns + column
    raise InputError(f"unknown token {name!r}; {_possible(config)}")


def pooled_tokens(config: ViTConfig) -> Tensor:
    """Return equal weights for the pooled tokens, and 0 for the others, (T,)."""
    row = torch.zeros(config.tokens)
    row[_pooled_over(config)] = 1
    return row / row.sum()


def spread(pooling: Tensor, config: ViTConfig) -> Tensor:
    """Scatter the pool's weights (…, pooled tokens) over all tokens, (…, T)."""
    row = pooling.new_zeros(*pooling.shape[:-1], config.tokens)
    row[..., _pooled_over(config)] = pooling
    return row


def patch_grid(rows: Tensor, config: ViTConfig) -> Tensor:
    """Select the patches of (…, T), and reshape them to their grid, (…, rows, columns)."""
    patches = rows[..., config.layout.patches]
    return patches.reshape(*patches.shape[:-1], *config.grid)


def check_ready(model: ViT) -> None:
    """Raise if the model is in training mode."""
    if model.training:
        raise InputError("the model is in training mode, where dropout makes outputs random; call model.eval() first")


def _pooled_over(config: ViTConfig) -> slice:
    return slice(0, config.tokens) if config.pool_over == "all" else config.layout.patches


def _possible(config: ViTConfig) -> str:
    """List the valid queries."""
    rows, columns = config.grid
    words = [
        *(["class"] if config.class_token != "none" else []),
        *(["distillation"] if config.distillation_token else []),
        *([f"register:0 … register:{config.registers - 1}"] if config.registers else []),
        "mean",
        *([POOL] if config.pool == "map" else []),
        f"a patch 'row,column' from 0,0 to {rows - 1},{columns - 1}",
    ]
    return "choose " + ", ".join(words[:-1]) + f" or {words[-1]}"


# ── attention of a layer ──


@torch.no_grad()
def attention_rows(model: ViT, pixels: Tensor, layer: int) -> Tensor:
    """Return a layer's attention weights (B, heads, T, T); row i is the attention of token i, and sums to 1."""
    check_ready(model)
    return model.trace(pixels, attention=(layer,)).attention[layer]


@torch.no_grad()
def pooling_rows(model: ViT, pixels: Tensor) -> Tensor:
    """Return the attention of the `map` pool's query, (B, heads, T), with 0 for tokens outside the pool."""
    check_ready(model)
    pooling = model.trace(pixels).pooling
    if pooling is None:
        raise InputError(f"the pool {model.config.pool!r} has no query; only 'map' has one")
    return spread(pooling, model.config)


def iter_attention(model: ViT, pixels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, layer by layer, its output tokens and its attention weights (B, heads, T, T).

    Delete the weights before advancing, and those of two layers are never in memory at once.
    """
    check_ready(model)
    with torch.no_grad():
        tokens, places = model.embed(pixels)
    for block in model.blocks:
        with torch.no_grad():  # not around the yield: the caller keeps its own grad mode
            tokens, weights = cast("Block", block).traced(tokens, places)
        yield tokens, weights
        del weights


def attention_maps(model: ViT, pixels: Tensor, layer: int | None = None, query: Query | None = None) -> Tensor:
    """Return the attention of the query token, for every head: (B, heads, rows, columns), on the grid of patches.

    Attention to tokens other than patches is dropped, so a map sums to at most 1. `layer` defaults to the last;
    `query` defaults to what the head reads: with the pool `map` the pool's query, unless `layer` is set.
    """
    config = model.config
    if layer is None and (query if query is not None else default_query(config)) == POOL:
        return patch_grid(pooling_rows(model, pixels), config)
    row = _layer_query(model, query).to(pixels.device)
    number = config.depth - 1 if layer is None else read_layer(layer, config.depth)
    return patch_grid(row @ attention_rows(model, pixels, number), config)


def maps_of_layers(model: ViT, pixels: Tensor, query: Query | None = None) -> list[Tensor]:
    """Return `attention_maps` of every layer, in one forward pass."""
    row = _layer_query(model, query).to(pixels.device)
    maps = []
    for _, weights in iter_attention(model, pixels):
        maps.append(patch_grid(row @ weights, model.config))
        del weights  # free the memory for the next layer's
    return maps


def choose_head(maps: Tensor, head: int | None) -> Tensor:
    """Return one head of (B, heads, …), or the mean of all."""
    if head is None:
        return maps.mean(dim=1)
    return maps[:, read_head(head, maps.shape[1])]


def read_head(head: int, heads: int) -> int:
    """Validate a head index, which may be negative."""
    return read_number(head, heads, "head")


def _layer_query(model: ViT, query: Query | None) -> Tensor:
    """Return the query as a row (T,) for use within a layer, where the pool's query does not exist."""
    if query == POOL and model.config.pool == "map":
        raise InputError("the pool's query comes after all layers; omit the layer, or choose another token")
    chosen = query if query is not None else default_query(model.config)
    return read_query("mean" if chosen == POOL and query is None else chosen, model.config)


# ── rollout ──


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
