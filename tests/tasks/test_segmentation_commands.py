"""The other commands with a segmentation model: they work, or say in one sentence why not."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from tests.support.commands import CommandOutput, RunCommand, run_command
from tests.support.segmentation_models import COLOURS, SIDE, colour_bundle, colour_image

import vitrail
from vitrail.acceleration.export.onnx import OnnxFile
from vitrail.acceleration.export.openvino import Compiled
from vitrail.exporting import export
from vitrail.tasks.segmentation import MaskPrediction


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    monkeypatch.chdir(tmp_path)
    colour_bundle().save("bundle")
    Path("images").mkdir()
    Image.fromarray(colour_image(40, 60)[0]).save("images/image.png")
    return lambda *words: run_command(monkeypatch, capsys, *words)


def one_sentence(done: CommandOutput) -> str:
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done
    return done.err


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_an_exported_model_gives_the_same_masks(to: str, tmp_path: Path) -> None:
    bundle = colour_bundle()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in bundle.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    target = tmp_path / ("model.onnx" if to == "onnx" else "model.xml")
    made = export(bundle, target, to=to)
    if to == "onnx":
        metadata = {entry.key: entry.value for entry in onnx.load(target).metadata_props}
        assert json.loads(metadata["classes"]) == list(COLOURS)
    else:
        metadata = json.loads((tmp_path / "model.xml.json").read_text())
        assert metadata["classes"] == list(COLOURS)
    assert metadata["task"] == "segmentation"
    assert "largest logit along axis 1, after bilinear upsampling" in metadata["activation"]
    assert made.metadata["activation"] == metadata["activation"]
    pixels = torch.from_numpy(np.stack([colour_image(SIDE, SIDE, seed)[0] for seed in range(5)])).permute(0, 3, 1, 2)
    inputs = bundle.preprocess.normalise(pixels)
    session = OnnxFile(target) if to == "onnx" else Compiled(target, "float32")
    exported = session(inputs)
    with torch.no_grad():
        expected = bundle.model(inputs)
    assert exported.shape == (5, 3, 8, 8)
    assert torch.allclose(exported, expected, atol=1e-4)
    engine = vitrail.predict(bundle, list(pixels), engine=to, device="cpu", precision="float32")
    for ours, theirs in zip(vitrail.predict(bundle, list(pixels), device="cpu"), engine, strict=True):
        assert isinstance(ours, MaskPrediction)
        assert isinstance(theirs, MaskPrediction)
        assert (ours.mask(40, 50) != theirs.mask(40, 50)).mean() < 0.001


def test_a_class_of_a_patch_is_explained(run: RunCommand) -> None:
    done = run(
        "explain",
        "bundle",
        "images/image.png",
        "--query",
        "3,4",
        "--class",
        "green",
        "--out",
        "maps",
        "--device",
        "cpu",
    )
    assert done.code == 0, done.err
    assert Path("maps/image-relevance-3_4-green.png").is_file()
    assert "green" in done.out
    without = one_sentence(run("explain", "bundle", "images/image.png", "--out", "maps", "--device", "cpu"))
    assert "logits for every patch (its pool is patches), so choose one with query" in without
    assert run("explain", "bundle", "images/image.png", "--method", "attention", "--device", "cpu").code == 0


def test_features_are_those_of_patches(run: RunCommand) -> None:
    assert "does not pool its tokens" in one_sentence(run("embed", "bundle", "images", "-o", "features.npy"))
    done = run("embed", "bundle", "images", "-o", "features.npy", "--tokens", "patches", "--device", "cpu")
    assert done.code == 0, done.err
    assert np.load("features.npy").shape[0] == 1
    assert "does not pool its tokens" in one_sentence(run("probe", "bundle", "digits", "--device", "cpu"))


def test_data_without_masks_cannot_be_evaluated(run: RunCommand) -> None:
    assert "the model predicts masks, but the data has none" in one_sentence(run("eval", "bundle", "digits"))


@pytest.mark.slow
def test_speed_is_measured(run: RunCommand) -> None:
    done = run("bench", "bundle", "--device", "cpu", "--batch", "1")
    assert done.code == 0, done.err
    assert "Speed and masks: relative to torch float32" in done.out
