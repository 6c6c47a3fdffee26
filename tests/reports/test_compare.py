"""Two runs side by side: the numbers of both, and what the same images tell."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.reports.runs import CLASSES
from tests.reports.test_report import Page

from vitrail.metrics.pairs import paired
from vitrail.reports.compare import _statement
from vitrail.reports.formatting import as_percent
from vitrail.reports.predictions import paired_predictions
from vitrail.reports.report import report
from vitrail.reports.run_record import read_run


@pytest.fixture(scope="module")
def page(run: Path, other_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(report(run, other_run, tmp_path_factory.mktemp("compare") / "both.html"))


def test_both_numbers_are_there_with_their_names(page: Page, run: Path, other_run: Path) -> None:
    for folder in (run, other_run):
        result = json.loads((folder / "result.json").read_text())
        assert as_percent(result["top1"]) in page.sections["result"]
        assert folder.name in page.sections["result"]


def test_the_settings_that_differ_are_listed_and_no_others(page: Page) -> None:
    text = page.sections["settings"]
    assert "optimizer.lr" in text
    assert "epochs" in text
    assert "model.width" not in text


def test_the_same_images_are_compared_one_by_one(page: Page, run: Path, other_run: Path) -> None:
    right = [
        np.array(pq.read_table(folder / "test_predictions.parquet", columns=["correct"])["correct"])
        for folder in (run, other_run)
    ]
    only_a, only_b = int((right[0] & ~right[1]).sum()), int((~right[0] & right[1]).sum())
    assert only_a + only_b, "the runs are meant to differ"
    assert f"A alone is right on {only_a} and B alone on {only_b}" in " ".join(page.sections["pairs"].split())
    shown = page.all("img")
    assert len(shown) == min(6, only_a) + min(6, only_b)


def test_classes_that_changed_are_in_the_order_of_the_change(page: Page) -> None:
    for name in CLASSES:
        assert name in page.sections["classes"]
    keys = [float(cell["data-key"] or 0) for cell in page.all("td") if cell.get("data-key")]
    changes = keys[2::4]
    assert len(changes) == 3
    assert changes == sorted(changes, key=abs, reverse=True)


def test_other_images_are_not_compared_one_by_one(run: Path, copy: Path) -> None:
    table = pq.read_table(copy / "test_predictions.parquet")
    pq.write_table(table.slice(1), copy / "test_predictions.parquet")
    both, why = paired_predictions(read_run(run), read_run(copy))
    assert both is None
    assert "evaluated on different images" in why
    assert "evaluated on different images" in Page(report(run, copy, copy / "both.html")).sections["pairs"]


def test_runs_on_different_data_are_shown_side_by_side_and_neither_is_better(
    run: Path, copy: Path, tmp_path: Path
) -> None:
    """The same names and classes, other images: B would have been called better."""
    table = pq.read_table(copy / "test_predictions.parquet")
    place = table.schema.get_field_index("digest")
    other = pa.array([f"{number:016x}" for number in range(table.num_rows)])
    pq.write_table(table.set_column(place, "digest", other), copy / "test_predictions.parquet")
    result = json.loads((copy / "result.json").read_text())
    result |= {"top1": 1.0, "top1_interval": [0.98, 1.0]}
    (copy / "result.json").write_text(json.dumps(result))
    page = Page(report(run, copy, tmp_path / "both.html"))
    head = page.sections[""]
    assert "Different data: A " in head
    assert "B 100.0%" in head
    assert "do not say which model is better" in head
    text = " ".join(page.sections.values())
    assert "is better:" not in text
    assert "B − A" not in text
    assert not [cell for cell in page.all("span") if cell.get("class") in ("up", "down")]
    assert "where the images are the same" in page.sections["classes"]
    for folder in (run, copy):
        assert as_percent(json.loads((folder / "result.json").read_text())["top1"]) in page.sections["result"]


def test_the_same_data_in_another_place_is_the_same(run: Path, copy: Path) -> None:
    table = pq.read_table(copy / "test_predictions.parquet")
    place = table.schema.get_field_index("name")
    moved = pa.array([f"elsewhere/{number}.png" for number in range(table.num_rows)])
    pq.write_table(table.set_column(place, "name", moved), copy / "test_predictions.parquet")
    both, _ = paired_predictions(read_run(run), read_run(copy))
    assert both is not None


def test_without_predictions_the_recorded_split_tells_whether_the_images_are_the_same(
    run: Path, copy: Path, tmp_path: Path
) -> None:
    (copy / "test_predictions.parquet").unlink()
    assert "No clear difference" in Page(report(run, copy, tmp_path / "a.html")).sections[""]
    split = json.loads((copy / "split.json").read_text())
    split["names"]["test"][0] = "another.png"
    (copy / "split.json").write_text(json.dumps(split))
    assert "Different data" in Page(report(run, copy, tmp_path / "a.html")).sections[""]


def test_what_is_missing_in_either_is_said(run: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "test_predictions.parquet").unlink()
    assert "has no test_predictions.parquet" in Page(report(run, copy, tmp_path / "a.html")).sections["pairs"]
    (copy / "test_predictions.parquet").write_bytes(b"PAR1 no")
    assert "cannot be read" in Page(report(run, copy, tmp_path / "a.html")).sections["pairs"]
    (copy / "result.json").unlink()
    page = Page(report(copy, run, tmp_path / "a.html"))
    assert "Not both runs have a result yet" in page.sections[""]
    shutil.copy(run / "result.json", copy / "result.json")


def test_a_run_is_as_good_as_itself(run: Path, tmp_path: Path) -> None:
    page = Page(report(run, run, tmp_path / "same.html"))
    assert "No clear difference" in page.sections[""]
    assert "right and wrong on exactly the same ones" in page.sections["pairs"]
    assert "Nothing: both have the same recipe" in page.sections["settings"]


def test_the_statement_calls_luck_luck() -> None:
    first, second = np.zeros(40, bool), np.zeros(40, bool)
    second[:3] = True
    assert "says little" in _statement(paired(first, second))
    second[:12] = True
    assert "less than once in 1,000 times, so this is a difference" in _statement(paired(first, second))


def test_by_default_the_file_names_both(copy: Path, other_run: Path) -> None:
    assert report(copy, other_run) == copy / "report-and-other.html"


def test_a_run_with_a_very_long_name_has_a_file_all_the_same(copy: Path, other_run: Path, tmp_path: Path) -> None:
    long = shutil.copytree(other_run, tmp_path / ("n" * 240))
    assert len(report(copy, long).name) < 100
