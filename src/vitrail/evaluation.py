"""Evaluate a model: predict every image once, and compute the metrics."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.acceleration.engine import prepare
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import BadImage, Batch, evaluation_batches
from vitrail.data.batches import Evaluation as EvaluationData
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.contents import recorded_contents
from vitrail.data.sources.selection import CONTENT, SeenInTraining, Selection, match_classes, seen_in_training
from vitrail.data.sources.source import Source
from vitrail.errors import CheckpointError, DataError, Diverged
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
from vitrail.metrics.intervals import (
    Interval,
    bootstrap_mean,
    bootstrap_scores,
    wilson_interval,
)
from vitrail.models.checks import per_token
from vitrail.runtime import Precision, autocast, choose_device
from vitrail.text import percent

UNSEEN = SeenInTraining()
WORST = 20
"""How many of the most confident mistakes are kept."""
HELD_OUT = "held-out images"
SPLITS = {
    "test": "the test split", "val": "the validation split", "train": "the training split", "all": "all images"
}  # fmt: skip


class Predictions(NamedTuple):
    """The predictions of a model for every readable image."""

    probabilities: NDArray[np.float32]
    """(N, K)."""
    labels: NDArray[np.int64]
    """(N,)."""
    indices: NDArray[np.int64]
    """(N,): indices into the source."""
    bad: tuple[BadImage, ...] = ()
    """The images that could not be read."""


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


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The metrics of a model on some images. Fractions are between 0 and 1; intervals are 95% intervals."""

    images: int
    kind: str
    """A plural noun for the images: "held-out images"."""
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
    confusion: NDArray[np.int64]
    """(K, K): rows are true classes, columns predicted classes."""
    ece: float
    reliability: tuple[ReliabilityBin, ...]
    worst: tuple[Mistake, ...]
    """The most confident mistakes, in descending order of confidence."""
    bad: tuple[BadImage, ...]
    warnings: tuple[str, ...] = ()
    """Reasons not to trust the result, each with the next step."""
    split: str | None = None
    """The split that `evaluate` selected: "test", "val", "train" or "all"."""
    seen: SeenInTraining = UNSEEN
    """How many of these images the model's run trained on, or selected the checkpoint on."""

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
    def summary(self) -> str:
        """The result in one sentence."""
        noun = self.kind if self.images != 1 else self.kind.removesuffix("s")
        low, high = self.top1_interval
        clauses = [f"{percent(self.top1)}% on {self.images:,} {noun}, 95% interval {percent(low)}–{percent(high)}"]
        base = self.baselines
        if base.majority < 1:  # with a single class, every baseline is 100%
            largest = self.classes[base.majority_class]
            clauses.append(f"always {largest!r} gives {percent(base.majority)}%, chance {percent(base.chance)}%")
        if self.weakest is not None:
            clauses.append(f"weakest class {self.weakest.name}")
        if self.bad:
            clauses.append(f"{len(self.bad):,} more could not be read")
        if self.split is not None:
            total = self.images + len(self.bad)
            clauses.append(f"evaluated on {SPLITS[self.split]}{self.seen.caveat(total)}")
            if not (self.seen.selected_on or self.seen.trained_on):
                if self.seen.compared_by == CONTENT:
                    clauses.append("by content, its run trained on none of these images")
                elif self.split == "all":
                    clauses.append("it is unknown whether the model was trained on them")
        return "; ".join(clauses)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values."""
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
    """Evaluate a bundle on data with the same classes; its model is moved to the device. Unreadable images are listed.

    `by_number` matches the classes of data and bundle by index instead of by name.
    `on_progress` is called with the number of images done and the total.
    """
    bundle = bundle.in_dtype("float32")
    if not bundle.model.config.classes:
        raise CheckpointError("the model has no head, so it cannot predict classes; train one first")
    if reason := per_token(bundle.model.config):
        raise CheckpointError(reason)
    source = match_classes(source, bundle.classes, bundle.model.config.classes, by_number=by_number)
    bundle.announce()
    target = choose_device(device)
    data = EvaluationData(source, bundle.preprocess, batch, bad_files="skip")
    batches = evaluation_batches(data, workers=workers, pin=target.type == "cuda")
    if on_progress is not None:
        batches = _with_progress(batches, on_progress, len(source))
    return evaluate(
        prepare(bundle.model.to(target), precision),
        batches,
        source,
        preprocess=bundle.preprocess,
        device=target,
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
    """Evaluate a bundle on a split; the result names the split and how the bundle's own run used its images.

    `record` is the split record of that run, if there is one.
    """
    # Call them held-out only if the run's record says so.
    kind = HELD_OUT if chosen.held_out else "training images" if chosen.split == "train" else "images"
    evaluation = evaluate_bundle(
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
        evaluation, split=chosen.split, seen=seen_in_training(chosen.source, record, recorded_contents(bundle.origin))
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
    """Evaluate a model that is on `device`; the source's labels must be indices into the model's outputs."""
    predictions = predict_all(model, batches, preprocess, device, precision, name=source.name)
    if not len(predictions.labels):
        bad = predictions.bad
        why = f"none of the {len(bad):,} can be read; the first, {bad[0].name}: {bad[0].reason}" if bad else "none"
        raise DataError(f"no images to evaluate: {why}")
    return evaluate_predictions(predictions, source, kind=kind)


def predict_all(
    model: nn.Module,
    batches: Iterable[Batch],
    preprocess: Preprocess,
    device: torch.device,
    precision: Precision = "float32",
    *,
    name: Callable[[int], str] = "image {}".format,
) -> Predictions:
    """Predict every image once with a model that is on `device`; `name` gives the image name for error messages.

    The model runs in eval mode, and its modules get their previous modes back afterwards.
    """
    collected: list[tuple[Tensor, Tensor, Tensor]] = []
    bad: list[BadImage] = []
    with eval_mode(model), torch.inference_mode():
        for batch in batches:
            bad += batch.bad
            if not len(batch.labels):
                continue
            with autocast(device, precision):
                outputs = model(preprocess.normalise(batch.to(device).pixels)).float()
            check_finite(outputs, batch.indices, name, precision)
            collected.append((outputs.softmax(dim=1).cpu(), batch.labels, batch.indices))
    if not collected:
        return Predictions(np.zeros((0, 0), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64), tuple(bad))
    probabilities, labels, indices = (torch.cat(tensors).numpy() for tensors in zip(*collected, strict=True))
    return Predictions(probabilities, labels, indices, tuple(bad))


def evaluate_predictions(predictions: Predictions, source: Source, *, kind: str = HELD_OUT) -> Evaluation:
    """Compute the metrics of some predictions; `source` gives the names of images and classes."""
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


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch a model to eval mode; on exit, every submodule gets its previous mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_finite(outputs: Tensor, indices: Tensor, name: Callable[[int], str], precision: Precision) -> None:
    """Raise if outputs (B, K) are not finite, naming the first such image."""
    wrong = ~outputs.isfinite().all(dim=1)
    if wrong.any():
        first = int(indices[wrong.cpu()][0])
        help = "evaluate in float32" if precision != "float32" else "its weights are corrupt, or training diverged"
        raise Diverged(f"the model's output for {name(first)} is not finite; {help}")


def _with_progress(batches: Iterable[Batch], on_progress: Callable[[int, int], None], images: int) -> Iterator[Batch]:
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
