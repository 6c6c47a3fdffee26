"""How alike positions are (the paper's figure 7, centre): every patch's position embedding beside all others."""

import numpy as np
from numpy.typing import NDArray

from vitrail.checkpoints.bundle import Bundle
from vitrail.explanations.figures.figure import Absent, Figure
from vitrail.models.vit import ViT


def position_similarity(model: ViT, block: int = 0) -> NDArray[np.float64]:
    """Return the cosine similarity of all pairs of patches' position embeddings, (rows, columns, rows, columns).

    Entry [r, c] is a map over the grid: how alike the position of every patch is to that of the patch in row r and
    column c. Where every block has a table of its own, `block` says whose. InputError says why a model has no table.
    """
    raise NotImplementedError


def positions_figure(bundle: Bundle) -> Figure | Absent:
    """Draw the similarity of positions as a grid of grids."""
    raise NotImplementedError
