"""Which token asks: the class token, a patch, a register, the mean of the patches, or the query of the pool `map`.

A question is a row of weights over the tokens, (T,), that sums to 1: a single 1 for a single token. So every map is
that row times a matrix whose row i says where token i looks.
"""

import re

import torch
from torch import Tensor

from vitrail.errors import InputError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

Query = str | tuple[int, int]
"""class, distillation, register:N, mean, pool, or a patch as "row,column", also as a pair of numbers."""
POOL = "pool"
_PATCH = re.compile(r"\(?\s*(-?\d{1,7})\s*,\s*(-?\d{1,7})\s*\)?")


def default_query(config: ViTConfig) -> str:
    """Return what the head reads: the class token, the mean of the tokens, or the query of the pool `map`."""
    if config.pool == "none":
        return "class" if config.class_token != "none" else "mean"
    return {"cls": "class", "mean": "mean", "map": POOL}[config.pool]


def read_query(query: Query, config: ViTConfig) -> Tensor:
    """Return a question's row of weights over the tokens, (T,); `pool`, whose row the image decides, is refused."""
    if query == "mean":
        return pooled_tokens(config)
    return torch.zeros(config.tokens).index_fill(0, torch.tensor(read_token(query, config)), 1)


def read_token(query: Query, config: ViTConfig) -> int:
    """Return the place of the one token that is meant."""
    layout = config.layout
    pair = isinstance(query, tuple | list) and len(query) == 2
    asked = f"{query[0]},{query[1]}" if pair else str(query).strip().lower()
    kind, _, number = asked.partition(":")
    if asked in ("class", "distillation"):
        place = layout.class_token if asked == "class" else layout.distillation_token
        if place is None:
            raise InputError(f"this model has no {asked} token; {_possible(config)}")
        return place
    if kind == "register":
        if not number.isascii() or not number.isdigit() or int(number) >= config.registers:
            have = f"registers register:0 to register:{config.registers - 1}" if config.registers else "no registers"
            raise InputError(f"there is no token {asked!r}: this model has {have}; {_possible(config)}")
        return int(layout.registers.start) + int(number)
    if patch := _PATCH.fullmatch(asked):
        row, column = int(patch[1]), int(patch[2])
        rows, columns = config.grid
        if not (0 <= row < rows and 0 <= column < columns):
            raise InputError(
                f"there is no patch in row {row}, column {column}: this model has rows 0 to {rows - 1} and columns 0 "
                f"to {columns - 1}"
            )
        return int(layout.patches.start) + row * columns + column
    raise InputError(f"there is no token {asked!r} to ask; {_possible(config)}")


def pooled_tokens(config: ViTConfig) -> Tensor:
    """Return equal weights for the tokens that pooling looks at, and 0 for the others, (T,)."""
    row = torch.zeros(config.tokens)
    row[_pooled_over(config)] = 1
    return row / row.sum()


def spread(pooling: Tensor, config: ViTConfig) -> Tensor:
    """Give the pool's weights (…, pooled tokens) their places among all tokens, (…, T)."""
    row = pooling.new_zeros(*pooling.shape[:-1], config.tokens)
    row[..., _pooled_over(config)] = pooling
    return row


def patch_grid(rows: Tensor, config: ViTConfig) -> Tensor:
    """Leave out all but the patches of (…, T), and lay them out on their grid, (…, rows, columns)."""
    patches = rows[..., config.layout.patches]
    return patches.reshape(*patches.shape[:-1], *config.grid)


def check_ready(model: ViT) -> None:
    """Refuse a model that would answer by chance."""
    if model.training:
        raise InputError("the model is in training mode, where dropout changes its answers; call model.eval() first")


def _pooled_over(config: ViTConfig) -> slice:
    return slice(0, config.tokens) if config.pool_over == "all" else config.layout.patches


def _possible(config: ViTConfig) -> str:
    """Say what may be asked."""
    rows, columns = config.grid
    words = [
        *(["class"] if config.class_token != "none" else []),
        *(["distillation"] if config.distillation_token else []),
        *([f"register:0 … register:{config.registers - 1}"] if config.registers else []),
        "mean",
        *([POOL] if config.pool == "map" else []),
        f"a patch 'row,column' from 0,0 to {rows - 1},{columns - 1}",
    ]
    return "ask " + ", ".join(words[:-1]) + f" or {words[-1]}"
