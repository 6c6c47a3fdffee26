"""Read test_predictions.parquet, and pair the predictions of two runs."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.metrics.pairs import Paired, paired
from vitrail.reports.run_record import Record
from vitrail.training.run_folder import TEST_PREDICTIONS

COLUMNS = ["index", "name", "true", "predicted", "confidence", "correct", "digest"]


class RunPredictions(NamedTuple):
    """One row per readable test image, in the order of the data."""

    places: NDArray[np.int64]
    """Indices of the images in the source."""
    names: list[str]
    true: list[str]
    predicted: list[str]
    confidence: NDArray[np.float32]
    correct: NDArray[np.bool_]
    digests: list[str]


class PairedPredictions(NamedTuple):
    """The predictions of two runs for the same images."""

    one: RunPredictions
    other: RunPredictions
    paired: Paired


def paired_predictions(one: Record, other: Record) -> tuple[PairedPredictions | None, str]:
    """Return the predictions of two runs for the same images, or the reason why they cannot be paired."""
    first, why = _read(one)
    second, why_not = _read(other) if first is not None else (None, "")
    if first is None or second is None:
        return None, why or why_not
    if _images(first) != _images(second):
        return None, (
            "The two runs were evaluated on different images, so they cannot be compared image by image. Runs with the "
            "same data and seed have the same test images."
        )
    return PairedPredictions(first, second, paired(first.correct, second.correct)), ""


def unreadable_predictions(run: Record) -> tuple[str, ...]:
    """Return a sentence if a run's prediction file exists but cannot be read."""
    there = (run.folder / TEST_PREDICTIONS).exists() and run.result is not None
    rows, why = _read(run) if there else (None, "")
    return (why.rstrip("."),) if there and rows is None else ()


def evaluated_on_same_images(one: Record, other: Record) -> bool:
    """Whether two runs were evaluated on the same images, by their digests or else by their recorded names."""
    first, second = _read(one)[0], _read(other)[0]
    if first is not None and second is not None:
        return _images(first) == _images(second)
    there, here = (_recorded_names(run) for run in (one, other))
    return bool(there) and there == here and one.data == other.data


def _recorded_names(run: Record) -> list[str]:
    names = (run.split or {}).get("names", {})
    return list(names.get("test") or names.get("val") or ()) if isinstance(names, dict) else []


def _images(predictions: RunPredictions) -> list[tuple[str, str]]:
    # By content: the same data may be at another path, and other data may have the same file names.
    return list(zip(predictions.digests, predictions.true, strict=True))


def _read(run: Record) -> tuple[RunPredictions | None, str]:
    path = run.folder / TEST_PREDICTIONS
    if run.result is None:
        return None, f"{run.name}: {run.why_no_result}"
    if not path.is_file():
        return None, (
            f"{run.name} has no {TEST_PREDICTIONS}, so the runs cannot be compared image by image; pip install "
            "'vitrail[train]' and rerun the same train command to add it."
        )
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return None, (
            f"{TEST_PREDICTIONS} cannot be read without pyarrow, so the runs are not compared image by image; pip "
            "install 'vitrail[train]' adds it."
        )
    try:
        table = pq.read_table(path, columns=COLUMNS)
    except (OSError, pa.ArrowException) as error:
        return None, f"{path} cannot be read: {str(error).splitlines()[0]}"
    columns = table.to_pydict()
    if missing := [name for name in COLUMNS if name not in columns]:
        return None, f"{path} has no column {missing[0]!r}; rerun the same train command to write it again."
    return (
        RunPredictions(
            np.array(columns["index"], np.int64),
            columns["name"],
            columns["true"],
            columns["predicted"],
            np.array(columns["confidence"], np.float32),
            np.array(columns["correct"], np.bool_),
            columns["digest"],
        ),
        "",
    )
