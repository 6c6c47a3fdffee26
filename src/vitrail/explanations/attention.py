"""Where tokens look: the attention weights of a layer, all layers one after another, and the pool's."""

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
    """Return a layer's attention weights (B, heads, T, T); row i says where token i looks, and sums to 1."""
    check_ready(model)
    return model.trace(pixels, attention=(layer,)).attention[layer]


@torch.no_grad()
def pooling_rows(model: ViT, pixels: Tensor) -> Tensor:
    """Return where the query of the pool `map` looks, (B, heads, T), with 0 for tokens it does not see."""
    check_ready(model)
    pooling = model.trace(pixels).pooling
    if pooling is None:
        raise InputError(f"the pool {model.config.pool!r} has no query of its own; only 'map' has")
    return spread(pooling, model.config)


def iter_attention(model: ViT, pixels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Give, of one layer after another, the tokens that leave it and its attention weights (B, heads, T, T).

    Whoever lets go of the weights before asking for the next never holds those of two layers.
    """
    check_ready(model)
    with torch.no_grad():
        tokens, places = model.embed(pixels)
    for block in model.blocks:
        with torch.no_grad():  # not around the yield: what the caller does meanwhile is the caller's
            tokens, weights = cast("Block", block).traced(tokens, places)
        yield tokens, weights
        del weights


def attention_maps(model: ViT, pixels: Tensor, layer: int | None = None, query: Query | None = None) -> Tensor:
    """Return where the token asked about looks, for every head: (B, heads, rows, columns), on the grid of patches.

    What it looks at beside patches is left out, so that a map sums to 1 or less. Without `layer` it is the last;
    without `query` it is what the head reads: with the pool `map` the pool's own query, unless a layer is named.
    """
    config = model.config
    if layer is None and (query if query is not None else default_query(config)) == POOL:
        return patch_grid(pooling_rows(model, pixels), config)
    row = _row_in_a_layer(model, query).to(pixels.device)
    number = config.depth - 1 if layer is None else read_layer(layer, config.depth)
    return patch_grid(row @ attention_rows(model, pixels, number), config)


def maps_of_layers(model: ViT, pixels: Tensor, query: Query | None = None) -> list[Tensor]:
    """Return what `attention_maps` returns for every layer, in one pass."""
    row = _row_in_a_layer(model, query).to(pixels.device)
    maps = []
    for _, weights in iter_attention(model, pixels):
        maps.append(patch_grid(row @ weights, model.config))
        del weights  # the next layer's take its place
    return maps


def _row_in_a_layer(model: ViT, query: Query | None) -> Tensor:
    """Return the row (T,) of what is asked in a layer, where the pool's query does not stand yet."""
    if query == POOL and model.config.pool == "map":
        raise InputError("the pool's query stands behind all layers; leave the layer out, or ask another token")
    asked = query if query is not None else default_query(model.config)
    return read_query("mean" if asked == POOL and query is None else asked, model.config)


def choose_head(maps: Tensor, head: int | None) -> Tensor:
    """Return one head's map of (B, heads, …), or the mean of all."""
    if head is None:
        return maps.mean(dim=1)
    return maps[:, read_head(head, maps.shape[1])]


def read_head(head: int, heads: int) -> int:
    """Read a head's number, which may count from the end."""
    return read_number(head, heads, "head")
