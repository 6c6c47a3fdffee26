"""Attention rollout examples (the paper's figure 6): a picture, and beside it what the model looked at."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.checkpoints.bundle import Bundle
from vitrail.explanations.figures.figure import Absent, Figure

EXAMPLES = 12
"""Most pictures in one figure."""


class Explained(Protocol):
    """What this figure takes of an explanation."""

    @property
    def map(self) -> NDArray[np.float32]:
        """(rows, columns), on the grid of patches."""

    @property
    def picture(self) -> Image.Image:
        """The picture as the model saw it."""

    @property
    def target(self) -> str | int | None:
        """The class that the model answered."""


def examples_figure(explanations: Sequence[Explained]) -> Figure:
    """Draw pairs of a picture and the same picture, darker where the model looks less."""
    raise NotImplementedError


def rollout_figure(bundle: Bundle, pictures: Iterable[object], *, device: str = "auto") -> Figure | Absent:
    """Draw what a model attends to in pictures, by attention rollout; at most `EXAMPLES` of them."""
    raise NotImplementedError
