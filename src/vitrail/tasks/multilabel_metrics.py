"""The metrics of a multi-label classifier."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import output_names_of
from vitrail.errors import DataError
from vitrail.metrics.intervals import Interval, bootstrap_mean, wilson_interval
from vitrail.metrics.multilabel import (
    co_occurring_mistakes,
    exact_match,
    hamming_accuracy,
    log_losses,
    macro_f1,
    mean_average_precision,
    micro_average_precision,
    micro_f1,
    per_label,
    predicted_labels,
)
from vitrail.metrics.multilabel_intervals import bootstrap_multilabel
from vitrail.tasks.metrics import HELD_OUT, Metric, Metrics, MetricSpec, ResultTable
from vitrail.tasks.task import Predictions
from vitrail.text import as_percent, isolated, number, percent, plural

WORST = 20
"""How many of the images with the largest loss are kept."""
LISTED = 10
"""Mistakes in the tables; the JSON has more."""
SHOWN_LABELS = 20
CONFUSED = 50
"""How many pairs of mistakes are kept."""
MAP = MetricSpec(
    "mean average precision",
    explanation="The mean over labels of the average precision: 1 if every image with a label ranks above all without.",
)
MICRO_AP = MetricSpec(
    "average precision of all pairs", explanation="Every pair of an image and a label, ranked together."
)
MACRO_F1 = MetricSpec(
    "macro-F1", explanation="The mean F1 over labels, at the thresholds chosen on the validation split."
)
MICRO_F1 = MetricSpec("micro-F1", explanation="F1 over all pairs of an image and a label, at the same thresholds.")
EXACT_MATCH = MetricSpec("exact matches", explanation="The fraction of images whose labels are all right.")
LABEL_ACCURACY = MetricSpec(
    "label accuracy", explanation="The fraction of right pairs of an image and a label; high if labels are rare."
)
CHANCE = MetricSpec("chance", explanation="The mean average precision of a random order: how frequent labels are.")
LOSS = MetricSpec(
    "log loss",
    "number",
    lower_is_better=True,
    ends=(0.0, None),
    explanation="The mean binary cross-entropy over labels.",
)


class LabelScore(NamedTuple):
    """The metrics of one label; None where undefined."""

    name: str
    images: int
    """How many images have it."""
    threshold: float
    average_precision: float | None
    precision: float | None
    recall: float | None
    f1: float | None


class ConfusedLabels(NamedTuple):
    """A label that was missed, and one that was predicted in its place."""

    missed: str
    added: str
    images: int


@dataclass(frozen=True)
class WrongLabels:
    """An image whose labels are predicted badly."""

    index: int
    """Its index in the source."""
    name: str
    true: tuple[str, ...]
    predicted: tuple[str, ...]
    loss: float


@dataclass(frozen=True, eq=False, kw_only=True)
class MultilabelMetrics(Metrics):
    """The metrics of a multi-label classifier."""

    task: ClassVar[str] = "multilabel"
    mean_average_precision: float
    mean_average_precision_interval: Interval
    micro_average_precision: float
    macro_f1: float
    macro_f1_interval: Interval
    micro_f1: float | None
    exact_match: float
    exact_match_interval: Interval
    label_accuracy: float
    loss: float
    loss_interval: Interval
    per_label: tuple[LabelScore, ...]
    confused: tuple[ConfusedLabels, ...]
    """The most frequent pairs of a missed label and one predicted in its place."""
    worst: tuple[WrongLabels, ...]
    """The wrong predictions with the largest loss, in descending order."""

    def __post_init__(self) -> None:
        """Raise if the fields contradict each other, as after an edit of result.json."""
        if self.images < 1 or not self.per_label:
            raise ValueError("the fields of the result are inconsistent")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels."""
        return tuple(label.name for label in self.per_label)

    @property
    def chance(self) -> float:
        """The mean average precision of a random order."""
        shares = [label.images / self.images for label in self.per_label if label.images]
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def weakest_first(self) -> list[LabelScore]:
        """The labels with images, sorted by average precision."""
        return sorted((row for row in self.per_label if row.images), key=lambda row: row.average_precision or 0.0)

    @property
    def headline(self) -> Metric:
        """The mean average precision."""
        return Metric(MAP, self.mean_average_precision, self.mean_average_precision_interval)

    @property
    def numbers(self) -> list[Metric]:
        """Every metric, the mean average precision first."""
        return [
            self.headline,
            Metric(MACRO_F1, self.macro_f1, self.macro_f1_interval),
            Metric(MICRO_F1, self.micro_f1),
            Metric(EXACT_MATCH, self.exact_match, self.exact_match_interval),
            Metric(LABEL_ACCURACY, self.label_accuracy),
            Metric(MICRO_AP, self.micro_average_precision),
            Metric(CHANCE, self.chance),
            Metric(LOSS, self.loss, self.loss_interval),
        ]

    @property
    def clauses(self) -> list[str]:
        """Chance, exact matches and the weakest label."""
        clauses = [
            f"chance {as_percent(self.chance)}",
            f"all labels right for {as_percent(self.exact_match)} of the images",
        ]
        weakest = self.weakest_first
        if weakest and (weakest[0].average_precision or 0.0) < 1:
            clauses.append(f"weakest label {weakest[0].name}")
        return clauses

    @property
    def lead(self) -> list[str]:
        """Chance, exact matches, the weakest label and the most frequent pair of mistakes."""
        sentences = [
            f"A random order would have {as_percent(self.chance)}.",
            f"All labels are right for {as_percent(self.exact_match)} of the images.",
        ]
        weakest = self.weakest_first
        if weakest and (weakest[0].average_precision or 0.0) < 1:
            value = as_percent(weakest[0].average_precision)
            sentences.append(f"The weakest label is {isolated(weakest[0].name)}, with an average precision of {value}.")
        for pair in self.confused[:1]:
            if pair.images > 1:
                missed, added, times = isolated(pair.missed), isolated(pair.added), plural(pair.images, "time")
                sentences.append(f"The most frequent pair of mistakes is {missed} missed and {added} added ({times}).")
        return sentences

    @property
    def tables(self) -> list[ResultTable]:
        """A row per label, the weakest first; the most frequent pairs of mistakes; the worst predictions."""
        rows = self.weakest_first
        without = len(self.per_label) - len(rows)
        header = ("label", "images", "average precision", "F1", "precision", "recall", "threshold")
        labels = ResultTable(
            "Labels, the weakest first",
            header,
            [
                (
                    row.name,
                    f"{row.images:,}",
                    *(as_percent(value) for value in (row.average_precision, row.f1, row.precision, row.recall)),
                    number(row.threshold),
                )
                for row in rows
            ],
            header[1:],
            SHOWN_LABELS,
            f"The model has {without:,} more {'label' if without == 1 else 'labels'} that no image has."
            if without
            else "",
        )
        pairs = ResultTable(
            "Missed labels, and those predicted in their place",
            ("images", "missed", "predicted instead"),
            [(f"{row.images:,}", row.missed, row.added) for row in self.confused[:LISTED]],
            ("images",),
        )
        worst = ResultTable(
            "The worst predictions",
            ("loss", "true labels", "predicted labels", "image"),
            [
                (number(row.loss), ", ".join(row.true) or "none", ", ".join(row.predicted) or "none", row.name)
                for row in self.worst[:LISTED]
            ],
            ("loss",),
        )
        return [labels, *([pairs] if self.confused else []), *([worst] if self.worst else [])]

    @property
    def details(self) -> dict[str, Any]:
        """The metrics as JSON."""
        return {
            "mean_average_precision": self.mean_average_precision,
            "mean_average_precision_interval": list(self.mean_average_precision_interval),
            "micro_average_precision": self.micro_average_precision,
            "macro_f1": self.macro_f1,
            "macro_f1_interval": list(self.macro_f1_interval),
            "micro_f1": self.micro_f1,
            "exact_match": self.exact_match,
            "exact_match_interval": list(self.exact_match_interval),
            "label_accuracy": self.label_accuracy,
            "loss": self.loss,
            "loss_interval": list(self.loss_interval),
            "per_label": [row._asdict() for row in self.per_label],
            "confused": [row._asdict() for row in self.confused],
            "worst": [asdict(row) for row in self.worst],
        }


