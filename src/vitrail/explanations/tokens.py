"""Query tokens: the class token, a patch, a register, the mean of the patches, or the query of the pool `map`.

A query is a row of weights over the tokens, (T,), that sums to 1: one-hot for a single token. So every map is that row
times a matrix whose row i is the attention of token i.
"""

import re

import torch
from torch import Tensor

from vitrail.errors import InputError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

Query = str | tuple[int, int]
"""class, distillation, register:N, mean, pool, or a patch as "row,column" or a pair of ints."""
POOL = "pool"
_PATCH = re.compile(r"\(?\s*(-?\d{1,7})\s*,\s*(-?\d{1,7})\s*\)?")


def default_query(config: ViTConfig) -> str:
    """Return what the head reads: the class token, the mean of the tokens, or the query of the pool `map`."""
    if config.pool == "none":
        return "class" if config.class_token != "none" else "mean"
    return {"cls": "class", "mean": "mean", "map": POOL}[config.pool]


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
