"""curves.svg: it shows the numbers of the metrics file, and no text overlaps."""

import itertools
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.browser import chromium

from vitrail.tasks.lookup import CLASSIFICATION
from vitrail.tasks.multilabel import Multilabel
from vitrail.tasks.regression import Regression
from vitrail.training.curves import Curve, curve, curve_charts, curves_svg, draw_curves, headlines
from vitrail.training.run_folder import MetricsFile
from vitrail.training.train import train

SVG = "{http://www.w3.org/2000/svg}"


def metrics_file(steps: int, every: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a run that learns, validated every few steps."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        part = step / steps
        rows.append(
            {
                "step": step,
                "epoch": step / 10,
                "loss": 2.3 * math.exp(-3 * part) + 0.05 * float(rng.random()),
                "accuracy": 1 - 0.9 * math.exp(-4 * part),
                "lr": 1e-3 * (1 - part),
                "gradient_norm": 1 + float(rng.random()),
            }
        )
        if every and step % every == 0:
            best = min(step, steps - every)  # the last validation is not the best one
            top1 = 0.95 * part if step <= best else 0.5
            rows.append({"step": step, "val_top1": top1, "val_loss": 2 - part, "best": best})
    return rows


CASES = {
    "one row": metrics_file(1),
    "one measurement": metrics_file(1, 1),
    "not yet validated": metrics_file(40),
    "a run": metrics_file(300, 25),
    "a long run": [
        {**row, **{name: 1000 * row[name] for name in ("step", "best") if name in row}} for row in metrics_file(400, 5)
    ],
    "only validated": [row for row in metrics_file(50, 10) if "val_top1" in row],
    "not finite": [*metrics_file(30, 10), {"step": 31, "loss": math.nan, "val_loss": math.inf}],
    "always the same": [{"step": step, "loss": 0.0, "lr": 0.0, "gradient_norm": 0.0} for step in (1, 2, 3)],
}


EVERYTHING = {
    "objective": {"label_smoothing": 0.1, "class_weights": "balanced"},
    "mixing": {"mixup": 0.2, "cutmix": 1.0, "chance": 0.5},
}
RECIPES: list[dict[str, Any]] = [{}, EVERYTHING, {"objective": {"loss": "sigmoid"}}]


BOXES = """() => [...document.querySelectorAll("text")].map((text) => {
    const box = text.getBoundingClientRect();
    return [text.textContent, box.left, box.top, box.right, box.bottom];
})"""


@pytest.mark.slow
def test_no_text_overlaps_or_leaves_the_drawing(tmp_path: Path) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1000, "height": 800})
        for (case, rows), recipe in itertools.product(CASES.items(), RECIPES):
            draw_curves(rows, tmp_path / "curves.svg", CLASSIFICATION, CLASSIFICATION.loss_note(recipe)[:2])
            page.goto((tmp_path / "curves.svg").as_uri())
            drawn, texts = page.evaluate("document.documentElement.getBoundingClientRect()"), page.evaluate(BOXES)
            assert len(texts) > 15
            for text, left, top, right, bottom in texts:
                assert 0 <= left < right <= drawn["width"], (case, text)
                assert 0 <= top < bottom <= drawn["height"], (case, text)
            for (one, *box), (other, *there) in itertools.combinations(texts, 2):
                apart = box[2] <= there[0] or there[2] <= box[0] or box[3] <= there[1] or there[3] <= box[1]
                assert apart, (case, one, other)


