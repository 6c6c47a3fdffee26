"""Semantic segmentation: every pixel has one of K classes.

The model gives logits per patch (`pool = "patches"`); they are upsampled bilinearly, and the class of a pixel is that
with the largest logit. Metrics are computed at the size of the model's input. B images, K classes, a grid of h×w
patches, masks of H×W pixels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.acceleration.agreement import Agreement
from vitrail.data.sources.masks import IGNORED_PIXEL, MOST_CLASSES, match_masks
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import AUTOMATIC, Kind, Labelling
from vitrail.errors import CheckpointError, ConfigError, InputError
from vitrail.metrics.segmentation import (
    count_pixels_of_each,
    mean_iou,
    mean_iou_of_each,
    pixel_accuracy,
    pixel_accuracy_of_each,
)
from vitrail.tasks.metrics import MetricSpec
from vitrail.tasks.objective import Objective, only_in_training
from vitrail.tasks.segmentation_metrics import (
    LOSS,
    MEAN_IOU,
    PIXEL_ACCURACY,
    SegmentationMetrics,
    counts_of,
    losses_of,
    segmentation_metrics,
)
from vitrail.tasks.task import (
    Explained,
    FieldType,
    LossNote,
    Prediction,
    Predictions,
    RowFormat,
    Task,
    TrainingLoss,
    note_of_additions,
)
from vitrail.text import percent, printable, rounded

MAX_BALANCE = 100.0
"""The most that class_weights=balanced lets a pixel count."""
FINER = 4
"""The fractions of a prediction are counted on a grid that is finer than that of the patches by this factor."""
ROUNDING = 1e-3
"""By how much upsampling may round a logit."""
MOST_LOGITS = 1 << 26
"""Logits of pixels that are computed at a time: 256 MB, and as much for the loss; at least those of one image."""


def upsampled(outputs: Tensor, size: tuple[int, int]) -> Tensor:
    """Return logits (B, K, H, W) for pixels, from those of patches (B, K, h, w)."""
    return F.interpolate(outputs, size, mode="bilinear", align_corners=False)


def largest_class(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the class (H, W) of every pixel, from logits of patches (K, h, w); at most 255 classes.

    Classes are upsampled one by one, because all of them for a photograph would take gigabytes. Those that are the
    largest nowhere are left out.
    """
    best, found = torch.full(size, -math.inf), torch.zeros(size, dtype=torch.uint8)
    for index in candidates(logits).tolist():
        values = upsampled(logits[None, index : index + 1], size)[0, 0]
        found.masked_fill_(values > best, index)
        torch.maximum(best, values, out=best)
    return found


def candidates(logits: Tensor) -> Tensor:
    """Return the classes that can be the largest somewhere between patches: a weighted mean of four is in their range.

    Between four patches, a class is left out if its largest logit is below the smallest of another one.
    """
    padded = F.pad(logits[None], (1, 1, 1, 1), mode="replicate")[0]
    high, low = F.max_pool2d(padded, 2, 1), -F.max_pool2d(-padded, 2, 1)
    return (high >= low.max(dim=0).values - ROUNDING).flatten(1).any(dim=1).nonzero()[:, 0]


# ── predictions ──


@dataclass(frozen=True)
class MaskPrediction(Prediction):
    """A model's prediction for one image: a class for every pixel."""

    classes: tuple[str, ...] = ()
    """The classes in the mask, the largest first; indices as text if the bundle has no names."""
    fractions: tuple[float, ...] = ()
    """The fraction of the image that each of them covers."""
    indices: tuple[int, ...] = ()
    logits: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    """(K, h, w), per patch; None if the image could not be read."""
    file: str | None = None
    """The index PNG with the mask, if `vitrail.predict` wrote one."""

    def __repr__(self) -> str:
        if self.error is not None:
            return f"MaskPrediction(error: {self.error})"
        pairs = zip(self.classes, self.fractions, strict=True)
        return f"MaskPrediction({', '.join(f'{name} {percent(fraction)}%' for name, fraction in pairs)})"

    def mask(self, height: int, width: int) -> NDArray[np.uint8]:
        """Return the class of every pixel (height, width), for an image of that size; indices of the model's outputs.

        The model sees the whole image, so give the size of the original as it is displayed. Of an array `pixels` that
        is `prediction.mask(*pixels.shape[:2])`; of a Pillow image, whose size is (width, height),
        `prediction.mask(image.height, image.width)`.
        """
        if self.logits is None:
            raise InputError(f"there is no mask: {self.error or 'the prediction has no logits'}")
        if height < 1 or width < 1:
            raise InputError(f"a mask of {height}×{width} pixels cannot be made; give the size of the image")
        check_mask_classes(len(self.logits))
        return largest_class(torch.from_numpy(self.logits), (height, width)).numpy()

    def fields(self) -> dict[str, Any]:
        """Return the classes in the mask with their fractions, and its file."""
        return {"classes": self.classes, "fractions": self.fractions, "mask": self.file}

    def response(self) -> dict[str, Any]:
        """Return a list of the classes in the mask, each with name, index and fraction; the service adds the mask."""
        rows = zip(self.classes, self.indices, self.fractions, strict=True)
        return {"classes": [{"name": name, "index": index, "fraction": fraction} for name, index, fraction in rows]}


