"""The comparison of two runs with several labels, or with numbers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.html_page import Page
from tests.support.tiny_runs import CLASSES, COLUMNS

from vitrail.metrics.intervals import Interval, bootstrap_mean
from vitrail.metrics.multilabel import mean_average_precision
from vitrail.reports.label_pair import LabelPair
from vitrail.reports.page import signed
from vitrail.reports.pair import better_by
from vitrail.reports.pairs import evaluated_on_same_images, pair_runs
from vitrail.reports.report import report
from vitrail.reports.run_record import Record, read_run
from vitrail.reports.test_predictions import LabelPredictions, ValuePredictions, read_predictions
from vitrail.reports.value_pair import ValuePair


def value_pair(one: Path, other: Path) -> ValuePair:
    both, why = pair_runs(read_run(one), read_run(other))
    assert isinstance(both, ValuePair), why
    return both


def label_pair(one: Path, other: Path) -> LabelPair:
    both, why = pair_runs(read_run(one), read_run(other))
    assert isinstance(both, LabelPair), why
    return both


def predictions(folder: Path) -> tuple[Record, ValuePredictions | LabelPredictions]:
    stored, why = read_predictions(read_run(folder))
    assert isinstance(stored, ValuePredictions | LabelPredictions), why
    return read_run(folder), stored


def shifted(run: Path, target: Path, by: float) -> Path:
    """Copy a regression run, with predictions that are nearer to (below 0) or further from the true values."""
    shutil.copytree(run, target)
    table = pq.read_table(target / "test_predictions.parquet")
    true, predicted = (table.column(f"{kind} {COLUMNS[0]}").to_numpy() for kind in ("true", "predicted"))
    place = table.schema.get_field_index(f"predicted {COLUMNS[0]}")
    moved = pa.array(predicted + by * np.sign(predicted - true))
    pq.write_table(table.set_column(place, f"predicted {COLUMNS[0]}", moved), target / "test_predictions.parquet")
    return target


# ── numbers ──


def test_the_difference_of_errors_is_paired(value_run: Path, other_value_run: Path) -> None:
    both = value_pair(value_run, other_value_run)
    (_, a), (_, b) = predictions(value_run), predictions(other_value_run)
    errors = [np.abs(one.predicted - one.true)[:, 0] for one in (a, b)]
    assert both.difference[0] == pytest.approx((errors[1] - errors[0]).mean())
    assert both.difference[1] == bootstrap_mean(errors[1] - errors[0])


def test_the_lower_error_is_better(value_run: Path, tmp_path: Path) -> None:
    nearer = shifted(value_run, tmp_path / "nearer", -0.4)
    assert value_pair(value_run, nearer).better == "B"
    assert value_pair(nearer, value_run).better == "A"
    page = Page(report(value_run, nearer, tmp_path / "page.html"))
    assert "B is better: " in page.sections[""]
    assert "so the difference is significant" in page.sections[""]
    text = " ".join(page.sections["pairs"].split())
    assert "is \N{MINUS SIGN}0.4 (95% bootstrap interval \N{MINUS SIGN}0.4 to \N{MINUS SIGN}0.4)" in text.replace(
        "0.40", "0.4"
    )
    assert "A is closer to the true value on 0 images, and B on 18 images." in text
    assert "B is much closer" in text
    assert "A is much closer" not in text
    assert len(page.all("img")) == 6
    assert list(page.sections) == ["", "result", "pairs", "settings", "curves", "reproduce"]


def test_a_run_does_not_differ_from_itself(value_run: Path, labels_run: Path, tmp_path: Path) -> None:
    for run in (value_run, labels_run):
        page = Page(report(run, run, tmp_path / "page.html"))
        assert "No clear difference" in page.sections[""]
        assert "so the difference is not significant" in page.sections["pairs"]


def test_several_columns_are_compared_in_standard_deviations(columns_run: Path, tmp_path: Path) -> None:
    both = value_pair(columns_run, columns_run)
    (_, stored) = predictions(columns_run)
    wanted = (np.abs(stored.predicted - stored.true) / stored.true.std(axis=0)).mean(axis=1)
    assert both.errors[0] == pytest.approx(wanted)
    page = Page(report(columns_run, columns_run, tmp_path / "page.html"))
    text = " ".join(page.sections["pairs"].split())
    assert "in standard deviations of the true values" in text
    assert all(name in text for name in COLUMNS), "a table of the columns"
    assert f"Mean absolute error of {COLUMNS[0]}" in page.sections["result"]
    assert page.all("i") == [], "the column's name is no markup"


def test_other_columns_have_no_winner(value_run: Path, columns_run: Path, tmp_path: Path) -> None:
    both, why = pair_runs(read_run(value_run), read_run(columns_run))
    assert both is None
    assert "predict other columns" in why
    assert not evaluated_on_same_images(read_run(value_run), read_run(columns_run))
    page = Page(report(value_run, columns_run, tmp_path / "page.html"))
    assert "Different columns: A " in page.sections[""]
    assert f"A predicts {COLUMNS[0]} and B {', '.join(COLUMNS)}, so the numbers" in page.sections[""]
    assert "is better:" not in "".join(page.sections.values())


# ── labels ──


def test_the_difference_of_the_average_precision_is_paired(labels_run: Path, other_labels_run: Path) -> None:
    both = label_pair(labels_run, other_labels_run)
    results = [json.loads((run / "result.json").read_text()) for run in (labels_run, other_labels_run)]
    apart = results[1]["mean_average_precision"] - results[0]["mean_average_precision"]
    assert both.difference[0] == pytest.approx(apart, abs=1e-6)
    assert both.difference[1].low <= apart <= both.difference[1].high
    right = [run.correct.mean() for run in (both.one, both.other)]
    assert [result["exact_match"] for result in results] == pytest.approx(right)
    assert both.exact.difference == pytest.approx(right[1] - right[0])


def test_the_higher_average_precision_is_better(labels_run: Path, tmp_path: Path) -> None:
    perfect = shutil.copytree(labels_run, tmp_path / "perfect")
    table = pq.read_table(perfect / "test_predictions.parquet")
    _, stored = predictions(labels_run)
    assert isinstance(stored, LabelPredictions)
    flat = pa.array(np.where(stored.true, 0.9, 0.1).astype(np.float32).ravel())
    ours = {
        "predicted": table.column("true"),
        "probabilities": pa.FixedSizeListArray.from_arrays(flat, len(stored.labels)),
        "loss": pa.array(np.full(len(stored.names), 0.1)),
    }
    for name, column in ours.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(table, perfect / "test_predictions.parquet")
    both = label_pair(labels_run, perfect)
    assert both.better == "B"
    assert both.difference[0] == pytest.approx(1 - mean_average_precision(stored.probabilities, stored.true))
    page = Page(report(labels_run, perfect, tmp_path / "page.html"))
    assert "B is better: " in page.sections[""]
    text = " ".join(page.sections["pairs"].split())
    assert "only A is right about all labels on 0 and only B on" in text
    assert "Only B has all labels right" in text
    assert len(page.all("img")) == 6
    assert list(page.sections) == ["", "result", "pairs", "settings", "curves", "labels", "reproduce"]
    assert all(name in page.sections["labels"] for name in CLASSES)


def test_labels_that_no_image_has_do_not_matter(labels_run: Path, tmp_path: Path) -> None:
    """Another model may have more labels."""
    more = shutil.copytree(labels_run, tmp_path / "more")
    table = pq.read_table(more / "test_predictions.parquet")
    _, stored = predictions(labels_run)
    assert isinstance(stored, LabelPredictions)
    wider = np.concatenate([np.full((len(stored.names), 1), 0.5, np.float32), stored.probabilities], axis=1)
    column = pa.FixedSizeListArray.from_arrays(pa.array(wider.ravel()), wider.shape[1])
    table = table.set_column(table.schema.get_field_index("probabilities"), "probabilities", column)
    names = json.dumps(["never", *stored.labels])
    pq.write_table(table.replace_schema_metadata({"classes": names}), more / "test_predictions.parquet")
    assert evaluated_on_same_images(read_run(labels_run), read_run(more))
    assert label_pair(labels_run, more).difference == (0.0, Interval(0.0, 0.0))


def test_other_labels_of_the_same_images_are_not_paired(labels_run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(labels_run, tmp_path / "other")
    table = pq.read_table(other / "test_predictions.parquet")
    changed = table.column("true").to_pylist()
    changed[0] = [] if changed[0] else [CLASSES[0]]
    column = pa.array(changed, pa.list_(pa.string()))
    place = table.schema.get_field_index("true")
    pq.write_table(table.set_column(place, "true", column), other / "test_predictions.parquet")
    both, why = pair_runs(read_run(labels_run), read_run(other))
    assert both is None
    assert "with different labels" in why
    assert (
        "Labels are compared only on the same images"
        in Page(report(labels_run, other, tmp_path / "page.html")).sections["labels"]
    )


# ── both ──


def test_different_tasks_have_no_winner(labels_run: Path, value_run: Path, tmp_path: Path) -> None:
    page = Page(report(labels_run, value_run, tmp_path / "page.html"))
    assert "Different tasks: A is multilabel, B is regression" in page.sections[""]


def test_every_string_is_escaped(labels_run: Path, columns_run: Path, tmp_path: Path) -> None:
    for one, other in ((labels_run, labels_run), (labels_run, columns_run), (columns_run, labels_run)):
        page = Page(report(one, other, tmp_path / "page.html"))
        assert page.all("i") == []
        assert len(page.all("script")) == 1


def test_without_predictions_the_recorded_split_is_compared(value_run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(value_run, tmp_path / "copy")
    (copy / "test_predictions.parquet").unlink()
    assert evaluated_on_same_images(read_run(value_run), read_run(copy))
    page = Page(report(value_run, copy, tmp_path / "page.html"))
    assert "has no test_predictions.parquet" in page.sections["pairs"]
    assert "Their 95% confidence intervals overlap." in page.sections[""]


def test_an_interval_that_includes_zero_has_no_winner() -> None:
    assert better_by(Interval(-1, 0.5), lower_is_better=True) is None
    assert better_by(Interval(0.1, 0.5), lower_is_better=True) == "A"
    assert better_by(Interval(0.1, 0.5), lower_is_better=False) == "B"
    assert better_by(Interval(-0.5, -0.1), lower_is_better=True) == "B"
    assert better_by(Interval(float("nan"), float("nan")), lower_is_better=True) is None


def test_differences_have_a_sign() -> None:
    minus = "\N{MINUS SIGN}"
    assert [signed(x, 10) for x in (0.5, -0.5, 0.0, -1e-9)] == ["+0.50", f"{minus}0.50", "0.00", "0.00"]
