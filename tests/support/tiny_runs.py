"""Tiny real runs, with names that would break a page without escaping."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.api import pretrain
from vitrail.training.train import Run, train

EVIL = "<script>alert(1)</script>"
CLASSES = (EVIL, "quo\"te & 'amp'", "plain")
COLUMNS = ("bright<i>ness", "noise")
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


def labelled_images(folder: Path) -> tuple[Path, Path]:
    """Write images, and two manifests of them: with several labels each, and with numbers in two columns.

    Each label has its colour, and the first number is the brightness.
    """
    folder.mkdir()
    generator = np.random.default_rng(0)
    labelled: list[tuple[str, ...]] = [("path", "labels")]
    numbered: list[tuple[str, ...]] = [("path", *COLUMNS)]
    for number in range(90):
        has = generator.random(3) < 0.5
        bright = int(generator.integers(0, 120))
        pixels = generator.integers(bright, bright + 100, (20, 20, 3), np.uint8)
        pixels[:, :, has] += np.uint8(30)
        name = f"{number}\"'><i>.png"
        Image.fromarray(pixels).save(folder / name)
        labelled.append((name, ";".join(label for label, own in zip(CLASSES, has, strict=True) if own)))
        numbered.append((name, f"{bright}", f"{generator.normal():.3f}"))
    for file, rows in (("labels.csv", labelled), ("numbers.csv", numbered)):
        with (folder / file).open("w", newline="", encoding="utf-8") as opened:
            csv.writer(opened).writerows(rows)
    return folder / "labels.csv", folder / "numbers.csv"


def tiny_run(data: str | Path, folder: Path, *changes: str) -> Run:
    """Train briefly."""
    return train(data, changes=[*TINY, *changes], folder=folder, device="cpu", workers=0, quiet=True)


def tiny_pretraining(folder: Path, *changes: str, data: str | Path = "digits", method: str = "mae") -> Run:
    """Pretrain briefly; with a report."""
    return pretrain(
        data, method=method, changes=[*PRETRAINING, *changes], folder=folder, device="cpu", workers=0, quiet=True
    )
