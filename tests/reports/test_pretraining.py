"""Reports of pretraining runs: figures, images over time, settings with reasons, and what is missing."""

import base64
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.commands import run_command
from tests.support.html_page import Page
from tests.support.tiny_runs import tiny_pretraining

import vitrail
from vitrail.reports.report import report
from vitrail.reports.run_record import PRETRAINING
from vitrail.training.pretraining.methods import METHODS
from vitrail.training.pretraining.previews import read_preview
from vitrail.training.run_folder import preview_file

TITLES = ("Loss", "kNN accuracy", "Rank", "Spread", "Learning rate", "Gradient norm")


@pytest.fixture(scope="module")
def page(done: vitrail.Run) -> Page:
    assert done.report == done.folder / "report.html"
    return Page(done.report)


@pytest.fixture
def bare(done: vitrail.Run, tmp_path: Path) -> Path:
    """A run without its model, whose report is quick to write."""
    return shutil.copytree(done.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("best", "last", "state"))


def figures(page: Page) -> list[str]:
    return [title for title in TITLES if f'aria-label="{title}"' in page.html]


def shown(page: Page) -> dict[str, np.ndarray]:
    """Return the embedded images by their alternative text."""
    return {
        image["alt"] or "": np.asarray(Image.open(io.BytesIO(base64.b64decode((image["src"] or "").split(",")[1]))))
        for image in page.all("img")
    }


def test_the_headline_and_the_numbers(page: Page, done: vitrail.Run) -> None:
    result = json.loads((done.folder / "result.json").read_text())
    head, numbers = (" ".join(page.sections[name].split()) for name in ("", "result"))
    assert f"{100 * result['knn']:.1f}% kNN accuracy on 90 held-out images" in head
    assert "pretrained with mae" in head
    assert "none was trained on" in head
    assert "selected on these same images" not in head, "the last checkpoint is kept"
    assert f"{result['loss']:.3f}" in numbers
    for title in ("kNN accuracy", "Loss", "Rank", "Spread"):
        assert title in numbers


def test_the_page_is_self_contained_and_complete(page: Page) -> None:
    assert list(page.sections) == ["", "result", *PRETRAINING]
    assert figures(page) == list(TITLES)
    for tag in ("link", "iframe", "object", "embed", "base", "form", "i"):
        assert page.all(tag) == []
    assert all((image["src"] or "").startswith("data:image/") for image in page.all("img"))
    assert all((link["href"] or "").startswith("#") for link in page.all("a"))
    assert "http" not in page.html.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert not [attributes for _, attributes in page.elements if "style" in attributes]
    assert len(page.html) < 2_000_000


def test_images_are_shown_the_first_a_middle_and_the_last_time(page: Page, done: vitrail.Run) -> None:
    images = shown(page)
    previews = {step: read_preview(preview_file(done.folder, step)) for step in (3, 6, 9, 12)}
    names = previews[12].names
    columns = ["original", "masked", "step 3", "step 9", "step 12"]
    assert [alt for alt in images if alt.startswith(f"{names[0]}, ")] == [f"{names[0]}, {title}" for title in columns]
    for place, name in enumerate(names):
        for row, title in enumerate(("original", "masked")):
            np.testing.assert_array_equal(images[f"{name}, {title}"], previews[12].tiles[row, place])
        for step in (3, 9, 12):
            np.testing.assert_array_equal(images[f"{name}, step {step}"], previews[step].tiles[2, place])
    assert "relative to its own mean and contrast" in page.sections["previews"]


def test_settings_have_reasons(page: Page) -> None:
    text = " ".join(page.sections["settings"].split())
    assert "model.patch_size 2×2 gives 16 patches" in text
    assert "optimizer.lr 0.0005 usual for small batches" in text
    assert "mae.mask_ratio 0.75" in text
    assert "optimizer.betas 0.9, 0.95" in text


def test_the_next_commands_name_the_model(page: Page, done: vitrail.Run) -> None:
    text = page.sections["use"]
    for command in ("train LABELLED/ --from", "probe", "embed", "explain"):
        assert f"vitrail {command} '{done.folder}/best'" in text
    assert f"vitrail pretrain digits --recipe '{done.folder}/recipe.toml'" in page.sections["reproduce"]
    assert "test_predictions" not in page.sections["reproduce"]


def test_the_model_and_the_data_are_described(page: Page) -> None:
    assert "the features are the mean of the tokens" in page.sections["model"]
    assert "pretrained from scratch: mae" in page.sections["model"]
    assert "1,797 images in 10 classes" in page.sections["data"]
    for title in ("Principal components of the patch embedding filters", "How far each head looks"):
        assert title in page.sections["inside"]
    assert "attention rollout" in shown(page)


def test_the_command(
    done: vitrail.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "page.html"
    written = run_command(monkeypatch, capsys, "report", done.folder, "--out", target)
    assert (written.code, written.err) == (0, "")
    assert target.read_bytes() == (done.folder / "report.html").read_bytes()


def test_missing_and_corrupt_files_are_reported_in_place(bare: Path, tmp_path: Path) -> None:
    preview_file(bare, 3).write_bytes(b"not an image")
    (bare / "defaults.json").write_text('{"field": 1}')
    page = Page(report(bare, out=tmp_path / "corrupt.html"))
    assert "000003.png cannot be read" in page.sections[""]
    assert "defaults.json cannot be read, so the report lacks the reasons of the settings" in page.sections[""]
    assert "step 6" in page.sections["previews"]
    shutil.rmtree(bare / "previews")
    for file in ("result.json", "defaults.json", "origin.json", "check.json"):
        (bare / file).unlink()
    page = Page(report(bare))
    assert "no readable images in previews/" in page.sections["previews"]
    assert "Not finished: step 12" in page.sections[""]
    assert "So far the checkpoint of step 12 is kept, with a validation kNN accuracy of" in page.sections["result"]
    assert "mae.mask_ratio" in page.sections["settings"]


def test_without_labels_the_loss_is_the_headline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a method that does not reconstruct shows patch features."""
    monkeypatch.setitem(METHODS, "mae", METHODS["mae"]._replace(reconstructs=False))
    rng, data = np.random.default_rng(0), tmp_path / "data"
    data.mkdir()
    for number in range(24):
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(data / f"{number}.png")
    run = tiny_pretraining(tmp_path / "run", "steps=2", "batch=8", data=data)
    assert run.report is not None
    page = Page(run.report)
    assert "on 1 held-out image" in page.sections[""]
    assert figures(page) == [title for title in TITLES if title != "kNN accuracy"]
    assert "first three principal components" in " ".join(page.sections["previews"].split())
    assert "kNN" not in page.sections["result"]


def test_two_runs_are_compared(bare: Path, run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(bare, tmp_path / "other")
    recipe = (other / "recipe.toml").read_text().replace("mask_ratio = 0.75", "mask_ratio = 0.5")
    (other / "recipe.toml").write_text(recipe)
    page = Page(report(bare, other, tmp_path / "two.html"))
    assert "mae.mask_ratio 0.75 0.5" in " ".join(page.sections["settings"].split())
    assert "kNN accuracy on the validation split" in page.html
    different = Page(report(bare, run, tmp_path / "different.html"))
    assert "Different tasks: A is pretraining, B is classification" in different.sections[""]
