"""For jobs with many rows: a tiny model, tiny images, and a reader of the output."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

NAMES = ("cat", "dog", "fox")


def tiny_bundle(names: tuple[str, ...] | None = NAMES, *, channels: int = 3, classes: int = 3, seed: int = 0) -> Bundle:
    torch.manual_seed(seed)
    model = ViT(
        ViTConfig(image_size=8, patch_size=4, channels=channels, width=16, depth=1, heads=2, classes=classes)
    ).eval()
    if classes:
        torch.nn.init.normal_(model.head.weight)
    half = (0.5,) * channels
    return Bundle(model, Preprocess(size=8, channels=channels, mean=half, std=half), names)


def tiny_pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (9, 12, 3), np.uint8)


def tiny_images(folder: Path, count: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:05d}.png" for number in range(count)]
    for number, path in enumerate(paths):
        Image.fromarray(tiny_pixels(number)).save(path)
    return paths


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read an output of any format into the same rows."""
    if file.suffix == ".parquet":
        rows = pyarrow.parquet.read_table(file).to_pylist()
        return [{**row, "probabilities": [float(f"{p:.6g}") for p in row["probabilities"]]} for row in rows]
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    with open(file, newline="", encoding="utf-8", errors="surrogateescape") as lines:
        return [_from_csv(row) for row in csv.DictReader(lines)]


def _from_csv(row: dict[str, str]) -> dict[str, Any]:
    places = [place for place in range(1, 4) if row[f"class_{place}"]]
    return {
        "number": int(row["number"]),
        "path": row["path"],
        "error": row["error"] or None,
        "classes": [row[f"class_{place}"] for place in places],
        "probabilities": [float(row[f"probability_{place}"]) for place in places],
    }
