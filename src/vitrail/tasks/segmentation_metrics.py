"""The metrics of a segmentation model."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import output_names_of
from vitrail.errors import DataError
from vitrail.metrics.intervals import Interval, bootstrap_mean
from vitrail.metrics.segmentation import (
    Counts,
    bootstrap_segmentation,
    mean_class_accuracy,
    mean_dice,
    mean_iou,
    mean_iou_of_each,
    per_class,
    pixel_accuracy,
    pixel_accuracy_of_each,
)
from vitrail.tasks.metrics import HELD_OUT, Metric, Metrics, MetricSpec, ResultTable
from vitrail.tasks.task import Predictions
from vitrail.text import as_percent, isolated, plural

EXTREMES = 12
"""How many of the best, the middle and the worst images are kept."""
LISTED = 10
SHOWN_CLASSES = 20
MEAN_IOU = MetricSpec(
    "mean IoU",
    explanation="Intersection over union of predicted and true pixels: the mean over the classes that occur.",
)
PIXEL_ACCURACY = MetricSpec("pixel accuracy", explanation="The fraction of labelled pixels whose class is right.")
MEAN_DICE = MetricSpec(
    "mean Dice", explanation="2 × intersection / (predicted + true pixels): F1, the mean over classes."
)
CLASS_ACCURACY = MetricSpec("mean class accuracy", explanation="The mean over classes of the fraction of right pixels.")
LARGEST_CLASS = MetricSpec(
    "mean IoU of the largest class", explanation="If every pixel were predicted as the most frequent class."
)
LOSS = MetricSpec(
    "loss",
    "number",
    lower_is_better=True,
    ends=(0.0, None),
    explanation="The mean cross-entropy of the labelled pixels, averaged over images.",
)


class ClassScore(NamedTuple):
    """The metrics of one class; None where undefined."""

    name: str
    images: int
    """How many images have pixels of it."""
    fraction: float
    """The fraction of the labelled pixels that are of this class."""
    iou: float | None
    dice: float | None
    precision: float | None
    recall: float | None


@dataclass(frozen=True)
class ImageScore:
    """The metrics of one image."""

    index: int
    """Its index in the source."""
    name: str
    mean_iou: float
    pixel_accuracy: float


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentationMetrics(Metrics):
    """The metrics of a segmentation model."""

    task: ClassVar[str] = "segmentation"
    mean_iou: float
    mean_iou_interval: Interval
    mean_dice: float
    pixel_accuracy: float
    pixel_accuracy_interval: Interval
    class_accuracy: float
    loss: float
    loss_interval: Interval
    per_class: tuple[ClassScore, ...]
    worst: tuple[ImageScore, ...]
    """The images with the lowest mean IoU, in ascending order."""
    median: tuple[ImageScore, ...]
    """Images in the middle, in ascending order."""
    best: tuple[ImageScore, ...]
    """The images with the highest mean IoU, in descending order."""

    def __post_init__(self) -> None:
        """Raise if the fields contradict each other, as after an edit of result.json."""
        if self.images < 1 or not self.per_class:
            raise ValueError("the fields of the result are inconsistent")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes."""
        return tuple(row.name for row in self.per_class)

    @property
    def weakest_first(self) -> list[ClassScore]:
        """The classes with pixels, sorted by IoU."""
        return sorted((row for row in self.per_class if row.images), key=lambda row: row.iou or 0.0)

    @property
    def largest_class(self) -> float:
        """The mean IoU if every pixel were predicted as the most frequent class."""
        present = [row.fraction for row in self.per_class if row.images]
        return max(present) / len(present) if present else 0.0

    @property
    def headline(self) -> Metric:
        """The mean IoU."""
        return Metric(MEAN_IOU, self.mean_iou, self.mean_iou_interval)

    @property
    def numbers(self) -> list[Metric]:
        """Every metric, the mean IoU first."""
        return [
            self.headline,
            Metric(PIXEL_ACCURACY, self.pixel_accuracy, self.pixel_accuracy_interval),
            Metric(MEAN_DICE, self.mean_dice),
            Metric(CLASS_ACCURACY, self.class_accuracy),
            Metric(LARGEST_CLASS, self.largest_class),
            Metric(LOSS, self.loss, self.loss_interval),
        ]

    @property
    def clauses(self) -> list[str]:
        """Pixel accuracy, the baseline and the weakest class."""
        clauses = [
            f"{as_percent(self.pixel_accuracy)} of the pixels right",
            f"the most frequent class everywhere would have {as_percent(self.largest_class)}",
        ]
        weakest = self.weakest_first
        if len(weakest) > 1:
            clauses.append(f"weakest class {weakest[0].name} ({as_percent(weakest[0].iou)})")
        return clauses

    @property
    def lead(self) -> list[str]:
        """Pixel accuracy, the baseline and the weakest class."""
        sentences = [
            f"{as_percent(self.pixel_accuracy)} of the pixels have the right class.",
            f"Predicting the most frequent class everywhere would give a mean IoU of {as_percent(self.largest_class)}.",
        ]
        weakest = self.weakest_first
        if len(weakest) > 1:
            iou = as_percent(weakest[0].iou)
            sentences.append(f"The weakest class is {isolated(weakest[0].name)}, with an IoU of {iou}.")
        return sentences

    @property
    def remarks(self) -> list[str]:
        """At which size the metrics are computed."""
        return ["Masks are compared at the size of the model's input."]

    @property
    def tables(self) -> list[ResultTable]:
        """A row per class, the weakest first; the images with the lowest mean IoU."""
        rows = self.weakest_first
        without = len(self.per_class) - len(rows)
        header = ("class", "images", "fraction of pixels", "IoU", "Dice", "precision", "recall")
        classes = ResultTable(
            "Classes, the weakest first",
            header,
            [
                (
                    row.name,
                    f"{row.images:,}",
                    *(as_percent(value) for value in (row.fraction, row.iou, row.dice, row.precision, row.recall)),
                )
                for row in rows
            ],
            header[1:],
            SHOWN_CLASSES,
            f"The model has {plural(without, 'more class', 'more classes')} that no image has." if without else "",
        )
        worst = ResultTable(
            "The images with the lowest mean IoU",
            ("mean IoU", "pixel accuracy", "image"),
            [(as_percent(row.mean_iou), as_percent(row.pixel_accuracy), row.name) for row in self.worst[:LISTED]],
            ("mean IoU", "pixel accuracy"),
        )
        return [classes, worst]

    @property
    def details(self) -> dict[str, Any]:
        """The metrics as JSON."""
        return {
            "mean_iou": self.mean_iou,
            "mean_iou_interval": list(self.mean_iou_interval),
            "mean_dice": self.mean_dice,
            "pixel_accuracy": self.pixel_accuracy,
            "pixel_accuracy_interval": list(self.pixel_accuracy_interval),
            "class_accuracy": self.class_accuracy,
            "loss": self.loss,
            "loss_interval": list(self.loss_interval),
            "per_class": [row._asdict() for row in self.per_class],
            **{name: [asdict(row) for row in getattr(self, name)] for name in ("worst", "median", "best")},
        }