def multilabel_metrics(
    predictions: Predictions, source: Source, *, kind: str = HELD_OUT, thresholds: Sequence[float]
) -> MultilabelMetrics:
    """Compute the metrics of some predictions; `source` gives the names of images and labels."""
    probabilities, truth, limits = predictions.outputs, predictions.labels, np.array(thresholds, np.float64)
    names, images = output_names_of(source), len(predictions.labels)
    if not truth.any():
        raise DataError(f"none of the {images:,} images has a label, so predictions cannot be evaluated; give others")
    predicted = predicted_labels(probabilities, limits)
    losses, scores = log_losses(probabilities, truth), per_label(probabilities, truth, limits)
    intervals = bootstrap_multilabel(probabilities, truth, limits)
    exact, micro = exact_match(predicted, truth), micro_f1(predicted, truth)
    columns = ([None if np.isnan(x) else float(x) for x in column] for column in scores[1:])
    precision, recall, f1, average = columns
    labels = tuple(map(LabelScore, names, scores.images.tolist(), limits.tolist(), average, precision, recall, f1))
    confused = co_occurring_mistakes(predicted, truth, CONFUSED)
    return MultilabelMetrics(
        images=images,
        kind=kind,
        mean_average_precision=mean_average_precision(probabilities, truth),
        mean_average_precision_interval=intervals.mean_average_precision,
        micro_average_precision=micro_average_precision(probabilities, truth),
        macro_f1=macro_f1(predicted, truth),
        macro_f1_interval=intervals.macro_f1,
        micro_f1=None if np.isnan(micro) else micro,
        exact_match=exact,
        exact_match_interval=wilson_interval(round(exact * images), images),
        label_accuracy=hamming_accuracy(predicted, truth),
        loss=float(losses.mean()),
        loss_interval=bootstrap_mean(losses),
        per_label=labels,
        confused=tuple(ConfusedLabels(names[row.missed], names[row.added], row.images) for row in confused),
        worst=_worst(predictions, source, names, predicted, losses),
        bad=predictions.bad,
        warnings=tuple(_warnings(labels, images)),
    )


