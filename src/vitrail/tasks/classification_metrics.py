"""The metrics of a classifier."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainValidator

from vitrail.data.sources.source import Source
from vitrail.errors import DataError
from vitrail.metrics.baselines import Baselines, baselines, warnings_about
from vitrail.metrics.classification import (
    Confusion,
    ReliabilityBin,
    balanced_accuracy,
    confusion_matrix,
    expected_calibration_error,
    log_losses,
    macro_f1,
    most_confused,
    per_class,
    reliability,
    top_k_right,
)
from vitrail.metrics.intervals import Interval, bootstrap_mean, bootstrap_scores, wilson_interval
from vitrail.tasks.metrics import HELD_OUT, Metric, Metrics, MetricSpec, ResultTable
from vitrail.tasks.task import Predictions
from vitrail.text import as_percent, isolated, percent, plural

WORST = 20
"""How many of the most confident mistakes are kept."""
LISTED = 10
"""Confusions and mistakes in the tables; the JSON has more."""
SHOWN_CLASSES = 20
ACCURACY = MetricSpec("accuracy", explanation="The fraction of correct predictions, with its Wilson interval.")
TOP5 = MetricSpec("top-5 accuracy", explanation="How often the true class is among the five most probable.")
BALANCED_ACCURACY = MetricSpec("balanced accuracy", explanation="The mean recall over classes.")
MACRO_F1 = MetricSpec(
    "macro-F1", explanation="The mean F1 (of precision and recall) over classes, whatever their size."
)
CHANCE = MetricSpec("chance", explanation="The accuracy of a uniform guess.")
LOG_LOSS = MetricSpec(
    "log loss", "number", lower_is_better=True, ends=(0.0, None),
    explanation="Cross-entropy of the true classes; 0 is perfect, and confident mistakes cost the most.",
)  # fmt: skip
CALIBRATION = MetricSpec("calibration error", lower_is_better=True)
Matrix = Annotated[NDArray[np.int64], PlainValidator(lambda rows: np.array(rows, np.int64))]


class ClassScore(NamedTuple):
    """The metrics of one class; None where undefined."""

    name: str
    images: int
    precision: float | None
    recall: float | None
    f1: float | None


@dataclass(frozen=True)
class Mistake:
    """A misclassified image."""

    index: int
    name: str
    true: str
    predicted: str
    confidence: float


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassificationMetrics(Metrics):
    """The metrics of a classifier on some images."""

    task: ClassVar[str] = "classification"
    names_headline: ClassVar[bool] = False  # a percentage of images that is not named is the accuracy
    classes: tuple[str, ...]
    top1: float
    top1_interval: Interval
    """A Wilson interval."""
    top5: float | None
    """None with fewer than 6 classes."""
    top5_interval: Interval | None
    """A Wilson interval."""
    loss: float
    loss_interval: Interval
    """A bootstrap interval."""
    balanced_accuracy: float
    balanced_accuracy_interval: Interval
    """A bootstrap interval, as for macro-F1."""
    macro_f1: float
    macro_f1_interval: Interval
    per_class: tuple[ClassScore, ...]
    confusion: Matrix
    """(K, K): rows are true classes, columns predicted classes."""
    ece: float
    reliability: tuple[ReliabilityBin, ...]
    worst: tuple[Mistake, ...]
    """The most confident mistakes, in descending order of confidence."""

    def __post_init__(self) -> None:
        """Raise if the fields contradict each other, as after an edit of result.json."""
        count = len(self.classes)
        scored = all(row.recall is not None and row.f1 is not None for row in self.per_class if row.images)
        consistent = self.confusion.shape == (count, count) and len(self.per_class) == count
        if self.images < 1 or self.confusion.sum() < 1 or not consistent or not scored:
            raise ValueError("the fields of the result are inconsistent")

    @property
    def baselines(self) -> Baselines:
        """The accuracy of always predicting the largest class, and of chance."""
        return baselines(self.confusion)

    @property
    def weakest_first(self) -> list[ClassScore]:
        """The classes with images, sorted by recall, then by F1."""
        return sorted((row for row in self.per_class if row.images), key=lambda row: (row.recall, row.f1))

    @property
    def weakest(self) -> ClassScore | None:
        """The class with the lowest recall; None if every prediction is right."""
        return self.weakest_first[0] if self.top1 < 1 else None

    def most_confused(self, most: int) -> list[Confusion]:
        """Return the most frequent confusions, as class indices."""
        return most_confused(self.confusion, most)

    @property
    def headline(self) -> Metric:
        """The accuracy."""
        return Metric(ACCURACY, self.top1, self.top1_interval)

    @property
    def numbers(self) -> list[Metric]:
        """Every metric, the accuracy first."""
        base = self.baselines
        majority = MetricSpec(
            "majority class", explanation=f"The accuracy of always predicting {self.classes[base.majority_class]}."
        )
        calibration = CALIBRATION._replace(
            explanation=f"The mean gap between confidence and accuracy (ECE, {len(self.reliability)} bins)."
        )
        return [
            self.headline,
            *([Metric(TOP5, self.top5, self.top5_interval)] if self.top5 is not None else []),
            Metric(BALANCED_ACCURACY, self.balanced_accuracy, self.balanced_accuracy_interval),
            Metric(MACRO_F1, self.macro_f1, self.macro_f1_interval),
            Metric(majority, base.majority),
            Metric(CHANCE, base.chance),
            Metric(LOG_LOSS, self.loss, self.loss_interval),
            Metric(calibration, self.ece),
        ]

    @property
    def clauses(self) -> list[str]:
        """The baselines and the weakest class."""
        base, clauses = self.baselines, []
        if base.majority < 1:  # with a single class, every baseline is 100%
            largest = self.classes[base.majority_class]
            clauses.append(f"always {largest!r} gives {percent(base.majority)}%, chance {percent(base.chance)}%")
        if self.weakest is not None:
            clauses.append(f"weakest class {self.weakest.name}")
        return clauses

    @property
    def lead(self) -> list[str]:
        """The baselines, the weakest class and the most frequent confusion."""
        base = self.baselines
        always, chance = as_percent(base.majority), as_percent(base.chance)
        sentences = [
            f"Always predicting {isolated(self.classes[base.majority_class])} gives {always}, chance {chance}."
        ]
        if self.weakest is None:
            return [*sentences, "Every prediction is correct."]
        weakest = isolated(self.weakest.name)
        sentences.append(f"The weakest class is {weakest}, with a recall of {as_percent(self.weakest.recall)}.")
        for worst in self.most_confused(1):
            if worst.images > 1:
                true, predicted = (isolated(self.classes[place]) for place in (worst.true, worst.predicted))
                times = plural(worst.images, "time")
                sentences.append(f"The most frequent confusion is {true} predicted as {predicted} ({times}).")
        return sentences

    @property
    def remarks(self) -> list[str]:
        """The mean confidence and the accuracy, which are equal for a calibrated model."""
        full = [row for row in self.reliability if row.confidence is not None]
        confidence = sum(row.images * (row.confidence or 0) for row in full) / self.images
        return [f"The mean confidence is {percent(confidence)}%; the accuracy is {percent(self.top1)}%."]

    @property
    def tables(self) -> list[ResultTable]:
        """A row per class, the weakest first; the most frequent confusions; the most confident mistakes."""
        rows = self.weakest_first
        without = len(self.per_class) - len(rows)
        absent = f"The model has {without:,} more {'class' if without == 1 else 'classes'} without images here."
        classes = ResultTable(
            "Classes, the weakest first",
            ("class", "images", "recall", "precision", "F1"),
            [(r.name, f"{r.images:,}", as_percent(r.recall), as_percent(r.precision), as_percent(r.f1)) for r in rows],
            ("images", "recall", "precision", "F1"),
            SHOWN_CLASSES,
            absent if without else "",
        )
        confused = self.most_confused(LISTED)
        if not confused:
            return [classes]
        confusions = ResultTable(
            "Confusions",
            ("images", "true class", "predicted"),
            [(f"{row.images:,}", self.classes[row.true], self.classes[row.predicted]) for row in confused],
            ("images",),
        )
        mistakes = ResultTable(
            "The most confident mistakes",
            ("confidence", "true class", "predicted", "image"),
            [(f"{percent(m.confidence)}%", m.true, m.predicted, m.name) for m in self.worst[:LISTED]],
            ("confidence",),
        )
        return [classes, confusions, mistakes]

    @property
    def details(self) -> dict[str, Any]:
        """The metrics as JSON."""
        base = self.baselines
        return {
            "classes": list(self.classes),
            "top1": self.top1,
            "top1_interval": list(self.top1_interval),
            "top5": self.top5,
            "top5_interval": None if self.top5_interval is None else list(self.top5_interval),
            "loss": self.loss,
            "loss_interval": list(self.loss_interval),
            "balanced_accuracy": self.balanced_accuracy,
            "balanced_accuracy_interval": list(self.balanced_accuracy_interval),
            "macro_f1": self.macro_f1,
            "macro_f1_interval": list(self.macro_f1_interval),
            "baselines": {**base._asdict(), "majority_class": self.classes[base.majority_class]},
            "weakest": None if self.weakest is None else self.weakest.name,
            "per_class": [row._asdict() for row in self.per_class],
            "confusion": self.confusion.tolist(),
            "ece": self.ece,
            "reliability": [row._asdict() for row in self.reliability],
            "worst": [asdict(row) for row in self.worst],
        }


def classification_metrics(predictions: Predictions, source: Source, *, kind: str = HELD_OUT) -> ClassificationMetrics:
    """Compute the metrics of some predictions; `source` gives the names of images and classes."""
    probabilities, labels = predictions.outputs, predictions.labels
    outputs = probabilities.shape[1]
    if outputs != len(source.classes):
        raise DataError(f"the model has {outputs:,} classes and the data {len(source.classes):,}; match them first")
    predicted = probabilities.argmax(axis=1)
    matrix = confusion_matrix(labels, predicted, outputs)
    losses, table = log_losses(probabilities, labels), reliability(probabilities, labels)
    right = int((predicted == labels).sum())
    among_five = int(top_k_right(probabilities, labels, 5).sum())
    interval, scores = wilson_interval(right, len(labels)), bootstrap_scores(matrix)
    return ClassificationMetrics(
        images=len(labels),
        kind=kind,
        classes=tuple(source.classes),
        top1=right / len(labels),
        top1_interval=interval,
        top5=among_five / len(labels) if outputs > 5 else None,
        top5_interval=wilson_interval(among_five, len(labels)) if outputs > 5 else None,
        loss=float(losses.mean()),
        loss_interval=bootstrap_mean(losses),
        balanced_accuracy=balanced_accuracy(matrix),
        balanced_accuracy_interval=scores.balanced_accuracy,
        macro_f1=macro_f1(matrix),
        macro_f1_interval=scores.macro_f1,
        per_class=_class_scores(matrix, source.classes),
        confusion=matrix,
        ece=expected_calibration_error(table),
        reliability=table,
        worst=_worst(predictions, source),
        bad=predictions.bad,
        warnings=tuple(warnings_about(matrix, interval, source.classes)),
    )


def _class_scores(matrix: NDArray[np.int64], classes: Iterable[str]) -> tuple[ClassScore, ...]:
    scores = per_class(matrix)
    numbers = ([None if np.isnan(x) else float(x) for x in column] for column in scores[1:])
    return tuple(map(ClassScore, classes, scores.images.tolist(), *numbers))


def _worst(predictions: Predictions, source: Source) -> tuple[Mistake, ...]:
    confidence, predicted = predictions.outputs.max(axis=1), predictions.outputs.argmax(axis=1)
    wrong = np.flatnonzero(predicted != predictions.labels)
    rows = wrong[np.argsort(-confidence[wrong], kind="stable")][:WORST]
    return tuple(
        Mistake(
            int(predictions.indices[row]),
            source.name(int(predictions.indices[row])),
            source.classes[predictions.labels[row]],
            source.classes[predicted[row]],
            float(confidence[row]),
        )
        for row in rows
    )
