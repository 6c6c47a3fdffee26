"""Measuring a model: every image once, and what the answers are worth."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.acceleration.engine import made_ready
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import BadImage, Batch, evaluation_batches
from vitrail.data.batches import Evaluation as EveryImage
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.contents import recorded_contents
from vitrail.data.sources.selection import CONTENT, SeenInTraining, Selection, match_classes, seen_in_training
from vitrail.data.sources.source import Source
from vitrail.errors import CheckpointError, DataError, Diverged
from vitrail.metrics.baselines import Baselines, baselines, warnings_about
from vitrail.metrics.calibration import ReliabilityBin, expected_calibration_error, reliability
from vitrail.metrics.classification import (
    Confusion,
    balanced_accuracy,
    confusion_matrix,
    log_losses,
    macro_f1,
    most_confused,
    per_class,
    top_k_right,
)
from vitrail.metrics.intervals import (
    Interval,
    bootstrap_mean,
    bootstrap_scores,
    wilson_interval,
)
from vitrail.models.checks import per_token
from vitrail.runtime import Precision, autocast, choose_device

UNSEEN = SeenInTraining()
WORST = 20
"""How many of the most confident mistakes are kept."""
HELD_OUT = "held-out images"
SPLITS = {
    "test": "the test split", "val": "the validation split", "train": "the training split", "all": "all images"
}  # fmt: skip


class Predictions(NamedTuple):
    """What a model answered to every image that could be read."""

    probabilities: NDArray[np.float32]
    """(N, K)."""
    labels: NDArray[np.int64]
    """(N,)."""
    indices: NDArray[np.int64]
    """(N,), which images of the source these are."""
    bad: tuple[BadImage, ...] = ()
    """The images that could not be read."""


class ClassScore(NamedTuple):
    """How one class fared; None where there is nothing to divide by."""

    name: str
    images: int
    precision: float | None
    recall: float | None
    f1: float | None


@dataclass(frozen=True)
class Mistake:
    """An image that was taken for another class."""

    index: int
    name: str
    true: str
    predicted: str
    confidence: float


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a model is worth on some images. Shares go from 0 to 1; intervals are of 95%."""

    images: int
    kind: str
    """What the images are, in the plural: "held-out images"."""
    classes: tuple[str, ...]
    top1: float
    top1_interval: Interval
    """Wilson's."""
    top5: float | None
    """None with fewer than 6 classes."""
    top5_interval: Interval | None
    """Wilson's."""
    loss: float
    loss_interval: Interval
    """By bootstrap."""
    balanced_accuracy: float
    balanced_accuracy_interval: Interval
    """By bootstrap, as that of macro-F1."""
    macro_f1: float
    macro_f1_interval: Interval
    per_class: tuple[ClassScore, ...]
    confusion: NDArray[np.int64]
    """(K, K), the true class by row, the predicted one by column."""
    ece: float
    reliability: tuple[ReliabilityBin, ...]
    worst: tuple[Mistake, ...]
    """The most confident mistakes, the most confident first."""
    bad: tuple[BadImage, ...]
    warnings: tuple[str, ...] = ()
    """Why the result may be worth less than it looks, each with the next step."""
    split: str | None = None
    """Where `evaluate` chose the images: "test", "val", "train", or "all"."""
    seen: SeenInTraining = UNSEEN
    """How many of them the model's own run trained on, or selected the checkpoint on."""

    @property
    def baselines(self) -> Baselines:
        """What always predicting the largest class gives, and chance."""
        return baselines(self.confusion)

    @property
    def weakest_first(self) -> list[ClassScore]:
        """The classes that have images, by recall, then by F1."""
        return sorted((row for row in self.per_class if row.images), key=lambda row: (row.recall, row.f1))

    @property
    def weakest(self) -> ClassScore | None:
        """The class with the least recall; None where no image is mistaken."""
        return self.weakest_first[0] if self.top1 < 1 else None

    def most_confused(self, most: int) -> list[Confusion]:
        """Return the most frequent confusions, by class number."""
        return most_confused(self.confusion, most)

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        noun = self.kind if self.images != 1 else self.kind.removesuffix("s")
        low, high = self.top1_interval
        said = [f"{percent(self.top1)}% on {self.images:,} {noun}, 95% interval {percent(low)}–{percent(high)}"]
        base = self.baselines
        if base.majority < 1:  # on images of one class there is nothing to guess
            largest = self.classes[base.majority_class]
            said.append(f"always {largest!r} gives {percent(base.majority)}%, chance {percent(base.chance)}%")
        if self.weakest is not None:
            said.append(f"weakest class {self.weakest.name}")
        if self.bad:
            said.append(f"{len(self.bad):,} more could not be read")
        if self.split is not None:
            asked = self.images + len(self.bad)
            said.append(f"evaluated on {SPLITS[self.split]}{self.seen.caveat(asked)}")
            if not (self.seen.selected_on or self.seen.trained_on):
                if self.seen.compared_by == CONTENT:
                    said.append("by content, none of these images was trained on")
                elif self.split == "all":
                    said.append("whether the model was trained on them is not known")
        return "; ".join(said)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it."""
        base = self.baselines
        return {
            **({} if self.split is None else {"split": self.split, **self.seen._asdict()}),
            "summary": self.summary,
            "images": self.images,
            "kind": self.kind,
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
            "warnings": list(self.warnings),
            "weakest": None if self.weakest is None else self.weakest.name,
            "per_class": [row._asdict() for row in self.per_class],
            "confusion": self.confusion.tolist(),
            "ece": self.ece,
            "reliability": [row._asdict() for row in self.reliability],
            "worst": [asdict(row) for row in self.worst],
            "bad": [row._asdict() for row in self.bad],
        }


def evaluate_bundle(
    bundle: Bundle,
    source: Source,
    *,
    device: str = "auto",
    precision: Precision = "float32",
    batch: int = 64,
    workers: int | None = None,
    by_number: bool = False,
    kind: str = HELD_OUT,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Measure a bundle on data whose classes it knows; its model goes to the device. Unreadable images are listed.

    `by_number` takes the classes of the data to be those of the bundle in the same order, whatever they are called.
    `on_progress` is told how many images are done, and of how many.
    """
    bundle = bundle.in_dtype("float32")
    if not bundle.model.config.classes:
        raise CheckpointError("the model has no head, so it knows no classes; train one on it first")
    if refusal := per_token(bundle.model.config):
        raise CheckpointError(refusal)
    source = match_classes(source, bundle.classes, bundle.model.config.classes, by_number=by_number)
    bundle.announce()
    place = choose_device(device)
    data = EveryImage(source, bundle.preprocess, batch, bad_files="skip")
    batches = evaluation_batches(data, workers=workers, pin=place.type == "cuda")
    if on_progress is not None:
        batches = _told(batches, on_progress, len(source))
    return evaluate(
        made_ready(bundle.model.to(place), precision),
        batches,
        source,
        preprocess=bundle.preprocess,
        device=place,
        precision=precision,
        kind=kind,
    )


