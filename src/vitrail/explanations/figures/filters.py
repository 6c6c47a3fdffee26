"""The filters that read a patch (the paper's figure 7, left): their principal components, as pictures."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.checkpoints.bundle import Bundle
from vitrail.explanations.figures.figure import Absent, Figure
from vitrail.models.vit import ViT

COUNT = 28
"""As many components as the paper shows."""


class Filters(NamedTuple):
    """Principal components of a layer's kernels, the most important first."""

    components: NDArray[np.float64]
    """(count, height, width, channels), each of length 1; its sign makes the largest weight positive."""
    shares: NDArray[np.float64]
    """(count,), the share of the kernels' variance that each explains."""
    layer: str
    """Whose kernels these are: the patch embedding's, or the first convolution's."""


def filters(model: ViT, count: int = COUNT) -> Filters:
    """Return the first principal components of the kernels that read the picture."""
    raise NotImplementedError


def filters_figure(bundle: Bundle, *, count: int = COUNT) -> Figure | Absent:
    """Draw the first principal components of the kernels that read the picture."""
    raise NotImplementedError