def _worst(
    predictions: Predictions, source: Source, names: Sequence[str], predicted: Any, losses: Any
) -> tuple[WrongLabels, ...]:
    truth = predictions.labels.astype(bool)
    wrong = np.flatnonzero((predicted != truth).any(axis=1))
    rows = wrong[np.argsort(-losses[wrong], kind="stable")][:WORST].tolist()

    def named(has: Any) -> tuple[str, ...]:
        return tuple(names[place] for place in np.flatnonzero(has).tolist())

    return tuple(
        WrongLabels(
            int(predictions.indices[row]),
            source.name(int(predictions.indices[row])),
            named(truth[row]),
            named(predicted[row]),
            float(losses[row]),
        )
        for row in rows
    )


def _warnings(labels: Sequence[LabelScore], images: int) -> list[str]:
    """Warn of labels that are ranked no better than by chance."""
    weak = [
        label.name for label in labels if label.images and (label.average_precision or 0.0) <= label.images / images < 1
    ]
    if not weak:
        return []
    more = f" and {len(weak) - 3:,} more" if len(weak) > 3 else ""
    shares = "" if len(weak) > 1 else f" ({percent(next(x.images for x in labels if x.name == weak[0]) / images)}%)"
    label, are, them = ("labels", "are", "them") if len(weak) > 1 else ("label", "is", "it")
    return [
        f"the {label} {', '.join(weak[:3])}{more} {are} ranked no better than by chance{shares}; add images with "
        f"{them}, or check that the images show {them}"
    ]
