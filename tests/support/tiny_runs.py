"""Tiny real runs, with names that would break a page without escaping."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.api import pretrain
from vitrail.training.train import Run, train

EVIL = "<script>alert(1)</script>"
CLASSES = (EVIL, "quo\"te & 'amp'", "plain")
TINY = (
    "model.image_size=16", "model.patch_size=8", "model.stem=conv", "model.width=16", "model.depth=2", "model.heads=2",
    "epochs=4", "batch=16", "evaluations=3",
)  # fmt: skip
PRETRAINING = (
    "compile=false", "steps=12", "batch=32", "evaluations=4", "model.width=32", "model.depth=2", "model.heads=2",
)  # fmt: skip


def images(folder: Path) -> Path:
    """Write images of three classes, hard to tell apart, and a manifest of them."""
    folder.mkdir()
    generator, rows = np.random.default_rng(0), []
    for number in range(90):
        label = number % 3
        pixels = generator.integers(0, 200, (20, 20, 3), np.uint8)
        pixels[:, :, label] += np.uint8(4)
        name = f"{number}\"'><i>.png"
        Image.fromarray(pixels).save(folder / name)
        rows.append((name, CLASSES[label]))
    with (folder / "list.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    return folder / "list.csv"


def tiny_run(data: str | Path, folder: Path, *changes: str) -> Run:
    """Train briefly."""
    return train(data, changes=[*TINY, *changes], folder=folder, device="cpu", workers=0, quiet=True)


def tiny_pretraining(folder: Path, *changes: str, data: str | Path = "digits", method: str = "mae") -> Run:
    """Pretrain briefly; with a report."""
    return pretrain(
        data, method=method, changes=[*PRETRAINING, *changes], folder=folder, device="cpu", workers=0, quiet=True
    )
