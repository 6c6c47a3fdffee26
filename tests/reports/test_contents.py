"""The contents of a report: mistakes, recall, losses, the model, and images."""

import base64
import io
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.html_page import Page
from tests.support.tiny_runs import CLASSES, TINY

from vitrail.data.sources.opening import open_data
from vitrail.data.sources.source import Arrays
from vitrail.reports.report import report
from vitrail.reports.run_record import read_run
from vitrail.tasks.classification import smoothed_entropy
from vitrail.tasks.classification_metrics import classification_metrics
from vitrail.tasks.objective import Objective, loss, targets
from vitrail.tasks.task import Predictions
from vitrail.text import shorten_path
from vitrail.training.train import train


def section(page: Page, name: str) -> str:
    return page.html.partition(f'<section id="{name}"')[2].partition("</section>")[0]


def judged(folder: Path, confidences: list[float]) -> Page:
    """Write a result in which every prediction is wrong, with these confidences, and return its report."""
    labels = np.zeros(len(confidences), np.int64)
    right = np.array(confidences, np.float32)
    probabilities = np.stack([(1 - right) / 9] * 5 + [right] + [(1 - right) / 9] * 4, axis=1)
    source = Arrays(np.zeros((len(labels), 2, 2), np.uint8), labels, tuple("abcdefghij"))
    measured = classification_metrics(Predictions(probabilities, labels, np.arange(len(labels))), source)
    (folder / "result.json").write_text(json.dumps(measured.as_dict()))
    return Page(report(folder))


def test_low_confidence_mistakes_are_not_called_confident(bare: Path) -> None:
    text = judged(bare, [0.273, 0.2, 0.15]).sections["mistakes"]
    assert "Most confident mistakes" in text
    assert "No mistake has a confidence of 80.0% or more; the highest is 27.3%." in text
    assert "confidence 27.3%" in text
    assert " sure" not in text
    assert "onfident, and wrong" not in text


def test_confident_mistakes_are_listed_separately(bare: Path) -> None:
    page = judged(bare, [0.97, 0.85, 0.3])
    above, _, below = section(page, "mistakes").partition("<h3>")
    assert "Confident mistakes" in above
    assert [value in above for value in ("97.0%", "85.0%", "30.0%")] == [True, True, False]
    assert below.startswith("Mistakes with less than 80.0% confidence")
    assert "confidence 30.0%" in below


def test_low_recall_is_not_called_easy(bare: Path) -> None:
    """The best of six classes has a recall of 1/15."""
    labels = np.repeat(np.arange(6), 15)
    probabilities = np.full((90, 6), 0.02, np.float32)
    probabilities[np.arange(90), (labels + 1) % 6] = 0.9
    probabilities[0] = np.eye(6)[0] * 0.9 + 0.01
    source = Arrays(np.zeros((90, 2, 2), np.uint8), labels, ("King", "Queen", "Rook", "Bishop", "Knight", "Pawn"))
    measured = classification_metrics(Predictions(probabilities, labels, np.arange(90)), source)
    (bare / "result.json").write_text(json.dumps(measured.as_dict()))
    html = section(Page(report(bare)), "classes")
    assert 'aria-label="Highest recall"' in html
    assert re.search(r"<desc>King: 6\.\d+%</desc>", html)
    assert not re.search("easi|hardest", html, re.IGNORECASE)


def test_a_file_name_is_shown_from_its_start(bare: Path) -> None:
    result = json.loads((bare / "result.json").read_text())
    long = f"/a/very/long/way/to/{'folders/' * 8}cat/IMG_1118_of_the_morning.JPG"
    result["worst"][0]["name"] = long
    (bare / "result.json").write_text(json.dumps(result))
    html = section(Page(report(bare)), "mistakes")
    shown = re.search(f'title="{long}">(.*?)</p>', html)
    assert shown is not None, "all of it is there to be pointed at"
    text = re.sub("<[^>]+>", "", shown[1])
    assert text.endswith("/cat/IMG_1118_of_the_morning.JPG")
    assert text.startswith("…/")
    assert len(text) <= 56


@pytest.mark.parametrize("most", [12, 20, 40])
def test_a_short_path_has_both_ends_of_the_name(most: int) -> None:
    for name in ("IMG_1.JPG", "a" * 30 + "middle" + "z" * 30 + ".png"):
        shown = shorten_path(f"/home/photos/{name}", most)
        assert shown.rpartition("/")[2].startswith(name[:4])
        assert shown.endswith(name[-4:])
        assert len(shown) <= most + 2


