"""The answers to every held-out picture, as held_out.parquet holds them, and those of two runs side by side."""

import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.metrics.pairs import Paired, paired
from vitrail.reports.record import Record
from vitrail.training.folder import HELD_OUT


class Answers(NamedTuple):
    """A row for each held-out picture that could be read, in the order of the data."""

    places: NDArray[np.int64]
    """Which pictures of the source these are."""
    names: list[str]
    true: list[str]
    predicted: list[str]
    confidence: NDArray[np.float32]
    right: NDArray[np.bool_]


class Both(NamedTuple):
    """What two runs answered to the same pictures."""

    one: Answers
    other: Answers
    paired: Paired


def answers_of_both(one: Record, other: Record) -> tuple[Both | None, str]:
    """Return the answers of two runs that were judged by the same pictures; or the reason why there are none."""
    first, why = _read(one)
    second, why_not = _read(other) if first is not None else (None, "")
    if first is None or second is None:
        return None, why or why_not
    if _pictures(first) != _pictures(second):
        return None, (
            "The two runs were judged by different pictures, so they cannot be compared picture by picture; their "
            "intervals are all there is to go by. Runs with the same data and seed have the same held-out pictures."
        )
    return Both(first, second, paired(first.right, second.right)), ""


def _pictures(answers: Answers) -> list[tuple[str, str]]:
    # The same data may have been named by another path.
    return [(os.path.basename(name), true) for name, true in zip(answers.names, answers.true, strict=True)]


def _read(run: Record) -> tuple[Answers | None, str]:
    path = run.folder / HELD_OUT
    if run.verdict is None:
        return None, f"{run.name}: {run.why_no_verdict}"
    if not path.is_file():
        return None, (
            f"{run.name} has no {HELD_OUT}, so the runs cannot be compared picture by picture; pip install "
            "'vitrail[train]' and the same train command add it."
        )
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return None, (
            f"{HELD_OUT} cannot be read without pyarrow, so the runs are not compared picture by picture; pip install "
            "'vitrail[train]' brings it."
        )
    try:
        table = pq.read_table(path, columns=["index", "name", "true", "predicted", "confidence", "correct"])
    except (OSError, pa.ArrowException) as error:
        return None, f"{path} cannot be read: {str(error).splitlines()[0]}"
    columns = table.to_pydict()
    return (
        Answers(
            np.array(columns["index"], np.int64),
            columns["name"],
            columns["true"],
            columns["predicted"],
            np.array(columns["confidence"], np.float32),
            np.array(columns["correct"], np.bool_),
        ),
        "",
    )
