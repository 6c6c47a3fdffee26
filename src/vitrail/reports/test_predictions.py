"""Read test_predictions.parquet: a run's prediction for every test image, as its task wrote them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import InputError
from vitrail.metrics.segmentation import Counts, mean_iou_of_each
from vitrail.reports.run_record import Record
from vitrail.tasks.classification import Classification
from vitrail.tasks.multilabel import Multilabel
from vitrail.tasks.regression import Regression
from vitrail.tasks.segmentation import Segmentation
from vitrail.training.run_folder import TEST_PREDICTIONS

SIMILAR = 0.05
"""The fraction of the pixels, on average, that masks of two sizes may differ by and still count as the same."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredPredictions(ABC):
    """One row per readable test image, in the order of the data."""

    places: NDArray[np.int64]
    """Indices of the images in the source."""
    names: list[str]
    digests: list[str]

    @property
    @abstractmethod
    def truths(self) -> Sequence[Hashable]:
        """What each image is labelled with."""

    @property
    def images(self) -> list[tuple[str, Hashable]]:
        """The images and their labels."""
        # By content: the same data may be at another path, and other data may have the same file names.
        return list(zip(self.digests, self.truths, strict=True))

    def same_images(self, other: "StoredPredictions") -> bool:
        """Whether the others are predictions for the same images with the same labels."""
        return self.images == other.images

    @cached_property
    def rows(self) -> dict[int, int]:
        """The row of each image, by its index in the source."""
        return {place: row for row, place in enumerate(self.places.tolist())}


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassPredictions(StoredPredictions):
    """The predictions of a classifier."""

    true: list[str]
    predicted: list[str]
    confidence: NDArray[np.float32]
    correct: NDArray[np.bool_]

    @property
    def truths(self) -> Sequence[Hashable]:
        """The class of each image."""
        return self.true


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelPredictions(StoredPredictions):
    """The predictions of a multi-label classifier; arrays are (N, K)."""

    labels: tuple[str, ...]
    true: NDArray[np.bool_]
    predicted: NDArray[np.bool_]
    probabilities: NDArray[np.float32]
    loss: NDArray[np.float64]
    """(N,)."""

    @property
    def truths(self) -> Sequence[Hashable]:
        """The labels of each image, whether or not the model has more."""
        return [frozenset(self.named(row)) for row in self.true]

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whether all labels of an image are right."""
        return np.asarray((self.true == self.predicted).all(axis=1))

    def named(self, has: NDArray[np.bool_]) -> list[str]:
        """Return the names of the labels in a row."""
        return [self.labels[place] for place in np.flatnonzero(has).tolist()]


@dataclass(frozen=True, eq=False, kw_only=True)
class ValuePredictions(StoredPredictions):
    """The predictions of a regression model; arrays are (N, K)."""

    columns: tuple[str, ...]
    true: NDArray[np.float64]
    predicted: NDArray[np.float64]

    @property
    def truths(self) -> Sequence[Hashable]:
        """The numbers of each image by column."""
        order = sorted(range(len(self.columns)), key=self.columns.__getitem__)
        named = tuple(self.columns[place] for place in order)
        return [(named, tuple(row)) for row in self.true[:, order].tolist()]


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskPredictions(StoredPredictions):
    """The predictions of a segmentation model, as pixels of each class in each image."""

    classes: tuple[str, ...]
    counts: Counts
    """(N, 3, K): the correct, predicted and true pixels, at the size of the model's input."""
    mean_iou: NDArray[np.float64]
    """(N,); NaN for an image without labelled pixels."""

    @property
    def truths(self) -> Sequence[Hashable]:
        """The pixels of each class in each mask."""
        return [tuple(row) for row in self.true(sorted(self.classes)).tolist()]

    def true(self, classes: Sequence[str]) -> NDArray[np.int64]:
        """Return the true pixels of some classes (N, K'); 0 for a class that the model does not have."""
        places = {name: place for place, name in enumerate(self.classes)}
        none = np.zeros(len(self.counts), np.int64)
        return np.stack([self.counts[:, 2, places[name]] if name in places else none for name in classes], axis=1)

    def same_images(self, other: StoredPredictions) -> bool:
        """Whether the others are predictions for the same images with the same masks.

        Models with inputs of different sizes see the same mask with different numbers of pixels. Then the shares of the
        classes have to be similar.
        """
        if not isinstance(other, MaskPredictions) or self.digests != other.digests or not self.digests:
            return False
        every = sorted({*self.classes, *other.classes})
        ours, theirs = self.true(every), other.true(every)
        if (ours.sum(axis=1) == theirs.sum(axis=1)).all():
            return bool((ours == theirs).all())
        shares = [pixels / np.maximum(pixels.sum(axis=1, keepdims=True), 1) for pixels in (ours, theirs)]
        return float(np.abs(shares[0] - shares[1]).sum(axis=1).mean() / 2) <= SIMILAR


