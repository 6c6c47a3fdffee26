"""Runs on a subset of the training split: `data.fraction` and `data.per_class`."""

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.support import forked_commands

import vitrail
from vitrail.__main__ import _run
from vitrail.data.sources.opening import open_data
from vitrail.errors import ConfigError, DataError
from vitrail.training.recipe import DataSettings
from vitrail.training.recipe_files import read_recipe
from vitrail.training.run_folder import MetricsFile
from vitrail.training.train import Run, train

TINY = [
    "epochs=6", "batch=16", "evaluations=3", "model.image_size=8", "model.width=16", "model.depth=1", "model.heads=1",
    "model.patch_size=4",
]  # fmt: skip


def trained(data: str | Path, folder: Path, *changes: str) -> Run:
    return train(data, changes=[*TINY, *changes], folder=folder, device="cpu", workers=0, quiet=True)


def split_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "split.json").read_text())
    return record


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write 40 images of one class and 20 of another."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    generator = np.random.default_rng(0)
    for label, count in (("cat", 40), ("dog", 20)):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 256, (10, 10, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize(
    ("change", "images", "line"),
    [
        ("data.fraction=0.1", 127, "48 steps, 127 of 1,259 training images (data.fraction=0.1)"),
        ("data.per_class=5", 50, "19 steps, 50 of 1,259 training images (data.per_class=5)"),
    ],
)
def test_a_run_on_a_subset(change: str, images: int, line: str, tmp_path: Path) -> None:
    run = trained("digits", tmp_path / "run", change)
    assert line in (run.folder / "log.txt").read_text()
    assert change.partition(".")[2].replace("=", " = ") in (run.folder / "recipe.toml").read_text().splitlines()
    record = split_of(run.folder)
    assert sum(record["counts"]["train"].values()) == len(record["names"]["train"]) == images
    assert sum(record["subset"]["drawn_from"].values()) == 1259
    whole = open_data("digits").record
    assert [record["names"][split] for split in ("val", "test")] == [whole["names"][split] for split in ("val", "test")]
    assert run.metrics.images == 359
    # An epoch is a pass over the subset.
    last = [row for row in MetricsFile.read(run.folder) if "loss" in row][-1]
    assert last["epoch"] == pytest.approx(last["step"] * 16 / images, abs=1e-3)
    assert vitrail.evaluate(run.folder / "best", "digits", split="train", workers=0).images == images
    assert vitrail.evaluate(run.folder / "best", "digits", split="all", workers=0).seen.trained_on == images


def test_the_defaults_are_those_of_the_subset(tmp_path: Path) -> None:
    changes = [change for change in TINY if not change.startswith(("epochs", "batch"))]
    run = train(
        "digits",
        changes=[*changes, "steps=1", "data.per_class=5"],
        folder=tmp_path / "run",
        device="cpu",
        workers=0,
        quiet=True,
    )
    batch = next(default for default in run.defaults if default.field == "batch")
    assert (batch.value, batch.reason) == (32, "about 2 steps per epoch of 50 images")


@pytest.mark.parametrize(
    "changes",
    [
        ["data.balance=true", "objective.class_weights=balanced"],
        ["data.cache=8"],
        ["data.on_device=true", "augmentation.crop=padded"],
    ],
    ids=["balance", "cache", "on_device"],
)
def test_images_that_are_left_out_are_never_read(changes: list[str], photos: Path, tmp_path: Path) -> None:
    splits = open_data(photos, fraction=0.3)
    used = {split.name(index) for split in splits[:3] for index in range(len(split))}
    for path in photos.rglob("*.png"):
        if str(path) not in used:
            path.write_bytes(b"no image")
    run = trained(photos, tmp_path / "run", "data.fraction=0.3", "data.bad_files=refuse", *changes)
    assert split_of(run.folder)["counts"]["train"] == {"cat": 8, "dog": 4}
    assert json.loads((run.folder / "check.json").read_text())["images"] == len(used)
    with pytest.raises(DataError, match="cannot be read"):
        trained(photos, tmp_path / "whole", "data.bad_files=refuse", *changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "last" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_class_weights_are_those_of_the_subset(photos: Path, tmp_path: Path) -> None:
    """The classes have 28 and 14 training images, but 5 each in the subset, so both weigh the same."""
    for number, change in enumerate(("none", "balanced")):
        trained(photos, tmp_path / str(number), "data.per_class=5", f"objective.class_weights={change}")
    assert same(weights(tmp_path / "0"), weights(tmp_path / "1"))


RESNET = ("model.stem=resnet", "model.depth=0", "model.width=128", "model.heads=1", "model.patch_size=1",
          "model.resnet={depths=[1],width_factor=0.5,root_stride=1}", "model.position=none", "model.class_token=none",
          "model.pool=mean", "model.final_norm=none", "steps=6", "batch=16", "evaluations=2")  # fmt: skip


@pytest.mark.parametrize(
    "settings", [pytest.param(TINY, marks=pytest.mark.slow, id="vit"), pytest.param(RESNET, id="resnet")]
)
def test_an_interrupted_run_resumes_exactly(settings: Sequence[str], tmp_path: Path) -> None:
    changes = [word for change in (*settings, "data.fraction=0.3", "mixing.mixup=0.2") for word in ("--set", change)]
    words = ["train", "digits", "--device", "cpu", "--workers", "0", *changes, "--run"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    done = forked_commands.run(*words, str(straight), timeout=300)
    assert done.returncode == 0, done.stderr
    process = forked_commands.start(*words, str(stopped))
    while not (stopped / "metrics.jsonl").exists() or not (stopped / "metrics.jsonl").read_text():
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    done = forked_commands.run(*words, str(stopped), timeout=300)
    assert done.returncode == 0, done.stderr
    assert "resuming from step" in done.stderr
    assert (stopped / "split.json").read_text() == (straight / "split.json").read_text()
    assert (stopped / "metrics.jsonl").read_text() == (straight / "metrics.jsonl").read_text()
    assert same(weights(stopped), weights(straight))


def test_a_changed_training_split_is_noticed(photos: Path, tmp_path: Path) -> None:
    """Another image may change the draw, even if it is not drawn itself."""
    trained(photos, tmp_path / "run", "data.per_class=3", "data.val=0", "data.test=0")
    Image.new("RGB", (10, 10)).save(photos / "dog" / "zzz.png")
    with pytest.raises(DataError, match=r"the data has changed since the run in .* started"):
        trained(photos, tmp_path / "run", "data.per_class=3", "data.val=0", "data.test=0")


def test_another_fraction_in_the_same_folder(tmp_path: Path) -> None:
    trained("digits", tmp_path / "run", "data.fraction=0.1", "epochs=1")
    with pytest.raises(ConfigError, match=r"another recipe \(data.fraction is 0.1 there and 0.2 here\)"):
        trained("digits", tmp_path / "run", "data.fraction=0.2", "epochs=1")


@pytest.mark.slow
def test_a_sweep_over_fractions_evaluates_the_same_images(tmp_path: Path) -> None:
    sweep = vitrail.sweep(
        "digits",
        over={"data.fraction": [0.1, 0.3, 1.0]},
        changes=[*TINY, "epochs=none", "steps=2"],
        folder=tmp_path / "sweep",
        device="cpu",
        workers=0,
        quiet=True,
    )
    records = [split_of(candidate.folder) for candidate in sweep.runs]
    for split in ("val", "test"):
        assert len({tuple(record["names"][split]) for record in records}) == 1
    few, more, whole = records
    assert set(few["names"]["train"]) < set(more["names"]["train"])
    assert "subset" not in whole
    assert [sum(record["counts"]["train"].values()) for record in records] == [127, 377, 1259]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.fraction=0"], "data.fraction is 0: input should be greater than 0"),
        (["data.fraction=-0.5"], "data.fraction is -0.5: input should be greater than 0"),
        (["data.fraction=1.01"], "data.fraction is 1.01: input should be less than or equal to 1"),
        (["data.fraction=half"], "data.fraction is 'half': input should be a valid number"),
        (["data.fraction=nan"], "data.fraction is nan: input should be a finite number"),
        (["data.per_class=0"], "data.per_class is 0: input should be greater than 0"),
        (["data.per_class=2.5"], "data.per_class is 2.5: input should be a valid integer"),
        (["data.fraction=0.1", "data.per_class=5"], "data.fraction is 0.1 and data.per_class is 5; leave one of them"),
        (["fraction=0.1"], "a recipe has no option 'fraction'; did you mean --set data.fraction=0.1?"),
    ],
)
def test_invalid_subsets(
    changes: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for change in changes for word in ("--set", change)]
    monkeypatch.setattr(sys, "argv", ["vitrail", "train", "digits", "--run", str(tmp_path / "run"), *words])
    assert _run() == 2
    output = capsys.readouterr().err
    assert output.startswith(f"vitrail: {message}")
    assert output.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_subset_can_be_unset() -> None:
    recipe = read_recipe("scratch-small", ["data.per_class=5"])
    assert read_recipe(recipe, ["data.per_class=none"]).data == DataSettings()
    assert read_recipe(recipe, ["data.per_class=none", "data.fraction=0.5"]).data.fraction == 0.5
    assert read_recipe(recipe, ["data.fraction=1"]).data.per_class == 5
