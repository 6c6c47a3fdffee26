"""The comparison of two runs: both metrics, and the paired test on the same images."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.html_page import Page
from tests.support.tiny_runs import CLASSES

from vitrail.metrics.intervals import paired
from vitrail.reports.pair import mcnemar_statement
from vitrail.reports.pairs import pair_runs
from vitrail.reports.report import report
from vitrail.reports.run_record import read_run
from vitrail.text import as_percent


@pytest.fixture(scope="module")
def page(run: Path, other_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(report(run, other_run, tmp_path_factory.mktemp("compare") / "both.html"))


def test_both_runs_have_their_metrics(page: Page, run: Path, other_run: Path) -> None:
    for folder in (run, other_run):
        result = json.loads((folder / "result.json").read_text())
        assert as_percent(result["top1"]) in page.sections["result"]
        assert folder.name in page.sections["result"]


def test_only_different_settings_are_listed(page: Page) -> None:
    text = page.sections["settings"]
    assert "optimizer.lr" in text
    assert "epochs" in text
    assert "model.width" not in text


def test_the_same_images_are_paired(page: Page, run: Path, other_run: Path) -> None:
    right = [
        np.array(pq.read_table(folder / "test_predictions.parquet", columns=["correct"])["correct"])
        for folder in (run, other_run)
    ]
    only_a, only_b = int((right[0] & ~right[1]).sum()), int((~right[0] & right[1]).sum())
    assert only_a + only_b, "the runs are meant to differ"
    assert f"only A is correct on {only_a} and only B on {only_b}" in " ".join(page.sections["pairs"].split())
    shown = page.all("img")
    assert len(shown) == min(6, only_a) + min(6, only_b)


def test_classes_are_sorted_by_their_change(page: Page) -> None:
    for name in CLASSES:
        assert name in page.sections["classes"]
    keys = [float(cell["data-key"] or 0) for cell in page.all("td") if cell.get("data-key")]
    changes = keys[2::4]
    assert len(changes) == 3
    assert changes == sorted(changes, key=abs, reverse=True)


def test_different_images_are_not_paired(run: Path, copy: Path) -> None:
    table = pq.read_table(copy / "test_predictions.parquet")
    pq.write_table(table.slice(1), copy / "test_predictions.parquet")
    both, why = pair_runs(read_run(run), read_run(copy))
    assert both is None
    assert "evaluated on different images" in why
    assert "evaluated on different images" in Page(report(run, copy, copy / "both.html")).sections["pairs"]


def test_runs_on_different_data_have_no_winner(run: Path, copy: Path, tmp_path: Path) -> None:
    """The same names and classes but different images: B would look better."""
    table = pq.read_table(copy / "test_predictions.parquet")
    place = table.schema.get_field_index("digest")
    other = pa.array([f"{number:016x}" for number in range(table.num_rows)])
    pq.write_table(table.set_column(place, "digest", other), copy / "test_predictions.parquet")
    result = json.loads((copy / "result.json").read_text())
    result |= {"top1": 1.0, "top1_interval": [0.98, 1.0]}
    (copy / "result.json").write_text(json.dumps(result))
    page = Page(report(run, copy, tmp_path / "both.html"))
    head = page.sections[""]
    assert "Different test images: A " in head
    assert "B 100.0%" in head
    assert "do not show which model is better" in head
    text = " ".join(page.sections.values())
    assert "is better:" not in text
    assert "B − A" not in text
    assert not [cell for cell in page.all("span") if cell.get("class") in ("up", "down")]
    assert "only on the same images" in page.sections["classes"]
    for folder in (run, copy):
        assert as_percent(json.loads((folder / "result.json").read_text())["top1"]) in page.sections["result"]


def test_the_same_data_at_another_path_is_paired(run: Path, copy: Path) -> None:
    table = pq.read_table(copy / "test_predictions.parquet")
    place = table.schema.get_field_index("name")
    moved = pa.array([f"elsewhere/{number}.png" for number in range(table.num_rows)])
    pq.write_table(table.set_column(place, "name", moved), copy / "test_predictions.parquet")
    both, _ = pair_runs(read_run(run), read_run(copy))
    assert both is not None


def test_without_predictions_the_recorded_split_is_compared(run: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "test_predictions.parquet").unlink()
    assert "No clear difference" in Page(report(run, copy, tmp_path / "a.html")).sections[""]
    split = json.loads((copy / "split.json").read_text())
    split["names"]["test"][0] = "another.png"
    (copy / "split.json").write_text(json.dumps(split))
    assert "Different test images" in Page(report(run, copy, tmp_path / "a.html")).sections[""]


def test_missing_files_of_either_run_are_reported(run: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "test_predictions.parquet").unlink()
    assert "has no test_predictions.parquet" in Page(report(run, copy, tmp_path / "a.html")).sections["pairs"]
    (copy / "test_predictions.parquet").write_bytes(b"PAR1 no")
    assert "cannot be read" in Page(report(run, copy, tmp_path / "a.html")).sections["pairs"]
    (copy / "result.json").unlink()
    page = Page(report(copy, run, tmp_path / "a.html"))
    assert "The runs do not both have a result yet" in page.sections[""]
    shutil.copy(run / "result.json", copy / "result.json")


def test_a_run_does_not_differ_from_itself(run: Path, tmp_path: Path) -> None:
    page = Page(report(run, run, tmp_path / "same.html"))
    assert "No clear difference" in page.sections[""]
    assert "correct on exactly the same ones" in page.sections["pairs"]
    assert "None: both runs have the same recipe" in page.sections["settings"]


def test_the_statement_reports_significance() -> None:
    first, second = np.zeros(40, bool), np.zeros(40, bool)
    second[:3] = True
    assert "not significant" in mcnemar_statement(paired(first, second))
    second[:12] = True
    assert "p < 0.001), so the difference is significant" in mcnemar_statement(paired(first, second))


def test_the_default_file_name_has_both_runs(copy: Path, other_run: Path) -> None:
    assert report(copy, other_run) == copy / "report-and-other.html"


def test_a_very_long_run_name_is_shortened(copy: Path, other_run: Path, tmp_path: Path) -> None:
    long = shutil.copytree(other_run, tmp_path / ("n" * 240))
    assert len(report(copy, long).name) < 100