def evaluate_chosen(
    bundle: Bundle,
    chosen: Selection,
    record: Mapping[str, Any] | None,
    *,
    device: str = "auto",
    precision: Precision = "float32",
    batch: int = 64,
    workers: int | None = None,
    by_number: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate a bundle on a split of some data; the result names it, and what the bundle's own run did with it.

    `record` is the split that this run recorded, if there is one.
    """
    # They are called held out only where that is known.
    kind = HELD_OUT if chosen.held_out else "training images" if chosen.split == "train" else "images"
    found = evaluate_bundle(
        bundle,
        chosen.source,
        device=device,
        precision=precision,
        batch=batch,
        workers=workers,
        by_number=by_number,
        kind=kind,
        on_progress=on_progress,
    )
    return replace(
        found, split=chosen.split, seen=seen_in_training(chosen.source, record, recorded_contents(bundle.origin))
    )


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    source: Source,
    *,
    preprocess: Preprocess,
    device: torch.device,
    precision: Precision = "float32",
    kind: str = HELD_OUT,
) -> Evaluation:
    """Measure a model that is on `device`, on the batches of a source whose classes are numbered as its outputs are."""
    predictions = predict_all(model, batches, preprocess, device, precision, name=source.name)
    if not len(predictions.labels):
        bad = predictions.bad
        why = f"none of the {len(bad):,} can be read; the first, {bad[0].name}: {bad[0].reason}" if bad else "none"
        raise DataError(f"there are no images to measure: {why}")
    return measure(predictions, source, kind=kind)


def predict_all(
    model: nn.Module,
    batches: Iterable[Batch],
    preprocess: Preprocess,
    device: torch.device,
    precision: Precision = "float32",
    *,
    name: Callable[[int], str] = "image {}".format,
) -> Predictions:
    """Ask a model that is on `device` about every image once; `name` says what a message calls an image.

    The model answers as in use, without dropout, and is afterwards in the mode in which it was.
    """
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    bad: list[BadImage] = []
    with in_use(model), torch.inference_mode():
        for batch in batches:
            bad += batch.bad
            if not len(batch.labels):
                continue
            with autocast(device, precision):
                outputs = model(preprocess.normalise(batch.to(device).pixels)).float()
            check_finite(outputs, batch.indices, name, precision)
            found.append((outputs.softmax(dim=1).cpu(), batch.labels, batch.indices))
    if not found:
        return Predictions(np.zeros((0, 0), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64), tuple(bad))
    probabilities, labels, indices = (torch.cat(tensors).numpy() for tensors in zip(*found, strict=True))
    return Predictions(probabilities, labels, indices, tuple(bad))


def measure(predictions: Predictions, source: Source, *, kind: str = HELD_OUT) -> Evaluation:
    """Say what answers are worth; `source` gives the names of images and classes."""
    probabilities, labels = predictions.probabilities, predictions.labels
    outputs = probabilities.shape[1]
    if outputs != len(source.classes):
        raise DataError(f"the model has {outputs:,} classes and the data {len(source.classes):,}; match them first")
    predicted = probabilities.argmax(axis=1)
    matrix = confusion_matrix(labels, predicted, outputs)
    losses, table = log_losses(probabilities, labels), reliability(probabilities, labels)
    right = int((predicted == labels).sum())
    among_five = int(top_k_right(probabilities, labels, 5).sum())
    interval, scores = wilson_interval(right, len(labels)), bootstrap_scores(matrix)
    return Evaluation(
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


def percent(share: float) -> str:
    """Write a share as a percentage with one decimal, and 100.0 only for all."""
    shown = f"{100 * share:.1f}"
    return "99.9" if shown == "100.0" and share < 1 else shown


@contextmanager
def in_use(model: nn.Module) -> Iterator[None]:
    """Put a model into the mode in which it is used; afterwards every split of it has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_finite(outputs: Tensor, indices: Tensor, name: Callable[[int], str], precision: Precision) -> None:
    """Refuse outputs (B, K) that are not finite, and name the first image with such."""
    wrong = ~outputs.isfinite().all(dim=1)
    if wrong.any():
        first = int(indices[wrong.cpu()][0])
        help = "measure in float32" if precision != "float32" else "its weights are damaged, or training diverged"
        raise Diverged(f"the model's answer to {name(first)} is not a finite number; {help}")


def _told(batches: Iterable[Batch], on_progress: Callable[[int, int], None], images: int) -> Iterator[Batch]:
    done = 0
    for batch in batches:
        yield batch
        done += len(batch.labels) + len(batch.bad)
        on_progress(done, images)


def _class_scores(matrix: NDArray[np.int64], classes: Iterable[str]) -> tuple[ClassScore, ...]:
    scores = per_class(matrix)
    numbers = ([None if np.isnan(x) else float(x) for x in column] for column in scores[1:])
    return tuple(map(ClassScore, classes, scores.images.tolist(), *numbers))


def _worst(predictions: Predictions, source: Source) -> tuple[Mistake, ...]:
    confidence, predicted = predictions.probabilities.max(axis=1), predictions.probabilities.argmax(axis=1)
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
