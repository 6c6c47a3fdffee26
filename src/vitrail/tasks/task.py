"""The interface of a task: everything about a model that depends on what it is asked.

    label -> target -> loss          training
    output -> prediction -> row      predict, serve, export
    predictions -> Metrics           validation, evaluation, report

A task is data plus pure functions, and holds no state. What it takes from the data of a run, such as the mean of a
regression target, are its constants: frozen fields, which `fitted` and `tuned` set in a copy. The bundle records the
name of its task and the constants, so no command needs an option for them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.acceleration.agreement import Agreement, compare_outputs
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.batches import BadImage
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import AUTOMATIC, Kind, Labelling
from vitrail.errors import CheckpointError
from vitrail.tasks.metrics import Metrics, MetricSpec
from vitrail.tasks.objective import Objective
from vitrail.text import number, rounded

FieldType = Literal["string", "float", "strings", "floats"]
TrainingLoss = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Maps outputs (B, K), labels (B), or targets (B, K), and the mixing weights, if any, to the mean loss of the batch and
the sum of the training metric over its images."""


CLASS_SETTINGS = frozenset({"mixing", "data.balance", *(f"objective.{name}" for name in Objective.model_fields)})
"""The settings of a recipe that only some tasks support."""


class Predictions(NamedTuple):
    """The outputs of a model for every readable image."""

    outputs: NDArray[np.float32]
    """(N, K), activated by the task: the probabilities of a classifier. Of masks, what `Task.kept` makes of them."""
    labels: NDArray[Any]
    """(N,), class indices; or targets (N, K), see `vitrail.data.sources.targets`."""
    indices: NDArray[np.int64]
    """(N,): indices into the source."""
    bad: tuple[BadImage, ...] = ()
    """The images that could not be read."""


class LossNote(NamedTuple):
    """How the plotted training and validation losses differ."""

    training: str
    validation: str
    """Two short lines."""
    text: str
    """The same in sentences."""


@dataclass(frozen=True)
class Explained:
    """An output of the model, as an explanation names it."""

    index: int
    name: str | int
    """Its name; its index if it is a class without a name."""
    value: float
    """As predictions hold it: of a classifier, its probability."""
    text: str
    """The value as text: "93.1%"."""
    is_probability: bool = False

    def response(self) -> dict[str, Any]:
        """Return the values of an HTTP response as JSON."""
        key = "probability" if self.is_probability else "value"
        return {"name": str(self.name), "index": self.index, key: rounded(self.value)}


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


NAMED_PROBABILITIES: Mapping[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "index": {"type": "integer"},
            "probability": {"type": "number"},
        },
        "required": ["name", "index", "probability"],
    },
}
"""The JSON schema of the most likely outputs."""
AUGMENTED_ONLY = LossNote(
    "training: augmented images",
    "validation: original images",
    "The training loss is computed on augmented images, with dropout; the validation loss on original images.",
)


def note_of_additions(added: Sequence[str], more: str = "") -> LossNote:
    """Describe a training loss that includes what the validation loss does not; `more` is one more sentence."""
    if not added:
        return AUGMENTED_ONLY
    listed = f"{', '.join(added[:-1])} and {added[-1]}" if len(added) > 1 else added[0]
    text = f"The training loss includes {listed}; the validation loss does not, so the two are not comparable."
    return LossNote(
        f"training: with {', '.join(added)}", "validation: without, so the two are not comparable", f"{text}{more}"
    )  # fmt: skip


