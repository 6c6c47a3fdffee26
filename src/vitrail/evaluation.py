"""Evaluate a model: predict every image once, and compute the metrics."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.acceleration.auto import IMAGES, open_best, plan_text
from vitrail.acceleration.engine import CapturedModel, prepare
from vitrail.acceleration.planner import plan_of
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import BadImage, Batch, first_images
from vitrail.data.batches import Evaluation as EvaluationData
from vitrail.data.decoder_choice import choose_for_source
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.contents import recorded_contents
from vitrail.data.sources.selection import Selection, seen_in_training
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import Labelling
from vitrail.errors import DataError, Diverged
from vitrail.runtime import InferencePrecision, OnPlan, Precision, PrecisionChoice, autocast, choose_device, eval_mode
from vitrail.tasks.lookup import CLASSIFICATION, compare_for, task_of
from vitrail.tasks.metrics import HELD_OUT, TRAINING, Metrics
from vitrail.tasks.task import Predictions, Task


def evaluate_bundle(
    bundle: Bundle,
    source: Source,
    *,
    device: str = "auto",
    precision: PrecisionChoice = "float32",
    batch: int = 64,
    workers: int | None = None,
    decode: str = "auto",
    by_number: bool = False,
    kind: str = HELD_OUT,
    on_progress: Callable[[int, int], None] | None = None,
    on_plan: OnPlan | None = None,
) -> Metrics:
    """Evaluate a bundle on data with the same classes; its model is moved to the device. Unreadable images are listed.

    `by_number` matches the classes of data and bundle by index instead of by name.
    `on_progress` is called with the number of images done and the total, `on_plan` with the execution plan.
    """
    bundle = bundle.in_dtype("float32")
    task = task_of(bundle)
    source = task.match(source, bundle.classes, bundle.model.config.classes, by_number=by_number)
    bundle.announce()
    target = choose_device(device)
    ready, plan = _ready(bundle, source, target, precision)
    if on_plan is not None:
        on_plan(plan)
    data = EvaluationData(source, bundle.preprocess, batch, bad_files="skip")
    decoder = choose_for_source(decode, target, bundle.preprocess, source, workers=workers)
    decoder.announce(on_plan)
    batches = decoder.batches(data, target, workers)
    if on_progress is not None:
        batches = _with_progress(batches, on_progress, len(source))
    return evaluate(
        ready.model,
        batches,
        source,
        preprocess=bundle.preprocess,
        device=target,
        precision=ready.precision,
        kind=kind,
        task=task,
    )


def labelling_for(bundle: Bundle, data: object) -> Labelling:
    """Return how to read the labels that a bundle is evaluated on: as its task needs them."""
    labelling = task_of(bundle).labelling(bundle.classes)
    return labelling if isinstance(data, str | os.PathLike) else labelling._replace(columns=())


class _ReadyModel:
    """A model prepared for a device and a precision."""

    def __init__(self, bundle: Bundle, device: torch.device, precision: Precision) -> None:
        self.preprocess, self.device, self.precision = bundle.preprocess, device, precision
        self.plan = plan_of(bundle.model.to(device), precision, "evaluate")
        prepared = prepare(bundle.model, self.plan)
        self.model = CapturedModel(prepared, device, precision) if self.plan.graphs else prepared

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the outputs for images (B, C, H, W)."""
        with eval_mode(self.model), torch.inference_mode(), autocast(self.device, self.precision):
            outputs: Tensor = self.model(self.preprocess.normalise(pixels.to(self.device))).float()
        return outputs.cpu()


def _ready(bundle: Bundle, source: Source, device: torch.device, precision: PrecisionChoice) -> tuple[_ReadyModel, str]:
    """Return the model in the precision that was asked for, or that is best for these images, and how it computes."""
    open_for, config = partial(_ReadyModel, bundle, device), bundle.model.config
    first = partial(first_images, source, bundle.preprocess, IMAGES)
    ready, why = open_best(open_for, precision, config, len(source), first, device, compare_for(bundle))
    return ready, plan_text(ready.plan, why)


def evaluate_chosen(
    bundle: Bundle,
    chosen: Selection,
    record: Mapping[str, Any] | None,
    *,
    device: str = "auto",
    precision: PrecisionChoice = "float32",
    batch: int = 64,
    workers: int | None = None,
    decode: str = "auto",
    by_number: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    on_plan: OnPlan | None = None,
) -> Metrics:
    """Evaluate a bundle on a split; the result names the split and how the bundle's own run used its images.

    `record` is the split record of that run, if there is one.
    """
    # Call them held-out only if the run's record says so.
    kind = HELD_OUT if chosen.held_out else TRAINING if chosen.split == "train" else "images"
    evaluation = evaluate_bundle(
        bundle,
        chosen.source,
        device=device,
        precision=precision,
        batch=batch,
        workers=workers,
        decode=decode,
        by_number=by_number,
        kind=kind,
        on_progress=on_progress,
        on_plan=on_plan,
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
    task: Task = CLASSIFICATION,
) -> Metrics:
    """Evaluate a model that is on `device`; the source's labels must be those that the task matched to the model."""
    predictions = predict_all(model, batches, preprocess, device, precision, name=source.name, task=task)
    if not len(predictions.labels):
        bad = predictions.bad
        why = f"none of the {len(bad):,} can be read; the first, {bad[0].name}: {bad[0].reason}" if bad else "none"
        raise DataError(f"no images to evaluate: {why}")
    return task.evaluate(predictions, source, kind=kind)


def predict_all(
    model: nn.Module,
    batches: Iterable[Batch],
    preprocess: Preprocess,
    device: torch.device,
    precision: Precision = "float32",
    *,
    name: Callable[[int], str] = "image {}".format,
    task: Task = CLASSIFICATION,
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
            kept, truth = task.kept(outputs, batch.labels)
            collected.append((kept.cpu(), truth.cpu(), batch.indices))
    if not collected:
        return Predictions(np.zeros((0, 0), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64), tuple(bad))
    activated, labels, indices = (torch.cat(tensors).numpy() for tensors in zip(*collected, strict=True))
    return Predictions(activated, labels, indices, tuple(bad))


def check_finite(outputs: Tensor, indices: Tensor, name: Callable[[int], str], precision: InferencePrecision) -> None:
    """Raise if outputs (B, …) are not finite, naming the first such image."""
    wrong = ~outputs.flatten(1).isfinite().all(dim=1)
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
