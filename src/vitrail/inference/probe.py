"""`probe`: evaluate a model's frozen features by three protocols."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.data.batches import BadImage
from vitrail.data.sources.given import Data, given_data
from vitrail.data.sources.in_memory import InMemory
from vitrail.data.sources.index_files import Progress
from vitrail.data.sources.opening import open_data, title_of
from vitrail.data.sources.selection import recorded_split
from vitrail.data.sources.source import Source
from vitrail.data.sources.splits import Splits, split_indices
from vitrail.data.sources.targets import targets_of
from vitrail.errors import ConfigError, DataError, StorageError, suggest
from vitrail.inference.features import DEFAULT_COMPUTE, ComputeOptions, FeatureRequest, Features, gather
from vitrail.inference.protocols import choose_linear, draw_examples, fit_least_squares
from vitrail.metrics.intervals import Interval, wilson_interval
from vitrail.metrics.neighbours import check_k, vote
from vitrail.runtime import OnProgress, Precision, choose_device, on_stage

Method = Literal["fewshot", "knn", "linear"]
METHODS: tuple[Method, ...] = get_args(Method)
SHOTS = (1, 5, 10, 25)
NEIGHBOURS = (20,)


class ProbeRow(NamedTuple):
    """One protocol with one setting."""

    method: Method
    setting: float
    """The shots, k, or the selected decay."""
    accuracies: tuple[float, ...]
    """One per seed; a single one if nothing is drawn."""

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return fmean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None


@dataclass(frozen=True)
class ProbeResult:
    """The accuracy of frozen features, from 0 to 1."""

    rows: tuple[ProbeRow, ...]
    images: int
    """Number of images evaluated on."""
    split: str
    examples: int
    """Number of training images to draw from."""
    classes: tuple[str, ...]
    split_origin: str
    """Origin of the splits: "recorded" (the model's own run), "given" (the data), or "stratified" (drawn here)."""
    notes: tuple[str, ...]
    """What was skipped, and why."""
    bad: tuple[BadImage, ...]

    def interval(self, row: ProbeRow) -> Interval | None:
        """Return the 95% interval of an accuracy without random draws; None where the spread says more."""
        if row.spread is not None or row.method == "fewshot":
            return None
        return wilson_interval(round(row.mean * self.images), self.images)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values."""
        names = {"fewshot": "shots", "knn": "k", "linear": "decay"}
        rows = [
            {
                "method": row.method,
                names[row.method]: row.setting,
                "accuracy": row.mean,
                "spread": row.spread,
                "accuracies": list(row.accuracies),
                "interval": None if (interval := self.interval(row)) is None else list(interval),
            }
            for row in self.rows
        ]
        return {
            "probes": rows,
            "split": self.split,
            "images": self.images,
            "examples": self.examples,
            "classes": list(self.classes),
            "split_origin": self.split_origin,
            "notes": list(self.notes),
            "bad": [image._asdict() for image in self.bad],
        }


@dataclass(frozen=True)
class ProbePlan:
    """What to evaluate. None for shots and neighbours means the defaults, as far as there are enough examples."""

    only: tuple[Method, ...] = METHODS
    shots: tuple[int, ...] | None = None
    seeds: int = 3
    k: tuple[int, ...] | None = None
    split: Literal["test", "val"] = "test"
    """The split to evaluate on."""

    def __post_init__(self) -> None:
        for method in self.only:
            if method not in METHODS:
                methods = ", ".join(METHODS)
                raise ConfigError(f"unknown probe {method!r}; choose {methods}{suggest(method, METHODS)}")
        for name, numbers in (("only", self.only), ("shots", self.shots), ("k", self.k)):
            if numbers is not None and not numbers:
                raise ConfigError(f"{name} is empty; omit it for the defaults")
        for name, number in [("shots", n) for n in self.shots or ()] + [("k", n) for n in self.k or ()]:
            if number < 1:
                raise ConfigError(f"{name} is {number}; it should be 1 or more")
        if self.seeds < 1:
            raise ConfigError(f"seeds is {self.seeds}; it should be 1 or more")
        if self.split not in ("test", "val"):
            raise ConfigError(f"a probe is evaluated on the test or validation split, not on {self.split!r}")


class Collected(NamedTuple):
    """Features of the splits that a plan needs."""

    train: Features
    val: Features | None
    """The validation split that selects the regularisation, if it is not the split evaluated on."""
    evaluated: Features
    classes: tuple[str, ...]
    split_origin: str


def probe(
    bundle: Bundle | str | Path,
    data: Data,
    *,
    only: Sequence[Method] = METHODS,
    shots: Sequence[int] | None = None,
    seeds: int = 3,
    k: Sequence[int] | None = None,
    split: Literal["test", "val"] = "test",
    layer: int | None = None,
    batch: int = 64,
    workers: int | None = None,
    device: str = "auto",
    precision: Precision = "float32",
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    on_progress: OnProgress | None = None,
) -> ProbeResult:
    """Evaluate a model's frozen features: few-shot least squares, nearest neighbours, and a linear probe.

    The training split provides the examples, the validation split selects the linear probe's regularisation, the test
    split gives the accuracy. Features are the input of the head, or what it would be if the model ended after `layer`.
    `overrides` and `keys` are those of `load`.
    """
    plan = ProbePlan(tuple(only), _tuple(shots), seeds, _tuple(k), split)
    how = ComputeOptions(device, precision, batch, workers, on_stage(on_progress, "features"))
    how.check()  # before anything is read
    bundle = ready_bundle(bundle, overrides=overrides, keys=keys)
    FeatureRequest(layer=layer).check(bundle.model.config)
    record = recorded_split(bundle.origin)
    splits = open_splits(data, plan, record, on_progress=on_stage(on_progress, "listing"))
    collected = collect(bundle, splits, plan, how, layer=layer)
    return evaluate_features(collected, plan, device=device, on_progress=on_stage(on_progress, "fitting"))


def open_splits(
    data: Data, plan: ProbePlan, record: Mapping[str, Any] | None = None, *, on_progress: Progress | None = None
) -> Splits:
    """Open data in its splits: those of the model's own run if `record` fits this data, else as training would."""
    opened = given_data(data, on_progress)
    splits = _open(opened, record, on_progress)
    if targets_of(splits.train) is not None:
        raise DataError(f"{title_of(opened)} has more than one class per image, and a probe needs classes; use train")
    if (splits.test if plan.split == "test" else splits.val) is None:
        other = "; evaluate on its validation split with --split val (split='val')" if splits.val is not None else ""
        raise DataError(f"{title_of(opened)} has no {plan.split} split to evaluate on{other}")
    _resolve_shots(plan, splits.train.labels, splits.train.classes)
    if "knn" in plan.only and plan.k is not None:
        check_k(max(plan.k), len(splits.train))
    return splits


def _open(data: str | InMemory, record: Mapping[str, Any] | None, on_progress: Progress | None) -> Splits:
    if record is not None:
        try:
            splits = open_data(data, record=record, on_progress=on_progress)
        except StorageError:
            raise
        except DataError:  # other images than those of the record; data that cannot be opened at all fails again below
            pass
        else:
            return splits._replace(record={**splits.record, "method": "recorded"})
    return open_data(data, on_progress=on_progress)


def collect(
    bundle: Bundle, splits: Splits, plan: ProbePlan, how: ComputeOptions = DEFAULT_COMPUTE, *, layer: int | None = None
) -> Collected:
    """Compute the features of every image that a plan needs, once."""
    evaluated, val = (splits.test, splits.val) if plan.split == "test" else (splits.val, None)
    if evaluated is None:
        raise DataError(f"the {plan.split} split is missing")
    sources = [splits.train, evaluated, *([val] if val is not None and "linear" in plan.only else [])]
    total, done = sum(map(len, sources)), 0
    FeatureRequest(layer=layer).check(bundle.model.config)
    bundle.announce()

    def features(source: Source) -> Features:
        nonlocal done
        before, report = done, how.on_progress
        done += len(source)
        overall = None if report is None else lambda here, _: report(before + here, total)
        return gather(bundle, source, FeatureRequest(layer=layer), replace(how, on_progress=overall))

    collected = [features(source) for source in sources]
    val_features = collected[2] if len(collected) > 2 else None
    return Collected(collected[0], val_features, collected[1], splits.train.classes, str(splits.record["method"]))


def evaluate_features(
    collected: Collected,
    plan: ProbePlan,
    *,
    device: str = "auto",
    on_progress: Callable[[int, int], None] | None = None,
) -> ProbeResult:
    """Evaluate collected features."""
    place = choose_device(device)
    tensors = _Tensors(collected, torch.device("cpu") if place.type == "mps" else place)  # MPS has no float64
    notes: list[str] = []
    rows: list[ProbeRow] = []
    if "fewshot" in plan.only:
        shots, skipped = _resolve_shots(plan, collected.train.labels, collected.classes)
        notes += skipped
        rows += [_few_shot(tensors, number, plan.seeds) for number in shots]
    if "knn" in plan.only:
        rows += [_nearest(tensors, number) for number in _resolve_k(plan, len(collected.train.labels), notes)]
    if "linear" in plan.only:
        rows.append(_linear(tensors, on_progress))
    bad = [*collected.train.bad, *(collected.val.bad if collected.val else ()), *collected.evaluated.bad]
    return ProbeResult(
        rows=tuple(rows),
        images=len(collected.evaluated.labels),
        split=plan.split,
        examples=len(collected.train.labels),
        classes=collected.classes,
        split_origin=collected.split_origin,
        notes=tuple(notes),
        bad=tuple(bad),
    )


class _Tensors:
    """Collected features as tensors on the device."""

    def __init__(self, collected: Collected, device: torch.device) -> None:
        self.classes = len(collected.classes)
        self.train_labels = collected.train.labels
        train, test = collected.train, collected.evaluated
        self.x, self.y = (torch.from_numpy(array).to(device) for array in (train.features, train.labels))
        self.test_x, self.test_y = (torch.from_numpy(array).to(device) for array in (test.features, test.labels))
        self.names = collected.classes
        self.val = collected.val
        self.device = device

    def accuracy(self, scores: Tensor) -> float:
        """Return the top-1 accuracy of scores."""
        return float((scores.argmax(dim=1) == self.test_y).double().mean())

    def fit_and_validation(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the data to fit on and to validate on; without a validation split, a tenth of the examples."""
        if self.val is not None:
            x, y = (torch.from_numpy(array).to(self.device) for array in (self.val.features, self.val.labels))
            return self.x, self.y, x, y
        fit, choose, _ = split_indices(self.train_labels, seed=0, val=0.1, test=0, classes=self.names)
        return self.x[fit], self.y[fit], self.x[choose], self.y[choose]


def _few_shot(tensors: _Tensors, shots: int, seeds: int) -> ProbeRow:
    accuracies = []
    for seed in range(seeds):
        drawn = draw_examples(tensors.train_labels, shots, seed)
        fitted = fit_least_squares(tensors.x[drawn], tensors.y[drawn], tensors.classes)
        accuracies.append(tensors.accuracy(fitted.scores(tensors.test_x)))
    return ProbeRow("fewshot", shots, tuple(accuracies))


def _nearest(tensors: _Tensors, k: int) -> ProbeRow:
    votes = vote(tensors.x, tensors.y, tensors.test_x, tensors.classes, k=k)
    return ProbeRow("knn", k, (tensors.accuracy(votes),))


def _linear(tensors: _Tensors, on_progress: Callable[[int, int], None] | None) -> ProbeRow:
    linear = choose_linear(*tensors.fit_and_validation(), tensors.classes, on_progress=on_progress)
    return ProbeRow("linear", linear.decay, (tensors.accuracy(linear.scores(tensors.test_x)),))


def _resolve_shots(
    plan: ProbePlan, labels: NDArray[np.int64], classes: tuple[str, ...]
) -> tuple[tuple[int, ...], list[str]]:
    """Return the shots for which every class has enough examples, and notes on the others."""
    if "fewshot" not in plan.only:
        return (), []
    counts = np.bincount(labels, minlength=len(classes)).tolist()  # all images of a class may be unreadable
    least = min(counts)
    smallest = [name for name, count in zip(classes, counts, strict=True) if count == least]
    others = f" (and {len(smallest) - 1:,} more)" if len(smallest) > 1 else ""
    actual = f"class {smallest[0]!r}{others} has only {least:,}"
    if plan.shots is None:
        notes = [f"{shots} shots are skipped: {actual} training images" for shots in SHOTS if shots > least]
        return tuple(shots for shots in SHOTS if shots <= least), notes
    if (most := max(plan.shots)) > least:
        raise DataError(f"{most} shots need {most} training images of every class, but {actual}; use fewer shots")
    return plan.shots, []


def _resolve_k(plan: ProbePlan, examples: int, notes: list[str]) -> tuple[int, ...]:
    """Return the numbers of neighbours; requested ones were checked before."""
    if plan.k is None and NEIGHBOURS[0] > examples:
        notes.append(f"k is {examples} instead of {NEIGHBOURS[0]}, because the data has no more training images")
        return (examples,)
    return NEIGHBOURS if plan.k is None else plan.k


def _tuple(numbers: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if numbers is None else tuple(numbers)
