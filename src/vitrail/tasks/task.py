"""The interface of a task: everything about a model that depends on what it is asked.

    label -> target -> loss          training
    output -> prediction -> row      predict, serve, export
    predictions -> Metrics           validation, evaluation, report

A task is data plus pure functions, and holds no state. Its name is recorded in the bundle and in the recipe, so no
command needs an option for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.batches import BadImage
from vitrail.data.sources.source import Source
from vitrail.tasks.metrics import Metrics
from vitrail.tasks.objective import Objective
from vitrail.text import as_percent

Unit = Literal["percent", "number"]
FieldType = Literal["string", "float", "strings", "floats"]
TrainingLoss = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Maps outputs (B, K), labels (B) and the mixing weights, if any, to the mean loss of the batch and the sum of the
training metric over its images."""


class Predictions(NamedTuple):
    """The outputs of a model for every readable image."""

    outputs: NDArray[np.float32]
    """(N, K), activated by the task: the probabilities of a classifier."""
    labels: NDArray[np.int64]
    """(N,)."""
    indices: NDArray[np.int64]
    """(N,): indices into the source."""
    bad: tuple[BadImage, ...] = ()
    """The images that could not be read."""


class Criterion(NamedTuple):
    """A validation metric that can select the best checkpoint."""

    key: str
    """Its key in metrics.jsonl."""
    title: str
    unit: Unit = "percent"
    lower_is_better: bool = False

    def show(self, value: float | None) -> str:
        """Return a value as text."""
        return as_percent(value) if self.unit == "percent" or value is None else f"{value:.3f}"


@dataclass(frozen=True, kw_only=True)
class Prediction(ABC):
    """What a model says about one image. Every task has its own subclass."""

    error: str | None = None
    """Why there is no prediction, if the image could not be read."""
    image: str | None = None
    """The image's path, or its position as "image 0"; set by `vitrail.predict`."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Return the values of a row as JSON: the keys of `RowFormat.types`."""

    @abstractmethod
    def response(self) -> dict[str, Any]:
        """Return the values of an HTTP response as JSON: the keys of `RowFormat.schema`."""


class RowFormat(ABC):
    """How the predictions of a task are written."""

    types: ClassVar[Mapping[str, FieldType]]
    """The fields and their types."""
    schema: ClassVar[Mapping[str, Any]]
    """The JSON schema of an HTTP response."""
    title: ClassVar[tuple[str, str, str]]
    """Column titles of a table, after that of the image: main value, number, everything else."""

    @abstractmethod
    def csv_header(self, top: int) -> list[str]:
        """Return the column names."""

    @abstractmethod
    def csv_cells(self, fields: Mapping[str, Any], top: int) -> list[Any]:
        """Return the cells of a row with these fields, as many as columns."""

    @abstractmethod
    def table_cells(self, fields: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return the cells of a table for people."""


class Task(ABC):
    """A task. `classification` is the reference."""

    name: ClassVar[str]
    """As recorded in recipes and bundles."""
    activation: ClassVar[str]
    """What `activate` computes, for readers of an exported graph."""
    training_metric: ClassVar[Criterion]
    """The metric that is averaged over every training batch; its key in metrics.jsonl has no prefix."""
    criteria: ClassVar[Mapping[str, Criterion]]
    """The metrics that can select the best checkpoint, by the name a recipe gives them. The first one is the
    headline."""
    rows: ClassVar[RowFormat]
    sections: ClassVar[tuple[str, ...]]
    """The sections of a report after the result, by their names in `vitrail.reports.report`."""
    metrics: ClassVar[type[Metrics]]
    """The result type."""

    @property
    def headline(self) -> Criterion:
        """The validation metric that a run is known by."""
        return next(iter(self.criteria.values()))

    # ── head and targets ──

    @abstractmethod
    def outputs(self, classes: Sequence[str]) -> int:
        """Return how many outputs the head has for data with these classes."""

    @abstractmethod
    def output_names(self, classes: Sequence[str]) -> tuple[str, ...] | None:
        """Return the names of the outputs, which the bundle keeps; None if they have none."""

    @abstractmethod
    def match(self, source: Source, names: tuple[str, ...] | None, outputs: int, *, by_number: bool = False) -> Source:
        """Return the source with labels as the model counts them; `names` are those of the model's outputs."""

    # ── training ──

    @abstractmethod
    def training_loss(
        self, objective: Objective, labels: NDArray[np.int64], classes: Sequence[str], device: torch.device
    ) -> TrainingLoss:
        """Return the loss of a run; `labels` are those of its whole training split."""

    @abstractmethod
    def default_criterion(self, *, class_balanced: bool) -> str:
        """Return the criterion of a recipe that names none."""

    @abstractmethod
    def validation(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, float]:
        """Return every metric that can be the criterion, by its key in metrics.jsonl; `val_loss` is one of them."""

    def standard_error(self, criterion: str, value: float, images: int) -> float | None:  # noqa: ARG002
        """Return the standard error of a validation metric; None if it is not known, so that every digit counts."""
        return None

    def overfitting(self, training: float, validation: float, images: int) -> list[str]:  # noqa: ARG002
        """Return a warning if training metric and headline are far apart on that many validation images."""
        return []

    # ── evaluation and predictions ──

    @abstractmethod
    def activate(self, outputs: Tensor) -> Tensor:
        """Map the head's outputs (B, K) to what predictions hold."""

    @abstractmethod
    def evaluate(self, predictions: Predictions, source: Source, *, kind: str) -> Metrics:
        """Compute the metrics of some predictions; `source` gives the names of images and classes."""

    @abstractmethod
    def predict(self, outputs: Tensor, names: tuple[str, ...] | None, top: int) -> list[Any]:
        """Return the `Prediction` of each image for the head's outputs (B, K), which are on the CPU."""

    @abstractmethod
    def unread(self, error: str) -> Any:
        """Return the `Prediction` for an image that could not be read."""

    @abstractmethod
    def columns(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
        """Return the Arrow columns of test_predictions.parquet, besides index, name and digest."""
