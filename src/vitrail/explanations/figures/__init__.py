"""The figures of the ViT paper (arXiv 2010.11929, figures 6, 7 and 11), drawn from any bundle.

Each comes as numbers (`filters`, `position_similarity`, `attention_distance`) and as a `Figure` with a caption. For a
model without such a figure it is an `Absent`, which gives the reason.
"""

from vitrail.explanations.figures.distance import attention_distance, distance_figure, even_distance
from vitrail.explanations.figures.examples import rollout_figure
from vitrail.explanations.figures.figure import Absent, Figure
from vitrail.explanations.figures.kernels import filters, filters_figure
from vitrail.explanations.figures.positions import position_similarity, positions_figure

__all__ = [
    "Absent",
    "Figure",
    "attention_distance",
    "distance_figure",
    "even_distance",
    "filters",
    "filters_figure",
    "position_similarity",
    "positions_figure",
    "rollout_figure",
]
