"""A run with images on the device equals the run that reads them from files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vitrail.errors import ConfigError
from vitrail.training.run_folder import MetricsFile
from vitrail.training.train import train

SMALL = (
    *("steps=6", "batch=16", "evaluations=1", "model.width=16", "model.depth=1", "model.heads=2", "mixing.mixup=0.5"),
    *("augmentation.crop=padded", "augmentation.flip=0.5", "augmentation.erasing=0.5"),
)


def weights(folder: Path, *changes: str) -> dict[str, torch.Tensor]:
    run = train("digits", changes=[*SMALL, *changes], folder=folder, device="cpu", workers=0, quiet=True)
    return load_file(Path(run.folder) / "last" / "model.safetensors")


def test_the_same_weights(tmp_path: Path) -> None:
    files, resident = (weights(tmp_path / setting, f"data.on_device={setting}") for setting in ("false", "true"))
    assert files.keys() == resident.keys()
    assert all(torch.equal(files[name], resident[name]) for name in files)


def test_validation_on_the_device_equals_validation_from_files(tmp_path: Path) -> None:
    """Three validations, the first from files; the result is on other images."""
    rows, results = [], []
    for setting in ("false", "true"):
        weights(tmp_path / setting, f"data.on_device={setting}", "evaluations=3", "steps=9")
        result = [row for row in MetricsFile.read(tmp_path / setting) if "val_loss" in row]
        rows.append([(row["step"], row["val_top1"], row["val_loss"]) for row in result])
        results.append(json.loads((tmp_path / setting / "result.json").read_text()))
    assert len(rows[0]) == 3
    assert results[0]["loss"] not in [row[2] for row in rows[0]]
    assert results[0] == results[1]
    assert rows[0] == rows[1]


def test_a_resizing_crop_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resizes each image, which is not implemented on the device"):
        weights(tmp_path / "run", "data.on_device=true", "augmentation.crop=inception")
    assert not (tmp_path / "run").exists()
