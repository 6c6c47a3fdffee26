"""Runs whose JPEGs nvImageCodec decodes, here on the CPU: resumed exactly, and with the same draws and bad files."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.jpeg_files import MixedFiles, jpeg, photo

from vitrail.data import decoder_choice, gpu_batches, resident
from vitrail.errors import ConfigError
from vitrail.training.run_folder import MetricsFile
from vitrail.training.train import train

SMALL = (
    *("steps=6", "batch=8", "evaluations=3", "model.width=16", "model.depth=1", "model.heads=2", "mixing.mixup=0.5"),
    *("model.image_size=32", "model.patch_size=8", "save_minutes=0", "deterministic=true", "data.val=0.2"),
)


@pytest.fixture(autouse=True)
def _decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_choice, "DEVICES", ("cuda", "cpu"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        MixedFiles(tmp_path / "images" / name, 2)
    return tmp_path / "images"


def weights(data: Path, folder: Path, *changes: str, workers: int = 0) -> dict[str, torch.Tensor]:
    run = train(data, changes=[*SMALL, *changes], folder=folder, device="cpu", workers=workers, quiet=True)
    return load_file(Path(run.folder) / "last" / "model.safetensors")


@contextmanager
def stopped(after: int) -> Iterator[None]:
    """Stop a run as Ctrl-C does, before a step is decoded."""
    decoded, count = gpu_batches.EncodedTraining.decoded, 0

    def stop(self: gpu_batches.EncodedTraining, *given: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt
        return decoded(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_batches.EncodedTraining, "decoded", stop)
        yield


@pytest.mark.parametrize("change", ["augmentation.crop=inception_tf", "augmentation.randaugment.layers=2"])
def test_a_stopped_run_resumes_exactly(data: Path, tmp_path: Path, change: str) -> None:
    changes = ("data.decode=gpu", change)
    expected = weights(data, tmp_path / "whole", *changes)
    with stopped(after=4), pytest.raises(KeyboardInterrupt):
        weights(data, tmp_path / "resumed", *changes)
    actual = weights(data, tmp_path / "resumed", *changes, workers=2)
    assert "resuming from step 4 of 6" in (tmp_path / "resumed" / "log.txt").read_text()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_close_to_a_run_that_decodes_on_the_cpu(data: Path, tmp_path: Path) -> None:
    """Also the files that cannot be read, and the validation."""
    rows, states = {}, {}
    for decode in ("cpu", "gpu"):
        weights(data, tmp_path / decode, f"data.decode={decode}")
        rows[decode] = MetricsFile.read(tmp_path / decode)
        (state, *_) = sorted((tmp_path / decode / "state").glob("*/state.json"), reverse=True)
        states[decode] = json.loads(state.read_text())
    assert states["gpu"]["bad_files"] == states["cpu"]["bad_files"] != []
    assert (states["gpu"]["decoder"], states["cpu"]["decoder"]) == ("gpu", "cpu")
    for one, other in zip(rows["gpu"], rows["cpu"], strict=True):
        for name in ("loss", "val_loss"):
            if name in other:
                assert one[name] == pytest.approx(other[name], abs=0.02)


def test_resuming_with_another_decoder_says_so(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_choice, "FEWEST", 1)
    monkeypatch.setattr(decoder_choice, "GPU_MOST", 1e6)
    for number, file in enumerate(list(data.rglob("*.*"))):
        file.unlink()
        file.with_suffix(".jpg").write_bytes(jpeg(photo(60, 50, number)))
    with stopped(after=4), pytest.raises(KeyboardInterrupt):
        train(data, changes=SMALL, folder=tmp_path / "run", device="cpu", workers=1)
    assert "decoding on the GPU: faster for JPEGs of about 0.00 megapixels with 1 worker" in capfd.readouterr().err
    monkeypatch.setattr(decoder_choice, "FEWEST", 1000)
    train(data, changes=SMALL, folder=tmp_path / "run", device="cpu", workers=1)
    text = capfd.readouterr().err
    assert "decoding on the CPU: 48 images are too few to start decoders on the GPU" in text
    assert "decoder was gpu before and is cpu now, so the pixels differ slightly from those of" in text


def test_what_leaves_no_choice(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.decode is gpu, but data\.cache"):
        weights(data, tmp_path / "run", "data.decode=gpu", "data.cache=32", "augmentation.crop=none")


def test_images_that_stay_on_the_device(data: Path, tmp_path: Path) -> None:
    """They are decoded once by nvImageCodec, if asked; bad files are the same, and a stopped run resumes exactly."""
    states, losses = {}, {}
    changes = ("data.on_device=true", "augmentation.crop=padded")
    for decode in ("auto", "gpu"):
        expected = weights(data, tmp_path / decode, *changes, f"data.decode={decode}")
        losses[decode] = [row["loss"] for row in MetricsFile.read(tmp_path / decode) if "loss" in row]
        (state, *_) = sorted((tmp_path / decode / "state").glob("*/state.json"), reverse=True)
        states[decode] = json.loads(state.read_text())
    assert (states["gpu"]["decoder"], states["auto"]["decoder"]) == ("gpu", "cpu")
    assert states["gpu"]["bad_files"] == states["auto"]["bad_files"] != []
    assert losses["gpu"] == pytest.approx(losses["auto"], abs=0.02)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident.Resident, "make", interrupted(resident.Resident.make, after=4))
        with pytest.raises(KeyboardInterrupt):
            weights(data, tmp_path / "resumed", *changes, "data.decode=gpu")
    actual = weights(data, tmp_path / "resumed", *changes, "data.decode=gpu", workers=2)
    assert "resuming from step" in (tmp_path / "resumed" / "log.txt").read_text()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def interrupted(make: Callable[..., Any], after: int) -> Callable[..., Any]:
    """Return a method that stops a run at its `after`-th call, as Ctrl-C does."""
    count = 0

    def stop(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt
        return make(*given)

    return stop


def test_unknown_words(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.decode"):
        weights(data, tmp_path / "run", "data.decode=cuda")