def test_the_file(tmp_path: Path) -> None:
    draw_curves(CASES["not yet validated"], tmp_path / "curves.svg", CLASSIFICATION)
    before = (tmp_path / "curves.svg").read_text()
    draw_curves(CASES["a run"], tmp_path / "curves.svg", CLASSIFICATION)
    after = (tmp_path / "curves.svg").read_text()
    assert ("validation split" in before, "validation split" in after) == (False, True)
    assert [path.name for path in tmp_path.iterdir()] == ["curves.svg"]
    draw_curves([], tmp_path / "nothing.svg", CLASSIFICATION)
    assert not (tmp_path / "nothing.svg").exists()


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_one_drawing_of_four_charts_for_light_and_dark(case: str) -> None:
    drawn = curves_svg(CASES[case], "digits-1a2b3c", CLASSIFICATION)
    titles = [element.text for element in ET.fromstring(drawn).iter(f"{SVG}text") if element.get("class") == "head"]
    assert titles == ["Loss", "Accuracy", "Learning rate", "Gradient norm"]
    assert drawn.count("<style>") == drawn.count("prefers-color-scheme:dark") == 1
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_the_charts_show_the_values() -> None:
    _, accuracy, *_ = curve_charts(CASES["a run"], CLASSIFICATION)
    tooltips = [element[0].text for element in ET.fromstring(accuracy).iter(f"{SVG}circle")]
    validations = [row for row in CASES["a run"] if "val_top1" in row]
    assert tooltips == [f"validation split, step {row['step']}: {row['val_top1']:.1%}" for row in validations]
    assert "kept: 87.1%" in accuracy


def test_only_the_headline_is_in_its_chart() -> None:
    """The label accuracy in training says nothing about the mean average precision."""
    rows = [{"step": step, "loss": 1.0, "label_accuracy": 0.97, "mae": 2.5} for step in (1, 2)]
    rows += [{"step": 2, "val_map": 0.25, "val_mae": 3.0, "val_loss": 1.0, "best": 2}]
    assert "training" not in curve_charts(rows, Multilabel())[1]
    assert "training (augmented)" in curve_charts(rows, Regression())[1]


def test_the_file_describes_its_losses(tmp_path: Path) -> None:
    tiny = ["model.width=16", "model.depth=1", "model.heads=1", "model.patch_size=4", "steps=2", "evaluations=1"]
    changes = [*tiny, "objective.label_smoothing=0.1", "mixing.mixup=0.2"]
    train("digits", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    drawn = (tmp_path / "run" / "curves.svg").read_text()
    assert ">Loss: training: with label smoothing (0.1), mixup; validation: without, so " in drawn
    assert CLASSIFICATION.loss_note({"objective": {"label_smoothing": 0.0}}).training == "training: augmented images"
    assert CLASSIFICATION.loss_note(EVERYTHING)[:2] == (
        "training: with label smoothing (0.1), mixup, CutMix, class weights",
        "validation: without, so the two are not comparable",
    )
    assert "mixup" not in CLASSIFICATION.loss_note({"mixing": {"mixup": 0.2, "chance": 0}}).training


def test_the_headline_has_the_best_and_the_last_numbers() -> None:
    head, below = headlines(CASES["a run"], "digits-1a2b3c", CLASSIFICATION)
    assert head == "digits-1a2b3c: validation accuracy 87.1%"
    assert below.startswith("step 275 of 300 kept · 30.0 epochs · training loss 0.1")
    assert below.endswith("validation loss 1.000 at the end")
    assert headlines(metrics_file(1), "a", CLASSIFICATION)[0] == "a: step 1"


def test_smoothing_does_not_lag() -> None:
    steps = np.arange(1.0, 401.0)
    straight = Curve(steps, 5 - steps / 100)
    half = 400 // 40
    np.testing.assert_allclose(straight.smooth().values[half:-half], straight.values[half:-half])
    wild = np.random.default_rng(0).random(400)
    expected = [wild[max(0, i - half) : i + half + 1].mean() for i in range(400)]
    np.testing.assert_allclose(Curve(steps, wild).smooth().values, expected)


def test_a_truncated_metrics_file_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert len(curve(MetricsFile.read(tmp_path), "loss")) == 1
    draw_curves(MetricsFile.read(tmp_path), tmp_path / "curves.svg", CLASSIFICATION)
    assert (tmp_path / "curves.svg").exists()
