"""The report of a regression run: predicted against true values, errors, and the images with the largest ones."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.support.html_page import Page
from tests.support.tiny_runs import COLUMNS

from vitrail.data.sources.matching import Retargeted
from vitrail.data.sources.source import Arrays
from vitrail.data.sources.targets import Targets
from vitrail.reports.report import report
from vitrail.reports.run_artifacts import open_artifacts
from vitrail.reports.run_record import read_run
from vitrail.reports.values import mean_errors
from vitrail.tasks.regression import Regression
from vitrail.tasks.regression_metrics import regression_metrics
from vitrail.tasks.task import Predictions
from vitrail.text import number
from vitrail.training.split_predictions import write_test_predictions


@pytest.fixture(scope="module")
def page(value_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(report(value_run, out=tmp_path_factory.mktemp("page") / "report.html"))


@pytest.fixture
def bare(value_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(value_run, tmp_path / "copy", ignore=shutil.ignore_patterns("best", "last", "state"))


def section(page: Page, name: str) -> str:
    return page.html.partition(f'<section id="{name}"')[2].partition("</section>")[0]


def with_result(folder: Path, columns: int, images: int) -> Path:
    """Replace result and predictions of a run by those of a random model; later columns are predicted better."""
    generator = np.random.default_rng(0)
    true = generator.normal(50, 10, (images, columns))
    predicted = true + generator.normal(0, 10, (images, columns)) / np.arange(1, columns + 1)
    names = tuple(f"column {place}" for place in range(columns))
    images_of = Arrays(np.zeros((images, 2, 2), np.uint8), np.zeros(images, np.int64), ("all",))
    source = Retargeted(images_of, Targets("values", names, true))
    predictions = Predictions(predicted, true, np.arange(images))
    measured = regression_metrics(predictions, source, std=(10.0,) * columns, median=(50.0,) * columns)
    (folder / "result.json").write_text(json.dumps(measured.as_dict()))
    write_test_predictions(predictions, source, folder / "test_predictions.parquet", Regression())
    return folder


def test_every_section_is_present_and_none_speaks_of_classes(page: Page) -> None:
    assert list(page.sections) == [
        "", "result", "predictions", "errors", "curves", "model", "inside", "data", "reproduce",
    ]  # fmt: skip
    for name in page.sections.keys() - {"reproduce"}:  # with the recipe
        assert not re.search(r"\b(classes|confusion|accuracy)\b", page.sections[name]), name


def test_the_headline_names_the_error_and_the_column(page: Page, value_run: Path) -> None:
    column = json.loads((value_run / "result.json").read_text())["per_column"][0]
    head = " ".join(page.sections[""].split())
    assert f"Mean absolute error {number(column['mae'])} on 18 held-out images" in head
    assert f"The model predicts {COLUMNS[0]} ." in head
    assert f"Always predicting the median of the training split has an error of {number(column['baseline'])}." in head
    assert page.all("i") == [], "the column's name is no markup"


def test_each_image_is_a_point_in_both_charts(page: Page) -> None:
    html = section(page, "predictions")
    charts = html.split("<svg")[1:]
    assert [chart.count("<circle") for chart in charts] == [18, 18]
    assert [chart.count('class="guide" d="M') for chart in charts] == [2, 2], "in the chart and in the legend"
    assert re.search(r"\.png: true [\d.]+, predicted [\d.]+</title>", charts[0])
    assert "95% interval" in page.sections["predictions"], "the table of columns"


def test_the_largest_errors_have_images_and_maps(page: Page, value_run: Path) -> None:
    worst = json.loads((value_run / "result.json").read_text())["worst"][:12]
    alts = [image["alt"] or "" for image in page.all("img")]
    assert alts.count(f"relevance for {COLUMNS[0]}") == len(worst) == 12
    text = " ".join(page.sections["errors"].split())
    for row in worst:
        assert f"true {number(row['true'][0])} , predicted {number(row['predicted'][0])}" in text
    assert "bright regions raise the number most" in text


def test_the_map_is_of_the_column_with_the_largest_error(columns_run: Path, tmp_path: Path) -> None:
    page = Page(report(columns_run, out=tmp_path / "page.html"))
    result = json.loads((columns_run / "result.json").read_text())
    spread = [one["rmse"] / (1 - one["r2"]) ** 0.5 for one in result["per_column"]]
    order = []
    for row in result["worst"][:12]:
        off = [abs(p - t) / own for p, t, own in zip(row["predicted"], row["true"], spread, strict=True)]
        order.append(COLUMNS[int(np.argmax(off))])
    maps = [image["alt"] for image in page.all("img") if (image["alt"] or "").startswith("relevance for ")]
    assert maps == [f"relevance for {name}" for name in order]
    assert len(set(order)) == 2
    assert section(page, "predictions").count("<svg") == 4
    assert "in standard deviations" in page.sections["curves"]
    assert f"Mean absolute error of {COLUMNS[0]}" in page.sections["result"]


def test_only_the_weakest_of_many_columns_are_drawn(bare: Path) -> None:
    page = Page(report(with_result(bare, columns=20, images=60)))
    html, text = section(page, "predictions"), " ".join(page.sections["predictions"].split())
    assert html.count("<svg") == 8
    assert "The charts show the 4 weakest of 20 columns, those with the lowest R²." in text
    assert [f'aria-label="column {place}: errors"' in html for place in (0, 1, 2, 3, 4)] == [True] * 4 + [False]
    assert "more metrics are in the tables below" in page.sections["result"]
    assert "and 16 more columns" in page.sections["errors"]


def test_many_images_are_counted_in_cells(bare: Path) -> None:
    page = Page(report(with_result(bare, columns=1, images=5000)))
    html = section(page, "predictions")
    assert "<circle" not in html
    assert "The 5,000 images are counted in cells" in page.sections["predictions"]
    assert len(html) < 150_000


def test_the_mean_error_is_of_images_with_similar_values() -> None:
    true = np.arange(100.0)
    means = mean_errors(true, np.where(true < 50, 1.0, -1.0))
    assert means == [(4.5 + 10 * place, 1.0 if place < 5 else -1.0) for place in range(10)]
    assert mean_errors(true[:10], true[:10]) == []
    assert mean_errors(np.ones(100), true) == [], "no line through one value"


def test_missing_or_corrupt_predictions_are_reported(bare: Path) -> None:
    (bare / "test_predictions.parquet").unlink()
    page = Page(report(bare))
    assert "has no test_predictions.parquet" in page.sections["predictions"]
    assert "95% interval" in page.sections["predictions"], "the table needs only the result"
    (bare / "test_predictions.parquet").write_bytes(b"PAR1 no")
    assert "test_predictions.parquet cannot be read" in Page(report(bare)).sections[""]


def test_missing_or_changed_data_is_reported(value_run: Path, manifests: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(value_run, tmp_path / "copy")
    data = shutil.copytree(manifests[1].parent, tmp_path / "data")
    origin = json.loads((copy / "origin.json").read_text())
    (copy / "origin.json").write_text(json.dumps({**origin, "data": str(tmp_path / "moved.csv")}))
    gone = Page(report(copy))
    assert "The images cannot be shown" in gone.sections["errors"]
    assert ", predicted" in gone.sections["errors"], "what is known of the errors is still reported"
    (copy / "origin.json").write_text(json.dumps({**origin, "data": str(data / "numbers.csv")}))
    assert "another image" not in Page(report(copy)).sections["errors"]
    result = json.loads((copy / "result.json").read_text())
    result["worst"][0]["true"][0] += 1
    (copy / "result.json").write_text(json.dumps(result))
    assert "another image has taken its place" in Page(report(copy)).sections["errors"]


def test_the_numbers_of_an_image_are_compared_by_column(columns_run: Path) -> None:
    artifacts = open_artifacts(read_run(columns_run))
    assert artifacts.source is not None
    assert artifacts.targets is not None
    true = dict(zip(artifacts.targets.names, artifacts.targets.values[0].tolist(), strict=True))
    image = artifacts.source.name(0)
    assert artifacts.item(0, image, true)
    assert artifacts.item(0, image, dict(reversed(true.items())))
    for other in ({**true, COLUMNS[0]: true[COLUMNS[0]] + 0.5}, {"another": 1.0}, frozenset({"a"}), "a"):
        with pytest.raises(Exception, match="another image has taken its place"):
            artifacts.item(0, image, other)


FACTS = {
    "kind": "values", "reason": "", "images": {"train": 63, "val": 9, "test": 18}, "labels": None,
    "columns": [{"name": COLUMNS[0], "minimum": 0.0, "mean": 58.25, "maximum": 119.0, "missing": 2}],
}  # fmt: skip


def test_the_data_section_has_the_range_of_numbers(bare: Path) -> None:
    check = json.loads((bare / "check.json").read_text())
    (bare / "check.json").write_text(json.dumps({**check, "targets": FACTS}))
    page = Page(report(bare))
    text = " ".join(page.sections["data"].split())
    assert "Column Minimum Mean Maximum Missing" in text
    assert f"{COLUMNS[0]} 0.0 58.2 119.0 2" in text
    assert f"Range of {COLUMNS[0]} train val test" in text
    assert f"They are grouped by {COLUMNS[0]}." in text
    alts = [image["alt"] or "" for image in page.all("img")]
    assert any(alt.startswith(f"a training image with {COLUMNS[0]} ") for alt in alts)


def test_an_unfinished_run_has_no_result(bare: Path) -> None:
    (bare / "result.json").unlink()
    page = Page(report(bare))
    for name in ("predictions", "errors"):
        assert "has not been evaluated on held-out images yet" in page.sections[name]
