"""How well the outputs of a faster path agree with the exact ones. What counts as equal is up to the model's task."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

MAX_CHANGE = 0.02
"""Largest change that automatic precision allows."""


class Agreement(NamedTuple):
    """The outputs of some images compared with the exact ones."""

    images: int
    change: float
    """Largest change of a value; NaN if one is not finite."""
    value: str = "an output"
    values: str = "outputs"
    """What changes by that much: outputs, relative to the largest one, or what the task makes of them."""
    changed: int = 0
    """Images whose prediction differs, if a prediction is one of several choices."""
    prediction: str = ""
    """What such a prediction is: "top class"."""

    @property
    def fault(self) -> str | None:
        """What changes too much, as "changes the top class of 3 images"; None if nothing does."""
        if self.changed:
            return f"changes the {self.prediction} of {self.changed} of the first {self.images} images"
        if not self.change <= MAX_CHANGE:  # also for NaN
            return f"changes {self.value} of the first {self.images} images by {self.change:.3f}"
        return None

    @property
    def text(self) -> str:
        """What stays the same."""
        images = "image has" if self.images == 1 else f"{self.images} images have"
        same = f"the same {self.prediction}, {self.values}" if self.prediction else self.values
        return f"the first {images} {same} within {self.change:.3f}"


Compare = Callable[[Tensor, Tensor], Agreement]
"""Compares outputs with the exact ones, which come first."""
NOTHING = Agreement(0, 0.0)


def compare_outputs(exact: Tensor, quick: Tensor) -> Agreement:
    """Compare outputs relative to the largest one."""
    largest = max(float(exact.abs().max()), 1e-12)
    return Agreement(len(exact), float((exact - quick).abs().max()) / largest)


def compare_features(exact: Tensor, quick: Tensor) -> Agreement:
    """Compare feature vectors (B, …, D): the largest distance between two, relative to the length of the exact one."""
    lengths = exact.norm(dim=-1).clamp_min(1e-12)
    change = float(((exact - quick).norm(dim=-1) / lengths).max())
    return Agreement(len(exact), change, "a feature vector", "feature vectors")
