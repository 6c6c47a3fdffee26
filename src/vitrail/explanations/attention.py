"""Attention weights: of one layer, of every layer in turn, and of attention pooling."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from vitrail.errors import InputError
from vitrail.explanations.tokens import POOL, Query, check_ready, default_query, patch_grid, read_query, spread
from vitrail.models.blocks import Block
from vitrail.models.checks import read_layer, read_number
from vitrail.models.vit import ViT


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


def _layer_query(model: ViT, query: Query | None) -> Tensor:
    """Return the query as a row (T,) for use within a layer, where the pool's query does not exist."""
    if query == POOL and model.config.pool == "map":
        raise InputError("the pool's query comes after all layers; omit the layer, or choose another token")
    chosen = query if query is not None else default_query(model.config)
    return read_query("mean" if chosen == POOL and query is None else chosen, model.config)


def choose_head(maps: Tensor, head: int | None) -> Tensor:
    """Return one head of (B, heads, …), or the mean of all."""
    if head is None:
        return maps.mean(dim=1)
    return maps[:, read_head(head, maps.shape[1])]


def read_head(head: int, heads: int) -> int:
    """Validate a head index, which may be negative."""
    return read_number(head, heads, "head")