def read_predictions(run: Record) -> tuple[StoredPredictions | None, str]:
    """Return the predictions of a run for its test images, or the reason why they are missing."""
    path = run.folder / TEST_PREDICTIONS
    if run.result is None:
        return None, f"{run.name}: {run.why_no_result}"
    parse = _PARSERS.get(run.purpose)
    if parse is None:
        return None, f"Predictions of the task {run.purpose} are not compared image by image."
    if not path.is_file():
        return None, (
            f"{run.name} has no {TEST_PREDICTIONS}, which the predictions for single images are read from; pip install "
            "'vitrail[train]' and rerun the same train command to add it."
        )
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return None, (
            f"{TEST_PREDICTIONS} cannot be read without pyarrow, so the predictions for single images are missing; pip "
            "install 'vitrail[train]' adds it."
        )
    try:
        return parse(pq.read_table(path)), ""
    except (OSError, pa.ArrowException) as error:
        return None, f"{path} cannot be read: {str(error).splitlines()[0]}"
    except KeyError as error:  # pyarrow's message names the column
        column = str(error.args[0])
        return None, f"{path} has no column {column!r}; rerun the same train command to write it again."
    except (TypeError, ValueError, InputError) as error:
        return None, f"{path} cannot be read: {str(error).splitlines()[0]}"


def unreadable_predictions(run: Record) -> tuple[str, ...]:
    """Return a sentence if a run's prediction file exists but cannot be read."""
    there = (run.folder / TEST_PREDICTIONS).exists() and run.result is not None and run.purpose in _PARSERS
    rows, why = read_predictions(run) if there else (None, "")
    return (why.rstrip("."),) if there and rows is None else ()


def _column(table: Any, name: str) -> Any:
    if name not in table.column_names:
        raise KeyError(name)
    return table.column(name)


def _common(table: Any) -> dict[str, Any]:
    return {
        "places": _column(table, "index").to_numpy().astype(np.int64),
        "names": _column(table, "name").to_pylist(),
        "digests": _column(table, "digest").to_pylist(),
    }


def _outputs(table: Any) -> tuple[str, ...]:
    """Return the names of the model's outputs."""
    return tuple(map(str, json.loads((table.schema.metadata or {}).get(b"classes", b"[]"))))


def _classes(table: Any) -> ClassPredictions:
    return ClassPredictions(
        **_common(table),
        true=_column(table, "true").to_pylist(),
        predicted=_column(table, "predicted").to_pylist(),
        confidence=np.array(_column(table, "confidence").to_pylist(), np.float32),
        correct=np.array(_column(table, "correct").to_pylist(), np.bool_),
    )


def _labels(table: Any) -> LabelPredictions:
    labels = _outputs(table)
    probabilities = _column(table, "probabilities").combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return LabelPredictions(
        **_common(table),
        labels=labels,
        true=_has(_column(table, "true").to_pylist(), labels),
        predicted=_has(_column(table, "predicted").to_pylist(), labels),
        probabilities=probabilities.astype(np.float32).reshape(table.num_rows, len(labels)),
        loss=_column(table, "loss").to_numpy().astype(np.float64),
    )


def _has(lists: Sequence[Sequence[str]], labels: Sequence[str]) -> NDArray[np.bool_]:
    """Return which labels each image has (N, K)."""
    places = {name: place for place, name in enumerate(labels)}
    has = np.zeros((len(lists), len(labels)), np.bool_)
    for row, names in enumerate(lists):
        if unknown := [name for name in names if name not in places]:
            raise ValueError(f"its labels do not include {unknown[0]!r}")
        has[row, [places[name] for name in names]] = True
    return has


def _values(table: Any) -> ValuePredictions:
    columns = _outputs(table)

    def numbers(kind: str) -> NDArray[np.float64]:
        read = [_column(table, f"{kind} {name}").to_numpy().astype(np.float64) for name in columns]
        return np.stack(read, axis=1) if read else np.zeros((table.num_rows, 0))

    return ValuePredictions(**_common(table), columns=columns, true=numbers("true"), predicted=numbers("predicted"))


def _masks(table: Any) -> MaskPredictions:
    classes = _outputs(table)

    def pixels(kind: str) -> NDArray[np.int64]:
        flat = _column(table, f"{kind}_pixels").combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return np.asarray(flat.astype(np.int64).reshape(table.num_rows, len(classes)))

    counts = np.stack([pixels(kind) for kind in ("correct", "predicted", "true")], axis=1)
    return MaskPredictions(**_common(table), classes=classes, counts=counts, mean_iou=mean_iou_of_each(counts))


_PARSERS = {
    Classification.name: _classes,
    Multilabel.name: _labels,
    Regression.name: _values,
    Segmentation.name: _masks,
}
