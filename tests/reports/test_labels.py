"""The report of a multi-label run: curves and table of labels, mistakes that occur together, and the worst images."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.html_page import Page
from tests.support.tiny_runs import CLASSES, EVIL

from vitrail.data.sources.matching import Retargeted
from vitrail.data.sources.source import Arrays
from vitrail.data.sources.targets import Targets
from vitrail.reports.report import report
from vitrail.reports.run_artifacts import open_artifacts
from vitrail.reports.run_record import read_run
from vitrail.reports.test_predictions import LabelPredictions, read_predictions
from vitrail.tasks.multilabel import Multilabel
from vitrail.tasks.multilabel_metrics import multilabel_metrics
from vitrail.tasks.task import Predictions
from vitrail.text import as_percent
from vitrail.training.split_predictions import write_test_predictions


@pytest.fixture(scope="module")
def page(labels_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(report(labels_run, out=tmp_path_factory.mktemp("page") / "report.html"))


@pytest.fixture
def bare(labels_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(labels_run, tmp_path / "copy", ignore=shutil.ignore_patterns("best", "last", "state"))


def section(page: Page, name: str) -> str:
    return page.html.partition(f'<section id="{name}"')[2].partition("</section>")[0]


def with_result(folder: Path, labels: int, images: int, seed: int = 0) -> Path:
    """Replace result and predictions of a run by those of a random model."""
    generator = np.random.default_rng(seed)
    truth = (generator.random((images, labels)) < 0.2).astype(np.uint8)
    outputs = np.clip(generator.random((images, labels)) * 0.7 + 0.3 * truth, 0.01, 0.99).astype(np.float32)
    names = tuple(f"a label with a longer name, number {number}" for number in range(labels))
    images_of = Arrays(np.zeros((images, 2, 2), np.uint8), np.zeros(images, np.int64), ("all",))
    source = Retargeted(images_of, Targets("labels", names, truth))
    predictions = Predictions(outputs, truth, np.arange(images))
    measured = multilabel_metrics(predictions, source, thresholds=[0.6] * labels)
    (folder / "result.json").write_text(json.dumps(measured.as_dict()))
    write_test_predictions(predictions, source, folder / "test_predictions.parquet", Multilabel((0.6,) * labels))
    return folder


def test_every_section_is_present_and_none_speaks_of_classes(page: Page) -> None:
    assert list(page.sections) == [
        "", "result", "mistakes", "labels", "curves", "model", "inside", "data", "reproduce",
    ]  # fmt: skip
    for name in page.sections.keys() - {"reproduce"}:  # with the recipe
        assert not re.search(r"\b(classes|confusion|accuracy on)\b", page.sections[name]), name
    assert "mean average precision on 18 held-out images" in " ".join(page.sections[""].split())


def test_each_label_has_its_curve_and_row(page: Page, labels_run: Path) -> None:
    rows = json.loads((labels_run / "result.json").read_text())["per_label"]
    html = section(page, "labels")
    assert html.count('class="chart"') >= len(CLASSES)
    text = " ".join(page.sections["labels"].split())
    for row in rows:
        assert row["name"] in text
        assert f"average precision {as_percent(row['average_precision'])}, {row['images']} images" in text
        assert as_percent(row["f1"]) in text
    assert len(page.all("script")) == 1
    assert EVIL in page.sections["labels"]


def test_each_mistake_has_its_image_and_the_map_of_a_wrong_label(page: Page, labels_run: Path) -> None:
    worst = json.loads((labels_run / "result.json").read_text())["worst"][:12]
    alts = [image["alt"] or "" for image in page.all("img")]
    maps = [alt.removeprefix("relevance for ") for alt in alts if alt.startswith("relevance for ")]
    assert len(maps) == len(worst)
    assert worst
    for label, one in zip(maps, worst, strict=True):
        assert label in set(one["true"]) ^ set(one["predicted"])
    assert "Map:" in page.sections["mistakes"]
    assert "missing:" not in page.sections["mistakes"]


def test_a_wrong_label_is_bold_and_the_most_wrong_one_is_explained(bare: Path) -> None:
    stored, _ = read_predictions(read_run(bare))
    assert isinstance(stored, LabelPredictions)
    result = json.loads((bare / "result.json").read_text())
    one = result["worst"][0]
    html = section(Page(report(bare)), "mistakes").partition("<li>")[2].partition("</li>")[0]
    bold = set(re.findall("<strong><bdi>(.*?)</bdi></strong>", html))
    assert len(bold) == len(set(one["true"]) ^ set(one["predicted"]))
    row = stored.rows[one["index"]]
    off = np.abs(stored.probabilities[row] - stored.true[row]) * (stored.predicted[row] ^ stored.true[row])
    probability = as_percent(float(stored.probabilities[row, off.argmax()]))
    assert f"probability {probability})" in html


def test_a_few_labels_have_a_matrix_of_mistakes(bare: Path) -> None:
    page = Page(report(with_result(bare, labels=5, images=200)))
    html, text = section(page, "labels"), " ".join(page.sections["labels"].split())
    assert 'aria-label="Missed and added labels"' in html
    assert "Numbers are image counts." in text
    stored, _ = read_predictions(read_run(bare))
    assert isinstance(stored, LabelPredictions)
    missed, added = stored.true & ~stored.predicted, stored.predicted & ~stored.true
    count = int((missed[:, 0] & added[:, 1]).sum())
    share = count / int(stored.true[:, 0].sum())
    assert count
    assert f"number 0 → a label with a longer name, number 1: {count}, {100 * share:.1f}%" in html


def test_many_labels_stay_readable(bare: Path) -> None:
    page = Page(report(with_result(bare, labels=100, images=150)))
    html = section(page, "labels")
    assert html.count('class="chart"') == 8, "the weakest and the best"
    assert "Missed and added labels" not in html, "a matrix of 100 labels"
    assert len(page.html) < 1_500_000
    assert all(f"number {number}" in page.sections["labels"] for number in range(100))
    assert re.search(r"and \d+ more", page.sections["mistakes"])


def test_the_most_frequent_pair_is_in_the_lead(bare: Path) -> None:
    with_result(bare, labels=5, images=200)
    pair = json.loads((bare / "result.json").read_text())["confused"][0]
    head = " ".join(Page(report(bare)).sections[""].split())
    assert f"{pair['missed']} missed and {pair['added']} added ({pair['images']} times)" in head


def test_missing_or_corrupt_predictions_are_reported(bare: Path) -> None:
    (bare / "test_predictions.parquet").unlink()
    page = Page(report(bare))
    assert "has no test_predictions.parquet" in page.sections["labels"]
    assert "All labels" in page.sections["labels"], "the table needs only the result"
    assert "Map:" in page.sections["mistakes"]
    (bare / "test_predictions.parquet").write_bytes(b"PAR1 no")
    page = Page(report(bare))
    assert "test_predictions.parquet cannot be read" in page.sections["labels"]
    assert "test_predictions.parquet cannot be read" in page.sections[""]


def test_predictions_of_other_labels_are_reported(bare: Path) -> None:
    table = pq.read_table(bare / "test_predictions.parquet")
    place = table.schema.get_field_index("true")
    strange = pa.array([["strange"]] * table.num_rows)
    pq.write_table(table.set_column(place, "true", strange), bare / "test_predictions.parquet")
    assert "its labels do not include 'strange'" in Page(report(bare)).sections["labels"]
    pq.write_table(table.drop_columns(["loss"]), bare / "test_predictions.parquet")
    assert "has no column 'loss'" in Page(report(bare)).sections["labels"]


def test_missing_or_changed_data_is_reported(labels_run: Path, manifests: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(labels_run, tmp_path / "copy")
    data = shutil.copytree(manifests[0].parent, tmp_path / "data")
    origin = json.loads((copy / "origin.json").read_text())
    (copy / "origin.json").write_text(json.dumps({**origin, "data": str(tmp_path / "moved.csv")}))
    gone = Page(report(copy))
    assert "The images cannot be shown" in gone.sections["mistakes"]
    assert "Predicted:" in gone.sections["mistakes"], "what is known of the mistakes is still reported"
    (copy / "origin.json").write_text(json.dumps({**origin, "data": str(data / "labels.csv")}))
    assert "another image" not in Page(report(copy)).sections["mistakes"]
    result = json.loads((copy / "result.json").read_text())
    result["worst"][0]["true"] = [] if result["worst"][0]["true"] else [CLASSES[0]]
    (copy / "result.json").write_text(json.dumps(result))
    assert "another image has taken its place" in Page(report(copy)).sections["mistakes"]


def test_the_labels_of_an_image_are_compared_as_a_set(labels_run: Path) -> None:
    artifacts = open_artifacts(read_run(labels_run))
    assert artifacts.source is not None
    assert artifacts.targets is not None
    names = artifacts.targets.names
    true = frozenset(name for name, has in zip(names, artifacts.targets.values[0].tolist(), strict=True) if has)
    image = artifacts.source.name(0)
    assert artifacts.item(0, image, true)
    for other in (true ^ {names[0]}, names[0], {names[0]: 1.0}):
        with pytest.raises(Exception, match="another image has taken its place"):
            artifacts.item(0, image, other)


FACTS = {
    "kind": "labels", "reason": "", "images": {"train": 63, "val": 9, "test": 18}, "columns": [],
    "labels": {"labels": 3, "per_image": 1.5, "without": 12, "most": {"name": EVIL, "images": 50},
               "fewest": {"name": "plain", "images": 40}},
}  # fmt: skip


def test_the_data_section_counts_labels(bare: Path) -> None:
    check = json.loads((bare / "check.json").read_text())
    counts = {split: dict.fromkeys(CLASSES, 30) for split in ("train", "val", "test")}
    (bare / "check.json").write_text(json.dumps({**check, "counts": counts, "targets": FACTS}))
    text = " ".join(Page(report(bare)).sections["data"].split())
    assert "An image has 1.5 of 3 labels on average; 12 images have none." in text
    assert f"The most frequent label is {EVIL} , on 50 images; the rarest is plain , on 40 images." in text
    assert "Label train val test" in text
    assert "all images 63 9 18" in text, "not the sum of the labels"
    assert "Each is shown under the rarest of its labels." in text


def test_an_unfinished_run_has_no_result(bare: Path) -> None:
    (bare / "result.json").unlink()
    page = Page(report(bare))
    for name in ("mistakes", "labels"):
        assert "has not been evaluated on held-out images yet" in page.sections[name]
    assert "So far the checkpoint of step" in page.sections["result"]
    assert "mean average precision" in page.sections["result"]
