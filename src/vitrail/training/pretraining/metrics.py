"""The result of pretraining: the loss on images that were not trained on, and how good the features are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from vitrail.tasks.metrics import Metric, Metrics, MetricSpec
from vitrail.text import plural

LOSS = MetricSpec(
    "loss",
    unit="number",
    lower_is_better=True,
    key="val_loss",
    explanation="of the method, on images that were not trained on; only comparable with the same settings",
)
KNN = MetricSpec(
    "kNN accuracy", key="val_knn", explanation="up to 20 nearest neighbours in feature space, leave-one-out"
)
SPREAD = MetricSpec(
    "spread",
    unit="number",
    key="val_spread",
    explanation="how much the features differ between images: near 0 they have collapsed, 1/√width is the most",
)
RANK = MetricSpec(
    "rank", unit="number", key="val_rank", explanation="how many dimensions the features use, from 1 to the width"
)
TRAINING_LOSS = LOSS._replace(key="loss")


@dataclass(frozen=True)
class PretrainingShown:
    """The metrics that a pretraining run shows."""

    labelled: bool
    """Whether classes are known, so that there is a kNN accuracy."""

    @property
    def training_metric(self) -> MetricSpec:
        """The loss."""
        return TRAINING_LOSS

    @property
    def headline(self) -> MetricSpec:
        """The kNN accuracy, or the loss if no labels are known."""
        return KNN if self.labelled else LOSS

    @property
    def criteria(self) -> Mapping[str, MetricSpec]:
        """The loss."""
        return {"loss": LOSS}


@dataclass(frozen=True, eq=False, kw_only=True)
class PretrainingMetrics(Metrics):
    """The metrics of a pretrained model."""

    task: ClassVar[str] = "pretraining"
    loss: float
    knn: float | None = None
    """None if no labels are known."""
    rank: float
    """The effective number of dimensions that the features use."""
    spread: float
    """Standard deviation of a dimension of the normalised features; near 0 if they have collapsed."""

    @property
    def headline(self) -> Metric:
        """The kNN accuracy, or the loss if no labels are known."""
        return self.numbers[0]

    @property
    def numbers(self) -> list[Metric]:
        """Every metric."""
        loss, rank, spread = Metric(LOSS, self.loss), Metric(RANK, self.rank), Metric(SPREAD, self.spread)
        return [loss, rank, spread] if self.knn is None else [Metric(KNN, self.knn), loss, rank, spread]

    @property
    def details(self) -> dict[str, Any]:
        """The numbers as JSON."""
        values = {"loss": self.loss, "knn": self.knn, "rank": self.rank, "spread": self.spread}
        return {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}

    @property
    def lead(self) -> list[str]:
        """The same in sentences."""
        loss = f"The loss is {LOSS.show(self.loss)}. " if self.knn is not None else ""
        watched = f"{loss}The features use about {plural(max(1, round(self.rank)), 'dimension')}."
        labels = "Labels only served to measure this; none was trained on." if self.knn is not None else ""
        return [sentence for sentence in (labels, watched) if sentence]

    @property
    def clauses(self) -> list[str]:
        """The other numbers."""
        others = [metric for metric in self.numbers if metric is not self.headline][: 2 if self.knn is not None else 1]
        return [f"{metric.name} {metric.text}" for metric in others if metric.spec is not self.headline.spec]