def test_a_mistake_shows_the_stored_image_and_the_model_input(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / "photos" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 255, (6, 9, 3), np.uint8)
        Image.fromarray(pixels).resize((900, 600)).save(folder / f"{number}.jpg")
    run = train(
        tmp_path / "photos", changes=[*TINY, "epochs=1"], folder=tmp_path / "run", device="cpu", workers=0, quiet=True
    )
    test = open_data(tmp_path / "photos", record=json.loads((run.folder / "split.json").read_text())).test
    assert test is not None
    true = int(test.labels[0])
    result = json.loads((run.folder / "result.json").read_text())
    result["worst"] = [
        {"index": 0, "name": test.name(0), "true": str(true), "predicted": str(1 - true), "confidence": 0.9}
    ]
    (run.folder / "result.json").write_text(json.dumps(result))
    html = section(Page(report(run.folder)), "mistakes")
    sources = re.findall(r'<div class="original"><img src="data:image/jpeg;base64,([^"]+)"', html)
    assert sources
    for source in sources:
        with Image.open(io.BytesIO(base64.b64decode(source))) as image:
            assert image.size == (480, 320), "the whole image, and not the square that the model saw"


def noted(folder: Path) -> str:
    run = read_run(folder)
    return run.task.loss_note(run.recipe).text


def test_the_loss_note_lists_what_only_the_training_loss_has(bare: Path) -> None:
    recipe = (bare / "recipe.toml").read_text()
    (bare / "recipe.toml").write_text(re.sub("label_smoothing = .*", "label_smoothing = 0.1", recipe))
    note = noted(bare)
    assert "includes label smoothing (0.1)" in note
    assert f"With this smoothing and 3 classes, training cannot fall below {smoothed_entropy(0.1, 3):.2f}" in note
    assert note in " ".join(Page(report(bare)).sections["curves"].split())
    mixed = re.sub("mixup = .*", "mixup = 0.2", (bare / "recipe.toml").read_text())
    (bare / "recipe.toml").write_text(mixed)
    assert "includes label smoothing (0.1) and mixup; the validation loss does not" in noted(bare)
    plain = re.sub("label_smoothing = .*", "label_smoothing = 0.0", re.sub("mixup = .*", "mixup = 0.0", mixed))
    (bare / "recipe.toml").write_text(plain)
    assert "includes" not in noted(bare)


def test_the_floor_of_a_smoothed_loss_is_a_perfect_models_loss() -> None:
    import torch

    objective = Objective(label_smoothing=0.1)
    expected = targets(torch.tensor([3]), 10, objective)
    assert float(loss(expected.log(), expected, objective)) == pytest.approx(smoothed_entropy(0.1, 10), abs=1e-5)
    assert math.isclose(smoothed_entropy(0.1, 10), 0.5003, abs_tol=1e-3)


def test_the_model_summary(run: Path) -> None:
    text = " ".join(Page(report(run, out=run.parent / "summary.html")).sections["model"].split())
    config = json.loads((run / "best" / "config.json").read_text())["vitrail"]["vit"]
    assert "2 blocks of width 16 with 2 heads" in text
    assert "16×16 pixels, 3 channels; 2×2 patches of 8×8" in text
    assert config["stem"] == "conv"
    assert "patch convolution" in text
    session = json.loads((run / "sessions.json").read_text())[0]
    assert session["device"] in text
    assert re.search(r"Time ?\d+(\.\d)? (s|min)", text)


def test_the_time_of_a_killed_run_is_a_lower_bound(bare: Path) -> None:
    session = json.loads((bare / "sessions.json").read_text())[0]
    session["last_step"] = 2
    (bare / "sessions.json").write_text(json.dumps([session]))
    assert re.search(r"more than .* \(2 of \d+ steps recorded\)", Page(report(bare)).sections["model"])
    (bare / "sessions.json").write_text("[")
    assert "not recorded by this run" in Page(report(bare)).sections["model"]


def test_class_samples_are_shown(bare: Path) -> None:
    page = Page(report(bare))
    for name in CLASSES:
        alts = [image.get("alt") for image in page.all("img")]
        assert alts.count(f"a training image of {name}") == 4
    shutil.rmtree(bare / "samples")
    without = Page(report(bare))
    assert "Example images" not in without.sections["data"]
