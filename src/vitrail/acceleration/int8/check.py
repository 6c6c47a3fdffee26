"""How well int8 agrees with float32 on held-out images, and the bound below which int8 is refused."""

from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from vitrail.acceleration.agreement import MAX_CHANGE, Compare
from vitrail.errors import ConfigError
from vitrail.text import percent

Measure = Literal["prediction", "output", "features"]
BOUNDS: dict[Measure, float] = {"prediction": 0.99, "output": 1 - MAX_CHANGE, "features": 0.99}
"""The least agreement: the share of images with the same prediction (of a task with several choices), 1 minus the
largest change of an output relative to the largest output (of other tasks), or the mean cosine similarity of features.
"""


class Int8Check(NamedTuple):
    """The outputs of a quantised model compared with those of the original in float32."""

    calibrated_on: int
    """Images that determined the scales."""
    images: int
    """Other images, on which the outputs were compared."""
    measure: Measure
    agreement: float
    bound: float
    """The agreement below which int8 is refused."""
    same: str
    """The agreement in words."""

    @property
    def passed(self) -> bool:
        """Whether the outputs agree; False for NaN."""
        return self.agreement >= self.bound

    @property
    def text(self) -> str:
        """The result in one line."""
        return f"{self.same}; calibrated on {self.calibrated_on} images"

    def require(self) -> None:
        """Raise if int8 changes too much."""
        if not self.passed:
            raise ConfigError(
                f"int8 is too inaccurate for this model: {self.same}, and {percent(self.bound)}% is the least allowed; "
                f"use float32, or calibrate on more images like those you predict"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the values that are recorded with a quantised model."""
        return self._asdict()


def compare_predictions(exact: Tensor, quick: Tensor, compare: Compare, calibrated_on: int) -> Int8Check:
    """Compare outputs (B, …) as the model's task does."""
    found = compare(exact, quick)
    if found.prediction:
        same = found.images - found.changed
        share = same / found.images if quick.isfinite().all() else float("nan")
        words = (
            f"the {found.prediction} is the same for {same} of {found.images} held-out images ({percent(share)}%), "
            f"{found.values} within {found.change:.3f}"
        )
        return _check("prediction", share, words, found.images, calibrated_on)
    words = f"{found.values} of {found.images} held-out images within {found.change:.3f} of the largest"
    return _check("output", 1 - found.change, words, found.images, calibrated_on)


def compare_directions(exact: Tensor, quick: Tensor, calibrated_on: int) -> Int8Check:
    """Compare features (B, …, D) by their cosine similarity."""
    cosine = F.cosine_similarity(exact, quick, dim=-1).view(len(exact), -1).mean(dim=1)
    mean, least = float(cosine.mean()), float(cosine.min())
    words = (
        f"the features of {len(exact)} held-out images have a mean cosine similarity of {mean:.4f}, least {least:.4f}"
    )
    return _check("features", mean, words, len(exact), calibrated_on)


def _check(measure: Measure, agreement: float, same: str, images: int, calibrated_on: int) -> Int8Check:
    return Int8Check(calibrated_on, images, measure, agreement, BOUNDS[measure], same)
