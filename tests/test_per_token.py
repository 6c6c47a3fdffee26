"""A model with per-token logits cannot classify images: every command says so, and what to set."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.__main__ import _run
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import load
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError, ConfigError
from vitrail.inference.classifier import Classifier
from vitrail.models.checks import per_token
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.training.sweep import sweep
from vitrail.training.train import train

TINY = ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, classes=2, pool="none")
PATCHES = TINY.replace(pool="patches", head_layers=(0,))
CHANGES = ["model.width=16", "model.depth=1", "model.heads=1", "model.patch_size=4", "steps=1", "batch=4"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(6):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / label / f"{number}.png")
    return tmp_path / "data"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return Bundle(ViT(TINY), Preprocess(size=8), ("cat", "dog")).save(tmp_path / "tokens")


@pytest.mark.parametrize("command", ["predict", "eval", "train"])
def test_commands_say_what_to_set(
    command: str, bundle: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    options: dict[str, list[object]] = {
        "predict": [bundle, data / "cat" / "0.png"],
        "eval": [bundle, data],
        "train": [data, "--from", bundle, "--run", tmp_path / "run", "--set", "steps=1"],
    }
    monkeypatch.setattr(sys, "argv", ["vitrail", command, *map(str, options[command]), "--device", "cpu"])
    assert _run() == 2
    error = capsys.readouterr().err
    assert "gives logits for each of its 5 tokens (pool = 'none'), not for the image; pool=cls works" in error
    assert "--set model.pool=cls" in error
    assert "--override pool=cls" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists(), "nothing is created before the error"


def test_in_python_too(bundle: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="pool=cls works"):
        Classifier(bundle)
    changes, folder = [*CHANGES, "model.pool=none", "model.class_token=none"], tmp_path / "run"
    with pytest.raises(ConfigError, match=r"--set model\.pool=mean"):
        train(data, changes=changes, folder=folder, device="cpu", workers=0, quiet=True)
    with pytest.raises(ConfigError, match=r"--set model\.pool=mean"):
        sweep(data, over={"optimizer.lr": [0.1, 0.2]}, changes=changes, folder=folder, device="cpu", workers=0)
    assert not (tmp_path / "run").exists()


def test_logits_per_patch(data: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"each of its 4 patches \(pool = 'patches'\), not for the image; use a"):
        Classifier(Bundle(ViT(PATCHES), Preprocess(size=8), ("cat", "dog")).save(tmp_path / "patches"))
    changes, folder = [*CHANGES, "model.pool=patches", "model.class_token=none"], tmp_path / "run"
    with pytest.raises(ConfigError, match=r"4 patches .*--set model\.pool=mean"):
        train(data, changes=changes, folder=folder, device="cpu", workers=0, quiet=True)
    with pytest.raises(ConfigError, match="whose head reads one vector per image"):
        train(data, changes=[*changes, "model.head_layers=[-1]"], folder=folder, device="cpu", workers=0, quiet=True)


def test_the_suggested_override_works(bundle: Path, data: Path, tmp_path: Path) -> None:
    changes = ["steps=1", "batch=4", "model.pool=cls"]
    run = train(data, pretrained=bundle, changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    assert run.bundle.model.config.pool == "cls"
    config = json.loads((bundle / "config.json").read_text())
    config["vitrail"]["vit"]["pool"] = "cls"
    (bundle / "config.json").write_text(json.dumps(config))
    assert Classifier(bundle).predict(data / "cat" / "0.png").name in ("cat", "dog")
    assert load(bundle).model.config.pool == "cls"


def test_models_without_a_head_are_not_affected() -> None:
    assert per_token(TINY.replace(classes=0)) == ""
    assert per_token(TINY.replace(pool="mean")) == ""