class Task(ABC):
    """A task. `classification` is the reference."""

    name: ClassVar[str]
    """As recorded in recipes and bundles."""
    kind: ClassVar[Kind] = "classes"
    """What images are labelled with."""
    output_noun: ClassVar[tuple[str, str]] = ("output", "outputs")
    """What an output of the head is, in singular and plural."""
    activation: ClassVar[str]
    """What `activate` computes, for readers of an exported graph."""
    training_metric: ClassVar[MetricSpec]
    """The metric that is averaged over every training batch; its key in metrics.jsonl has no prefix."""
    criteria: ClassVar[Mapping[str, MetricSpec]]
    """The metrics that can select the best checkpoint, by the name a recipe gives them. The first one is the
    headline. Each has a key, under which `validation` returns it."""
    rows: ClassVar[RowFormat]
    """How predictions are written; see `row_format`."""
    sections: ClassVar[tuple[str, ...]]
    """The sections of a report after the result, by their names in `vitrail.reports.report`."""
    compared_sections: ClassVar[tuple[str, ...]] = ("settings", "curves", "reproduce")
    """The same for the comparison of two runs, in `vitrail.reports.compare`."""
    losses: ClassVar[tuple[str, ...]] = ()
    """The values of objective.loss that the task supports, the default first; empty: it has its own."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """The settings of a recipe about classes that the task supports, of `CLASS_SETTINGS`."""
    metrics: ClassVar[type[Metrics]]
    """The result type."""
    is_tuned: ClassVar[bool] = False
    """Whether some of its constants follow from predictions (`tuned`)."""
    is_dense: ClassVar[bool] = False
    """Whether the model has an output per patch, so that its pool has to be "patches"."""

    @property
    def headline(self) -> MetricSpec:
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

    def labelling(self, names: tuple[str, ...] | None) -> Labelling:  # noqa: ARG002
        """Return how to read the labels that a model with these outputs is evaluated on."""
        return Labelling(self.kind)

    # ── constants ──

    def fitted(self, labels: NDArray[Any], labelling: Labelling = AUTOMATIC) -> Self:  # noqa: ARG002
        """Return the task with the constants that follow from the labels of the whole training split.

        `labelling` is how they were read.
        """
        return self

    def tuned(self, predictions: Predictions) -> Self:  # noqa: ARG002
        """Return the task with the constants that follow from a model's predictions for the validation split."""
        return self

    @property
    def constants(self) -> dict[str, Any]:
        """The constants as JSON-compatible values, as the bundle records them."""
        return {}

    def with_constants(self, constants: Mapping[str, Any], outputs: int) -> Self:  # noqa: ARG002
        """Return the task with recorded constants; raise if they do not suit a head with that many outputs."""
        if constants:
            raise CheckpointError(
                f"the bundle has constants of the task {self.name} ({', '.join(map(str, constants))}), which has none; "
                "was it edited?"
            )
        return self

    # ── training ──

    def resolved(self, objective: Objective) -> Objective:
        """Return the objective with the default loss of the task, if it names none."""
        return objective.replace(loss=self.losses[0]) if objective.loss is None and self.losses else objective

    def unsupported(self, objective: Objective, mixing: Mixing | None, *, balance: bool) -> dict[str, Any]:
        """Return the settings of a recipe that the task does not support, by their dotted names."""
        default = Objective()
        chosen = (
            {f"objective.{name}": value for name, value in objective if value != getattr(default, name)}
            | ({"mixing": "on"} if mixing is not None and mixing.on else {})
            | ({"data.balance": "true"} if balance else {})
        )
        supported = self.settings | ({"objective.loss"} if objective.loss in self.losses else set())
        return {name: value for name, value in chosen.items() if name not in supported}

    def check(self, objective: Objective, mixing: Mixing | None, *, balance: bool) -> list[str]:
        """Return a sentence for each setting of a recipe that the task does not support."""
        losses = f"choose {' or '.join(self.losses)}" if self.losses else "leave it out"
        return [
            f"{name} is {value}, but the task {self.name} does not support it; "
            f"{losses if name == 'objective.loss' else 'leave it out'}"
            for name, value in self.unsupported(objective, mixing, balance=balance).items()
        ]

    def loss_note(self, recipe: Mapping[str, Any]) -> LossNote:  # noqa: ARG002
        """Describe how the plotted losses of a resolved recipe differ."""
        return AUGMENTED_ONLY

    @abstractmethod
    def training_loss(
        self, objective: Objective, labels: NDArray[Any], classes: Sequence[str], device: torch.device
    ) -> TrainingLoss:
        """Return the loss of a run; `labels` are those of its whole training split."""

    def placeholders(self, pixels: Tensor, outputs: int) -> Tensor:  # noqa: ARG002
        """Return labels of the right shape and type for images (B, C, H, W), to forecast the memory of a step."""
        return torch.zeros(len(pixels), dtype=torch.int64, device=pixels.device)

    @abstractmethod
    def default_criterion(self, *, class_balanced: bool) -> str:
        """Return the criterion of a recipe that names none."""

    @abstractmethod
    def validation(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, float]:
        """Return every metric that can be the criterion, by its key in metrics.jsonl; `val_loss` is one of them."""

    def standard_error(self, criterion: str, value: float, images: int) -> float | None:  # noqa: ARG002
        """Return the standard error of a criterion with this value; None if it is not known, so every digit counts."""
        return None

    def overfitting(self, training: float, validation: float, images: int) -> list[str]:  # noqa: ARG002
        """Return a warning if training metric and headline are far apart on that many validation images."""
        return []

    # ── evaluation and predictions ──

    @abstractmethod
    def activate(self, outputs: Tensor) -> Tensor:
        """Map the head's outputs (B, K) to what predictions hold."""

    def kept(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `Predictions` hold of a batch's outputs (B, …) on their device, and of its labels (B, …)."""
        return self.activate(outputs), labels

    def agreement(self, exact: Tensor, quick: Tensor) -> Agreement:
        """Compare outputs of a faster path with the exact ones; by default relative to the largest output."""
        return compare_outputs(exact, quick)

    def explained(self, outputs: Tensor, names: tuple[str, ...] | None, index: int | None) -> Explained:
        """Return the output (of K) that an explanation is about: the given one, or else the largest."""
        place = int(outputs.argmax()) if index is None else index
        value = float(self.activate(outputs[None])[0, place])
        return Explained(place, f"output {place}" if names is None else names[place], value, number(value))

    @abstractmethod
    def evaluate(self, predictions: Predictions, source: Source, *, kind: str) -> Metrics:
        """Compute the metrics of some predictions; `source` gives the names of images and classes."""

    @abstractmethod
    def predict(self, outputs: Tensor, names: tuple[str, ...] | None, top: int) -> list[Any]:
        """Return the `Prediction` of each image for the head's outputs (B, K), which are on the CPU."""

    @abstractmethod
    def unread(self, error: str) -> Any:
        """Return the `Prediction` for an image that could not be read."""

    def row_format(self, names: tuple[str, ...] | None) -> RowFormat:  # noqa: ARG002
        """Return how the predictions of a model with these output names are written."""
        return self.rows

    @abstractmethod
    def columns(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
        """Return the Arrow columns of test_predictions.parquet, besides index, name and digest."""
