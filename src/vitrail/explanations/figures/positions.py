"""Similarity of position embeddings (the paper's figure 7, centre): every patch's against all others."""

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.checkpoints.bundle import Bundle
from vitrail.errors import Diverged, InputError
from vitrail.explanations.figures.figure import EXTENT, EXTENT_OF_MANY, Absent, Figure, arranged, evenly, joined, panel
from vitrail.models.checks import read_layer
from vitrail.models.config import ViTConfig
from vitrail.models.position import read_table
from vitrail.models.vit import ViT

NAME, TITLE = "positions", "Similarity of position embeddings"
MOST_BLOCKS = 4
"""Number of blocks drawn if every block has its own table."""
_INSTEAD = "the figure of attention distance shows how its heads use positions"
_WHY = {
    "none": "this model has no position information (position 'none'), so it has no position embeddings to compare.",
    "rope_2d": "this model has no position table: it rotates queries and keys by their patches' positions (position "
    f"'rope_2d'); {_INSTEAD}.",
    "relative": "this model embeds every offset between two patches instead of positions (position "
    f"'relative'); {_INSTEAD}.",
}


def position_similarity(model: ViT, block: int = 0) -> NDArray[np.float64]:
    """Return the cosine similarity of all pairs of position embeddings, (rows, columns, rows, columns).

    Entry [r, c] is a map over the grid: the similarity of every patch's position embedding to that of the patch in row
    r and column c; an embedding of zeros has similarity 0. `block` selects the table if every block has its own.
    Raises InputError for a model without a table.
    """
    grid = model.config.grid
    return _similarity(_directions(model, block), None).reshape(*grid, *grid)


def positions_figure(bundle: Bundle) -> Figure | Absent:
    """Draw the similarity of position embeddings as a grid of grids."""
    model, config = bundle.model, bundle.model.config
    if config.position in _WHY:
        return Absent(NAME, TITLE, _WHY[config.position])
    if config.patches == 1:
        return Absent(NAME, TITLE, "the whole image is one patch, so there is only one position embedding.")
    blocks = evenly(config.depth, MOST_BLOCKS) if config.table_owner == "blocks" else [0]
    tables = {block: _directions(model, block) for block in blocks}
    if not any(table.any() for table in tables.values()):
        return Absent(NAME, TITLE, "the position embeddings are all zero: they have not been trained yet.")
    maps = arranged(config, EXTENT if len(blocks) == 1 else EXTENT_OF_MANY)
    queries = np.array([row * config.grid[1] + column for row in maps.rows for column in maps.columns])
    panels = [
        panel(
            _similarity(table, queries).reshape(len(maps.rows), len(maps.columns), *config.grid),
            maps,
            f"block {block + 1}" if len(blocks) > 1 else "",
        )
        for block, table in tables.items()
    ]
    return Figure(NAME, TITLE, _caption(config, len(queries), blocks), image=joined(panels))


# ── numbers ──


def _directions(model: ViT, block: int) -> NDArray[np.float64]:
    """Return the patches' position embeddings, (N, D), each normalised to length 1; zeros stay zeros."""
    config = model.config
    if config.position in _WHY:
        raise InputError(_WHY[config.position].removesuffix("."))
    number = read_layer(block, config.depth)
    owner = model.blocks[number] if config.table_owner == "blocks" else model
    with torch.no_grad():
        table = read_table(owner, config)[0, config.layout.patches].double().cpu().numpy()
    if not np.isfinite(table).all():
        raise Diverged("the position embeddings are not finite; the weights are corrupt")
    # Scaled first, so that the squares of very small numbers do not underflow.
    largest = np.abs(table).max(axis=1, keepdims=True)
    table = table / np.where(largest > 0, largest, 1)
    length = np.linalg.norm(table, axis=1, keepdims=True)
    directions: NDArray[np.float64] = table / np.where(length > 0, length, 1)
    return directions


def _similarity(directions: NDArray[np.float64], queries: NDArray[np.int64] | None) -> NDArray[np.float64]:
    """Return the cosine similarity of the queries, or of all positions, with all positions: (queries, N)."""
    chosen = directions if queries is None else directions[queries]
    return np.clip(chosen @ directions.T, -1, 1)


def _caption(config: ViTConfig, drawn: int, blocks: list[int]) -> str:
    kind = {
        "learned_1d": "learned position embeddings",
        "learned_2d": "position embeddings, each the concatenation of a learned row and a learned column embedding,",
        "sincos_2d": "fixed sine-cosine position embeddings",
    }[config.position]
    rows, columns = config.grid
    where = (
        f"one for each of the {rows}×{columns} patches"
        if drawn == config.patches
        else (f"drawn for {drawn} of the {rows}×{columns} patches, chosen evenly")
    )
    own = ""
    if config.table_owner == "blocks":
        own = (
            f" Every block has its own table; shown {'are' if len(blocks) > 1 else 'is'} block"
            f"{'s' * (len(blocks) > 1)} {', '.join(str(block + 1) for block in blocks)} of {config.depth}."
        )
    return (
        f"Cosine similarity of {kind} as a grid of maps, {where}: the map in row r and column c shows the similarity "
        f"of every patch's position embedding to that of the patch in row r and column c. A bright spot around a map's "
        f"own position means that nearby patches have similar embeddings; a bright cross, that the model has learned "
        f"rows and columns; a single bright patch, that it has not learned any neighbourhood.{own}"
    )