class MaskRows(RowFormat):
    """Rows with the classes in a mask, their fractions, and the file of the mask if one was written."""

    types: ClassVar[Mapping[str, FieldType]] = {"classes": "strings", "fractions": "floats", "mask": "string"}
    schema: ClassVar[Mapping[str, Any]] = {
        "classes": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "index": {"type": "integer"},
                    "fraction": {"type": "number"},
                },
                "required": ["name", "index", "fraction"],
            },
        },
        "mask": {
            "type": "string",
            "contentMediaType": "image/png",
            "contentEncoding": "base64",
            "description": "The class index of every pixel, as a PNG of the size of the image as it is displayed.",
        },
    }
    title: ClassVar[tuple[str, str, str]] = ("largest class", "fraction", "other classes")

    def csv_header(self, top: int) -> list[str]:
        """Return two columns for each of the largest classes, and one for the file of the mask."""
        return [*(column for place in range(1, top + 1) for column in (f"class_{place}", f"fraction_{place}")), "mask"]

    def csv_cells(self, fields: Mapping[str, Any], top: int) -> list[Any]:
        """Return class and fraction in turns, and the file."""
        cells = [cell for pair in zip(fields["classes"], fields["fractions"], strict=True) for cell in pair]
        return [*cells, *[""] * (2 * top - len(cells)), fields["mask"]]

    def table_cells(self, fields: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return the largest class, its fraction, and the others."""
        names = [printable(name, line=True) for name in fields["classes"]]
        fractions = [f"{percent(fraction)}%" for fraction in fields["fractions"]]
        others = ", ".join(f"{name} {fraction}" for name, fraction in zip(names[1:], fractions[1:], strict=True))
        return names[0], fractions[0], others


# ── the task ──


@dataclass(frozen=True)
class Segmentation(Task):
    """Predicts a class for every pixel."""

    ignored_values: tuple[int, ...] = ()
    """Values in the files of masks that count nowhere, besides 255."""

    name: ClassVar[str] = "segmentation"
    kind: ClassVar[Kind] = "masks"
    output_noun: ClassVar[tuple[str, str]] = ("class", "classes")
    activation: ClassVar[str] = (
        "the class of a pixel is the largest logit along axis 1, after bilinear upsampling to the size of the image"
    )
    training_metric: ClassVar[MetricSpec] = PIXEL_ACCURACY._replace(key="pixel_accuracy")
    criteria: ClassVar[Mapping[str, MetricSpec]] = {
        "mean_iou": MEAN_IOU._replace(key="val_mean_iou"),
        "pixel_accuracy": PIXEL_ACCURACY._replace(key="val_pixel_accuracy"),
        "loss": LOSS._replace(name="loss", key="val_loss"),
    }
    rows: ClassVar[RowFormat] = MaskRows()
    sections: ClassVar[tuple[str, ...]] = (
        "masks", "mask_classes", "curves", "model", "inside", "data", "reproduce",
    )  # fmt: skip
    compared_sections: ClassVar[tuple[str, ...]] = ("pairs", "settings", "curves", "mask_classes", "reproduce")
    losses: ClassVar[tuple[str, ...]] = ("softmax",)
    settings: ClassVar[frozenset[str]] = frozenset({"objective.label_smoothing", "objective.class_weights"})
    metrics: ClassVar[type[SegmentationMetrics]] = SegmentationMetrics
    is_dense: ClassVar[bool] = True

    # ── constants ──

    def labelling(self, names: tuple[str, ...] | None) -> Labelling:  # noqa: ARG002
        """Return which values to ignore."""
        return Labelling(self.kind, ignore=self.ignored_values)

    def fitted(self, labels: NDArray[Any], labelling: Labelling = AUTOMATIC) -> Self:  # noqa: ARG002
        """Return the task with the values that were ignored."""
        return type(self)(labelling.ignore)

    @property
    def constants(self) -> dict[str, Any]:
        """The ignored values."""
        return {"ignored_values": list(self.ignored_values)} if self.ignored_values else {}

    def with_constants(self, constants: Mapping[str, Any], outputs: int) -> Self:  # noqa: ARG002
        """Return the task with recorded values to ignore; none if there are none."""
        values = constants.get("ignored_values", [])
        good = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
        if not good or constants.keys() - {"ignored_values"}:
            raise CheckpointError(
                f"the bundle's task_constants should have ignored_values, a list of whole numbers, found "
                f"{dict(constants)!r}; was it edited?"
            )
        return type(self)(tuple(values))

    # ── head and targets ──

    def outputs(self, classes: Sequence[str]) -> int:
        """Return one output per class."""
        return len(classes)

    def output_names(self, classes: Sequence[str]) -> tuple[str, ...] | None:
        """Return the classes."""
        return tuple(classes)

    def match(self, source: Source, names: tuple[str, ...] | None, outputs: int, *, by_number: bool = False) -> Source:
        """Match the classes of the masks by name, or by index."""
        return match_masks(source, names, outputs, by_number=by_number)

    # ── training ──

    def placeholders(self, pixels: Tensor, outputs: int) -> Tensor:  # noqa: ARG002
        """Return masks of the first class."""
        return torch.zeros(len(pixels), *pixels.shape[2:], dtype=torch.uint8, device=pixels.device)

    def training_loss(
        self, objective: Objective, labels: NDArray[Any], classes: Sequence[str], device: torch.device
    ) -> TrainingLoss:
        """Return the mean cross-entropy of the labelled pixels, averaged over images.

        The mean over images, and not over the pixels of all, lets micro-batches and ranks together give the gradient
        of the whole batch.
        """
        weights = pixel_weights(labels, classes, objective)
        on_device = None if weights is None else weights.to(device)
        smoothing = objective.label_smoothing

        def loss(outputs: Tensor, labels: Tensor, lam: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            by_pixel = upsampled(outputs, (labels.shape[1], labels.shape[2]))
            truth = labels.long()
            labelled = truth != IGNORED_PIXEL
            pixels = labelled.flatten(1).sum(dim=1).clamp(min=1)
            weight = None if on_device is None else on_device.to(by_pixel.dtype)
            each = F.cross_entropy(
                by_pixel, truth, weight=weight, ignore_index=IGNORED_PIXEL, label_smoothing=smoothing, reduction="none"
            )
            right = ((by_pixel.detach().argmax(dim=1) == truth) & labelled).flatten(1).sum(dim=1)
            return (each.flatten(1).sum(dim=1) / pixels).mean(), (right / pixels).sum()

        return loss

    def loss_note(self, recipe: Mapping[str, Any]) -> LossNote:
        """Name what only the training loss includes."""
        return note_of_additions(only_in_training(recipe))

    def default_criterion(self, *, class_balanced: bool) -> str:  # noqa: ARG002
        """Return the mean IoU."""
        return "mean_iou"

    def validation(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, float]:  # noqa: ARG002
        """Return mean IoU, pixel accuracy and loss; 0 where no pixel has a label."""
        counts = counts_of(predictions)
        values = {
            "val_mean_iou": mean_iou(counts),
            "val_pixel_accuracy": pixel_accuracy(counts),
            "val_loss": float(losses_of(predictions).mean()),
        }
        return {name: 0.0 if math.isnan(value) else value for name, value in values.items()}

    # ── evaluation and predictions ──

    def activate(self, outputs: Tensor) -> Tensor:
        """Return probabilities per patch (B, K, h, w)."""
        return outputs.softmax(dim=1)

    def kept(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers (B, 3, K) of each class: correct and predicted pixels, and the loss summed over its pixels.

        The labels become the true pixels of each class (B, K). A few images at a time: a batch of logits for pixels of
        150 classes could take more memory than training does.
        """
        each = outputs.shape[1] * labels.shape[1] * labels.shape[2]
        parts = zip(*(rows.split(max(1, MOST_LOGITS // each)) for rows in (outputs, labels)), strict=True)
        counted, true = zip(*(self._counted(*part) for part in parts), strict=True)
        return torch.cat(counted), torch.cat(true)

    @staticmethod
    def _counted(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same of a few images."""
        classes = outputs.shape[1]
        truth = labels.to(outputs.device)
        by_pixel = upsampled(outputs, (truth.shape[1], truth.shape[2]))
        counts = count_pixels_of_each(by_pixel.argmax(dim=1), truth, classes, IGNORED_PIXEL)
        losses = F.cross_entropy(by_pixel, truth.long(), ignore_index=IGNORED_PIXEL, reduction="none").flatten(1)
        bins = truth.flatten(1).long().clamp(max=classes)  # the last bin takes ignored pixels, whose loss is 0
        of_class = torch.zeros(len(outputs), classes + 1, dtype=losses.dtype, device=losses.device)
        of_class.scatter_add_(1, bins, losses)
        correct, predicted, true = counts.cpu().double().unbind(dim=1)
        return torch.stack([correct, predicted, of_class[:, :classes].cpu().double()], dim=1), true.long()

    def agreement(self, exact: Tensor, quick: Tensor) -> Agreement:
        """Compare masks: the largest fraction of an image's patches whose class differs."""
        differs = (exact.argmax(dim=1) != quick.argmax(dim=1)).flatten(1).double().mean(dim=1)
        finite = bool(quick.isfinite().all())
        return Agreement(len(exact), float(differs.max()) if finite else math.nan, "the mask", "masks")

    def explained(self, outputs: Tensor, names: tuple[str, ...] | None, index: int | None) -> Explained:
        """Return the class that an explanation is about, of the logits (K) of a patch or of several on average."""
        probabilities = outputs.softmax(dim=0)
        place = int(probabilities.argmax()) if index is None else index
        probability, name = float(probabilities[place]), place if names is None else names[place]
        return Explained(place, name, probability, f"{percent(probability)}%", is_probability=True)

    def evaluate(self, predictions: Predictions, source: Source, *, kind: str) -> SegmentationMetrics:
        """Compute IoU, Dice and accuracies, of all classes and of each."""
        return segmentation_metrics(predictions, source, kind=kind)

    def predict(self, outputs: Tensor, names: tuple[str, ...] | None, top: int) -> list[MaskPrediction]:
        """Return the mask of each image, and its largest classes."""
        grid = (outputs.shape[2] * FINER, outputs.shape[3] * FINER)
        known = [str(index) for index in range(outputs.shape[1])] if names is None else names
        made = []
        for logits in outputs.float():
            if (
                len(logits) <= MOST_CLASSES and len(logits) * math.prod(grid) > MOST_LOGITS
            ):  # of a large image in windows
                found = largest_class(logits, grid).flatten()
            else:
                found = upsampled(logits[None], grid).argmax(dim=1).flatten()
            fractions = torch.bincount(found, minlength=len(known)).double() / len(found)
            values, order = fractions.sort(descending=True, stable=True)
            first = [index for index, fraction in zip(order.tolist(), values.tolist(), strict=True) if fraction > 0][
                :top
            ]
            made.append(
                MaskPrediction(
                    tuple(known[index] for index in first),
                    tuple(rounded(float(fractions[index])) for index in first),
                    tuple(first),
                    np.ascontiguousarray(logits.numpy(), np.float32),
                )
            )
        return made

    def unread(self, error: str) -> MaskPrediction:
        """Return a prediction without a mask."""
        return MaskPrediction(error=error)

    def columns(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
        """Return the metrics of each image, and its true, predicted and correct pixels by class."""
        import pyarrow as pa

        counts = counts_of(predictions)

        def pixels(values: NDArray[np.int64]) -> Any:
            return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).ravel()), len(classes))

        return {
            "mean_iou": pa.array(mean_iou_of_each(counts), pa.float64()),
            "pixel_accuracy": pa.array(pixel_accuracy_of_each(counts), pa.float64()),
            "loss": pa.array(losses_of(predictions), pa.float64()),
            "true_pixels": pixels(counts[:, 2]),
            "predicted_pixels": pixels(counts[:, 1]),
            "correct_pixels": pixels(counts[:, 0]),
        }


def check_mask_classes(classes: int) -> None:
    """Raise if a mask cannot hold that many classes."""
    if classes > MOST_CLASSES:
        raise InputError(
            f"a mask has 8 bits per pixel and at most {MOST_CLASSES} classes, but the model has {classes:,}; leave out "
            "the masks"
        )


def pixel_weights(labels: NDArray[Any], classes: Sequence[str], objective: Objective) -> Tensor | None:
    """Return how much a pixel of each class (K) counts in the loss; None if all count the same.

    `labels` (N, K) are the pixels of each class in the masks of the whole training split. "balanced" lets every class
    count equally, with a mean of 1 over all pixels; a class without pixels gets 0.
    """
    chosen = objective.class_weights
    if chosen == "none":
        return None
    if isinstance(chosen, tuple):
        if len(chosen) != len(classes):
            raise ConfigError(f"class_weights has {len(chosen)} numbers, but there are {len(classes)} classes")
        return torch.tensor(chosen, dtype=torch.float32)
    pixels = labels.sum(axis=0, dtype=np.float64)
    present = max(1, int((pixels > 0).sum()))
    weights = np.where(pixels > 0, pixels.sum() / (present * np.maximum(pixels, 1)), 0.0)
    return torch.from_numpy(np.minimum(weights, MAX_BALANCE).astype(np.float32))
