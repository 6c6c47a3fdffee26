"""How alike positions are (the paper's figure 7, centre): every patch's position embedding beside all others."""

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.checkpoints.bundle import Bundle
from vitrail.errors import Diverged, InputError
from vitrail.explanations.figures.figure import Absent, Figure
from vitrail.explanations.figures.grid_of_grids import ROOM, ROOM_OF_MANY, arranged, evenly, joined, panel
from vitrail.models.checks import read_layer
from vitrail.models.config import ViTConfig
from vitrail.models.position import read_table
from vitrail.models.vit import ViT

NAME, TITLE = "positions", "How alike positions are to the model"
MOST_BLOCKS = 4
"""Where every block has a table of its own, so many are drawn."""
_INSTEAD = "the figure of attention distance shows how its heads use where patches lie"
_WHY = {
    "none": "this model is told nothing about where a patch lies (position 'none'), so it has no position "
    "embeddings to compare.",
    "rope_2d": "this model has no table of positions: it rotates queries and keys by where their patches lie (position "
    f"'rope_2d'); {_INSTEAD}.",
    "relative": "this model has no embedding for a position, but one for every offset between two patches (position "
    f"'relative'); {_INSTEAD}.",
}


def position_similarity(model: ViT, block: int = 0) -> NDArray[np.float64]:
    """Return the cosine similarity of all pairs of patches' position embeddings, (rows, columns, rows, columns).

    Entry [r, c] is a map over the grid: how alike the position of every patch is to that of the patch in row r and
    column c; a row of zeros is like nothing. Where every block has a table of its own, `block` says whose. InputError
    says why a model has no table.
    """
    grid = model.config.grid
    return _similarity(_directions(model, block), None).reshape(*grid, *grid)


def positions_figure(bundle: Bundle) -> Figure | Absent:
    """Draw the similarity of positions as a grid of grids."""
    model, config = bundle.model, bundle.model.config
    if config.position in _WHY:
        return Absent(NAME, TITLE, _WHY[config.position])
    if config.patches == 1:
        return Absent(NAME, TITLE, "the whole image is one patch, so there is nothing to compare its position with.")
    blocks = evenly(config.depth, MOST_BLOCKS) if config.table_owner == "blocks" else [0]
    tables = {block: _directions(model, block) for block in blocks}
    if not any(table.any() for table in tables.values()):
        return Absent(NAME, TITLE, "the position embeddings are all zero: this model has not learned them yet.")
    maps = arranged(config, ROOM if len(blocks) == 1 else ROOM_OF_MANY)
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
    """Return the patches' position embeddings, (N, D), each of length 1; zeros stay zeros."""
    config = model.config
    if config.position in _WHY:
        raise InputError(_WHY[config.position].removesuffix("."))
    number = read_layer(block, config.depth)
    owner = model.blocks[number] if config.table_owner == "blocks" else model
    with torch.no_grad():
        table = read_table(owner, config)[0, config.layout.patches].double().cpu().numpy()
    if not np.isfinite(table).all():
        raise Diverged("the position embeddings are not all finite numbers; the weights are damaged")
    # Scaled first, so that the squares of very small numbers do not vanish.
    largest = np.abs(table).max(axis=1, keepdims=True)
    table = table / np.where(largest > 0, largest, 1)
    length = np.linalg.norm(table, axis=1, keepdims=True)
    directions: NDArray[np.float64] = table / np.where(length > 0, length, 1)
    return directions


def _similarity(directions: NDArray[np.float64], queries: NDArray[np.int64] | None) -> NDArray[np.float64]:
    """Return the cosines of some positions, or of all, with all: (queries, N)."""
    chosen = directions if queries is None else directions[queries]
    return np.clip(chosen @ directions.T, -1, 1)


def _caption(config: ViTConfig, drawn: int, blocks: list[int]) -> str:
    kind = {
        "learned_1d": "learned position embeddings",
        "learned_2d": "position embeddings, each joined from a learned one of its row and a learned one of its column,",
        "sincos_2d": "position embeddings, which are sines and cosines and were not learned,",
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
            f" Every block has a table of its own; shown {'are' if len(blocks) > 1 else 'is'} block"
            f"{'s' * (len(blocks) > 1)} {', '.join(str(block + 1) for block in blocks)} of {config.depth}."
        )
    return (
        f"Cosine similarity of {kind} as a grid of maps, {where}: the map in row r and column c shows how alike the "
        f"position of every patch is to that of the patch in row r and column c. A bright spot around a map's own "
        f"place means that near patches have like positions; a bright cross, that the model has found rows and "
        f"columns; one lone bright patch, that it has learned no neighbourhood.{own}"
    )
