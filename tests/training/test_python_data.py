"""Runs on data in Python: the same weights as from files, the same folder again, and an exact resume."""

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tests.support import forked_commands
from tests.support.commands import run_command
from tests.support.python_data import KINDS, TINY, make, some_digits, write_folder

import vitrail
from vitrail.errors import ConfigError
from vitrail.training.train import train as train_only


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("digits")
    write_folder(place)
    return place


def some_slow(*plain: str) -> list[Any]:
    """Return all kinds; only some are in the plain suite."""
    return [kind if kind in plain else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


def train(data: Any, folder: Path | None, workers: int = 0, *changes: str) -> dict[str, torch.Tensor]:
    run = train_only(data, changes=[*TINY, *changes], folder=folder, device="cpu", workers=workers, quiet=True)
    return dict(run.bundle.model.state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def bundle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> vitrail.Bundle:
    """Return a model trained on the files."""
    place = tmp_path_factory.mktemp("runs") / "folder"
    train(folder, place)
    return vitrail.load(place / "best")


@pytest.fixture(scope="module")
def expected(bundle: vitrail.Bundle) -> dict[str, torch.Tensor]:
    return dict(bundle.model.state_dict())


LONGER = ("steps=16", "save_minutes=0")
PLAIN = ("arrays", "dataset", "dataframe", "huggingface")


@pytest.mark.parametrize("kind", some_slow("arrays", "dataset", "huggingface"))
def test_every_kind_trains_the_same_weights(
    kind: str, folder: Path, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert same(train(make(kind, folder), tmp_path / "run"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLAIN)
def test_workers_read_every_kind(kind: str, folder: Path, expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert same(train(make(kind, folder), tmp_path / "run", 2), expected)


@pytest.mark.parametrize("kind", some_slow("arrays"))
def test_a_killed_run_resumes_exactly(kind: str, folder: Path, tmp_path: Path) -> None:
    data, run = make(kind, folder), tmp_path / "run"
    process = multiprocessing.get_context("fork").Process(target=train, args=(data, run, 0, *LONGER))
    process.start()
    while len(list((run / "state").glob("[0-9]*"))) < 2:
        time.sleep(0.005)
        assert process.exitcode is None
    process.kill()
    process.join()
    assert process.exitcode == -9
    steps = max(int(path.name) for path in (run / "state").glob("[0-9]*"))
    assert 0 < steps < 16
    resumed = train(make(kind, folder), run, 0, *LONGER)
    assert same(resumed, train(make(kind, folder), tmp_path / "straight", 0, "steps=16"))


def test_the_same_call_finds_its_folder_and_other_data_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    images, labels = some_digits()
    first = vitrail.train((images, labels), changes=TINY, device="cpu", workers=0, quiet=True)
    assert first.folder.name.startswith("arrays-")
    again = vitrail.train((images.copy(), labels.tolist()), changes=TINY, device="cpu", workers=0, quiet=True)
    assert again.folder == first.folder
    origin = json.loads((first.folder / "origin.json").read_text())
    assert origin["data"].startswith("arrays:")
    other = (255 - images, labels)
    with pytest.raises(
        ConfigError, match=r"holds a run on other data \(arrays:\w+ there and arrays:\w+ here\); choose"
    ):
        vitrail.train(other, changes=TINY, folder=first.folder, device="cpu", workers=0, quiet=True)
    page = first.report.read_text(encoding="utf-8") if first.report else ""
    assert "DATA is the array data with the fingerprint" in page
    assert "cannot be shown" not in page  # the images were there when it was written
    later = vitrail.report(first.folder, out=tmp_path / "later.html").read_text(encoding="utf-8")
    assert "it was in memory; write the report with vitrail.report(run, data=...)" in later
    with_data = vitrail.report(first.folder, out=tmp_path / "with.html", data=(images, labels))
    assert "it was in memory" not in with_data.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_sweep_in_one_process(tmp_path: Path) -> None:
    data: Any = some_digits()
    over = {"optimizer.lr": [0.001, 0.01]}
    with pytest.raises(
        ConfigError, match="jobs is 2, but the array data cannot be sent to other processes; use jobs=1"
    ):
        vitrail.sweep(data, over=over, jobs=2)
    done = vitrail.sweep(data, over=over, changes=TINY, folder=tmp_path / "sweep", device="cpu", workers=0, quiet=True)
    assert len(done.runs) == 2


@pytest.mark.slow
def test_pretraining_needs_no_labels(tmp_path: Path) -> None:
    images, _ = some_digits()
    small = ["steps=2", "batch=8", "compile=false", "model.width=16", "model.depth=1", "model.heads=2"]
    run = vitrail.pretrain(images, changes=small, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    assert run.bundle.model.config.classes == 0


ON_RANKS = """
import os, sys
from tests.support.python_data import TINY, some_digits
from vitrail.api import train
images, labels = some_digits()
val = images, labels
if sys.argv[2] != "same" and os.environ["RANK"] == "1":
    images = 255 - images
data = sys.argv[3] if len(sys.argv) > 3 else (images, labels)
if sys.argv[2] == "train differs":
    data = {"train": data, "val": val}
train(data, changes=TINY, folder=sys.argv[1], device="cpu", workers=0, quiet=True)
"""


@pytest.mark.slow
def test_every_rank_makes_the_data(folder: Path, tmp_path: Path) -> None:
    for name, words in (("arrays", ()), ("files", (folder,))):
        done = forked_commands.run_ranks(2, tmp_path / name, "same", *words, code=ON_RANKS)
        assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    one, other = (dict(vitrail.load(tmp_path / name / "best").model.state_dict()) for name in ("arrays", "files"))
    assert same(one, other)
    for how in ("all differs", "train differs"):
        done = forked_commands.run_ranks(2, tmp_path / "other", how, code=ON_RANKS)
        assert all("the ranks do not see the same data" in rank.stderr for rank in done)


# ── a trained model on every kind ──


@pytest.mark.parametrize("kind", some_slow(*PLAIN))
def test_every_function_takes_every_kind(kind: str, folder: Path, bundle: vitrail.Bundle) -> None:
    data = make(kind, folder)
    options: Any = {"device": "cpu", "workers": 0}
    theirs = vitrail.embed(bundle, folder, **options)
    features = vitrail.embed(bundle, data, **options)
    np.testing.assert_array_equal(features.features, theirs.features)
    ours, of_folder = (vitrail.evaluate(bundle, some, split="all", **options).as_dict() for some in (data, folder))
    by_name = {"selected_on", "trained_on", "compared_by", "summary", "worst"}  # pixels are not the bytes of a file
    assert {**ours, **dict.fromkeys(by_name)} == {**of_folder, **dict.fromkeys(by_name)}
    predictions, of_files = vitrail.predict(bundle, data, **options), vitrail.predict(bundle, folder, **options)
    assert [one.probabilities for one in predictions] == [one.probabilities for one in of_files]
    checked = vitrail.check(data, size=8, workers=0)
    assert checked.passed
    assert checked.summary == vitrail.check(folder, size=8, workers=0).summary


@pytest.mark.parametrize(("trained_on", "evaluated_on"), [("folder", "arrays"), ("arrays", "folder")])
def test_pixels_are_not_compared_with_files(trained_on: str, evaluated_on: str, folder: Path, tmp_path: Path) -> None:
    options: Any = {"device": "cpu", "workers": 0}
    data = {"folder": folder, "arrays": make("arrays", folder)}
    run = vitrail.train(data[trained_on], changes=TINY, folder=tmp_path / "run", quiet=True, **options)
    bundle = vitrail.load(run.folder / "best")
    unknown = vitrail.evaluate(bundle, data[evaluated_on], split="all", **options)
    assert unknown.summary.endswith("; evaluated on all images; it is unknown whether the model was trained on them")
    assert unknown.seen.compared_by is None
    known = vitrail.evaluate(bundle, data[trained_on], split="all", **options)
    assert known.seen.compared_by == "content"
    assert known.seen.trained_on > 0


def test_predictions_of_unlabelled_images_are_as_before(folder: Path, bundle: vitrail.Bundle, tmp_path: Path) -> None:
    images, _ = some_digits()
    paths = [str(path) for path in sorted(folder.rglob("*.png"))]
    options: Any = {"device": "cpu", "workers": 0}
    assert len(vitrail.predict(bundle, images[..., None], **options)) == 36
    assert len(vitrail.predict(bundle, (paths[0], paths[1]), **options)) == 2
    assert len(vitrail.predict(bundle, (images[0], images[1]), **options)) == 2
    assert len(vitrail.predict(bundle, list(images), **options)) == 36
    rows = vitrail.predict(bundle, [(b"no image", 0), (images[1], 1)], **options)
    assert (rows[0].error is None, rows[1].error) == (False, None)
    summary = vitrail.predict(bundle, make("dataframe", folder), output=tmp_path / "rows.csv", **options)
    assert summary.images == 36


def test_commands_read_a_saved_huggingface_dataset(
    folder: Path,
    bundle: vitrail.Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    datasets.disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    rows = make("huggingface", folder)
    datasets.DatasetDict({"train": rows, "test": rows.select(range(0, 36, 2))}).save_to_disk("saved")
    done = run_command(monkeypatch, capsys, "predict", bundle.origin, "saved", "--output", "rows.csv", "--workers", 0)
    assert done.code == 0, done.err
    lines = Path("rows.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 36 + 18 + 1
    assert '"saved, train row 0"' in lines[1]
    done = run_command(monkeypatch, capsys, "eval", bundle.origin, "saved", "--workers", 0)
    assert "18 held-out images" in done.out
    done = run_command(monkeypatch, capsys, "check", "saved", "--size", 8, "--workers", 0)
    assert "54 images in 3 classes" in done.out


def test_probe(folder: Path, bundle: vitrail.Bundle) -> None:
    one, other = (
        vitrail.probe(bundle, data, only=["knn"], device="cpu", workers=0) for data in (some_digits(), folder)
    )
    assert one.rows == other.rows
