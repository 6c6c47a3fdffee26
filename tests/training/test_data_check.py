"""The data check before training, and its record."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.commands import run_command
from tests.support.memory_jobs import job

import vitrail
from vitrail.data.sources.opening import open_data
from vitrail.training.console import RunConsole
from vitrail.training.preparation import check_images, prepare_folder
from vitrail.training.run_folder import Origin
from vitrail.training.train import train

CHANGES = [
    "steps=1", "batch=4", "evaluations=1",
    "model.image_size=[16, 16]", "model.patch_size=[8, 8]", "model.width=48", "model.depth=2", "model.heads=2",
]  # fmt: skip


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(8):
            noise = np.random.default_rng([number, ord(label[0])]).integers(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(noise).save(tmp_path / "photos" / label / f"{number}.png")
    return tmp_path / "photos"


def test_training_reports_conflicting_labels_duplicates_and_skipped_files(photos: Path, tmp_path: Path) -> None:
    shutil.copy(photos / "cat" / "0.png", photos / "dog" / "other.png")
    shutil.copy(photos / "cat" / "1.png", photos / "cat" / "again.png")
    shutil.copy(photos / "cat" / "2.png", photos / "cat" / "upload.php")
    folder, splits = tmp_path / "run", open_data(photos)
    folder.mkdir()
    with RunConsole(folder, quiet=True) as console:  # as `train` does before the first step
        console.data_check(check_images(folder, splits, 16, "skip"))
    check = json.loads((folder / "check.json").read_text())
    names = {copies["kind"]: [Path(one["name"]).name for one in copies["images"]] for copies in check["duplicates"]}
    assert names["conflicting"] == ["0.png", "other.png"] or names["conflicting"] == ["other.png", "0.png"]
    assert len(check["duplicates"]) == 2
    assert (check["compared"], check["checked"], check["images"], check["decoded"]) == (18, 18, 18, False)
    assert "corruption after the header of a file" in check["not_checked"]
    log = (folder / "log.txt").read_text()
    assert "18 images in 2 classes (headers of 18 read, contents of 18 compared); 1 file misnamed, 1 duplicate" in log
    assert "\nWARNING: 1 duplicate with different labels (" in log
    assert "\nWARNING: 1 file is an image by content but not by name" in log
    assert "upload.php: a JPEG" not in log  # it is a PNG
    assert "upload.php: a PNG; rename it to upload.png" in log


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_refuse_stops_before_training_at_an_unreadable_image_of_any_split(
    split: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = getattr(open_data(photos), split)
    bad = Path(source.name(0))
    bad.write_text("no image")
    changes = [word for change in (*CHANGES, "data.bad_files=refuse") for word in ("--set", change)]
    words = ("train", photos, "--run", tmp_path / "run", "--device", "cpu", *changes)
    done = run_command(monkeypatch, capsys, *words)
    assert done.code == 2
    assert done.err.startswith(f"vitrail: {bad} cannot be read: it is not an image")
    assert done.err.endswith("; fix or remove it, or train with --set data.bad_files=skip\n")
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    Path(source.name(1)).write_text("no image")
    assert ", the first of 2 such images; fix or remove them, or" in run_command(monkeypatch, capsys, *words).err


def test_training_lists_every_fault_of_the_data(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "gone.png").symlink_to("nowhere.png")
    (photos / "emu").mkdir()
    with pytest.raises(vitrail.DataError, match=r"has 2 faults: \(1\) .*gone\.png is a link.*\(2\) the class folder"):
        train(photos, recipe="scratch-small", changes=CHANGES, folder=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_folder_is_prepared_once_and_compared_when_the_run_is_resumed(photos: Path, tmp_path: Path) -> None:
    folder, splits, plan = tmp_path / "run", open_data(photos), job().plan
    folder.mkdir()
    first = prepare_folder(folder, plan, splits, Origin(str(photos), ""))
    assert (first.check is not None, first.moved) == (True, ())
    checked = {"check.json", "contents.index", "stamps.index", "samples"}
    files = {"recipe.toml", "origin.json", "defaults.json", "split.json", *checked}
    assert {path.name for path in folder.iterdir()} == files
    again = prepare_folder(folder, plan, splits, Origin("elsewhere", ""))
    assert again.check is None
    assert again.moved == (f"the data was at {photos} when the run started, and is at elsewhere now",)
    (photos / "cat" / "0.png").unlink()
    with pytest.raises(vitrail.DataError, match=r"the data has changed since the run in .* started"):
        prepare_folder(folder, plan, open_data(photos), Origin(str(photos), ""))