def counts_of(predictions: Predictions) -> Counts:
    """Return the correct, predicted and true pixels (N, 3, K) in the predictions of a segmentation model."""
    whole = predictions.outputs[:, :2].astype(np.int64)
    return np.concatenate([whole, predictions.labels[:, None].astype(np.int64)], axis=1)


def losses_of(predictions: Predictions) -> NDArray[np.float64]:
    """Return the mean loss of each image's labelled pixels (N,); 0 if it has none."""
    summed = predictions.outputs[:, 2].astype(np.float64).sum(axis=1)
    return np.asarray(summed / np.maximum(predictions.labels.sum(axis=1), 1))


def segmentation_metrics(predictions: Predictions, source: Source, *, kind: str = HELD_OUT) -> SegmentationMetrics:
    """Compute the metrics of some predictions; `source` gives the names of images and classes."""
    names, counts = output_names_of(source), counts_of(predictions)
    pixels = counts[:, 2].sum()
    if not pixels:
        raise DataError(
            f"none of the {len(counts):,} images has a labelled pixel, so predictions cannot be evaluated; give others"
        )
    losses, intervals, scores = losses_of(predictions), bootstrap_segmentation(counts), per_class(counts)
    columns = (
        [None if math.isnan(x) else float(x) for x in column]
        for column in (scores.iou, scores.dice, scores.precision, scores.recall)
    )
    classes = tuple(map(ClassScore, names, scores.images.tolist(), (scores.pixels / pixels).tolist(), *columns))
    worst, median, best = _extremes(predictions, source, counts)
    return SegmentationMetrics(
        images=len(counts),
        kind=kind,
        mean_iou=mean_iou(counts),
        mean_iou_interval=intervals.mean_iou,
        mean_dice=mean_dice(counts),
        pixel_accuracy=pixel_accuracy(counts),
        pixel_accuracy_interval=intervals.pixel_accuracy,
        class_accuracy=mean_class_accuracy(counts),
        loss=float(losses.mean()),
        loss_interval=bootstrap_mean(losses),
        per_class=classes,
        worst=worst,
        median=median,
        best=best,
        bad=predictions.bad,
        warnings=tuple(_warnings(classes)),
    )


def _extremes(predictions: Predictions, source: Source, counts: Counts) -> list[tuple[ImageScore, ...]]:
    """Return the images with the lowest mean IoU, those in the middle, and those with the highest."""
    ious, right = mean_iou_of_each(counts), pixel_accuracy_of_each(counts)
    labelled = np.flatnonzero(~np.isnan(ious))
    ordered = labelled[np.argsort(ious[labelled], kind="stable")]
    middle = max(0, (len(ordered) - EXTREMES) // 2)
    return [
        tuple(
            ImageScore(
                int(predictions.indices[row]),
                source.name(int(predictions.indices[row])),
                float(ious[row]),
                float(right[row]),
            )
            for row in rows.tolist()
        )
        for rows in (ordered[:EXTREMES], ordered[middle : middle + EXTREMES], ordered[::-1][:EXTREMES])
    ]


def _warnings(classes: Sequence[ClassScore]) -> list[str]:
    """Warn of classes that are never predicted right."""
    missed = [row.name for row in classes if row.images and not row.iou]
    if not missed:
        return []
    more = f" and {len(missed) - 3:,} more" if len(missed) > 3 else ""
    noun, them = ("classes", "them") if len(missed) > 1 else ("class", "it")
    return [
        f"no pixel of the {noun} {', '.join(missed[:3])}{more} is predicted right; add images with {them}, train "
        "longer, or try objective.class_weights=balanced"
    ]
