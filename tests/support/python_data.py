"""The same digits as every kind of data: files in a folder, arrays, lists, a torch dataset, tables."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from vitrail.data.sources.source import digits

CLASSES, EACH = 3, 12
TINY = [
    "steps=6", "batch=8", "evaluations=2", "precision=float32", "model.image_size=8",
    "model.patch_size=4", "model.stem=conv", "model.width=16", "model.depth=1", "model.heads=2",
]  # fmt: skip
KINDS = (
    "arrays", "tensors", "lists", "pairs", "paths", "pillow", "bytes", "dataset", "tensor dataset", "dataframe",
    "huggingface", "huggingface paths",
)  # fmt: skip


def some_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return a few digits, sorted by class as in a folder."""
    whole = digits()
    chosen = np.concatenate([np.flatnonzero(whole.labels == label)[:EACH] for label in range(CLASSES)])
    return whole.images[chosen], whole.labels[chosen]


def write_folder(folder: Path) -> list[str]:
    """Write the digits to one folder per class; return their paths."""
    paths = []
    for number, (pixels, label) in enumerate(zip(*some_digits(), strict=True)):
        path = folder / str(label) / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        paths.append(str(path))
    return paths


class Digits(Dataset[tuple[Image.Image, int]]):
    """A dataset that decodes an item when it is asked for it."""

    def __init__(self) -> None:
        self.images, self.numbers = some_digits()
        self.reads = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        self.reads += 1
        return Image.fromarray(self.images[index]), int(self.numbers[index])


def make(kind: str, folder: Path) -> Any:
    """Return the digits as one kind of data; `folder` holds their files."""
    images, labels = some_digits()
    paths = sorted(str(path) for path in folder.rglob("*.png"))
    integers = labels.tolist()
    match kind:
        case "arrays":
            return images, labels
        case "tensors":
            return torch.from_numpy(images)[:, None], torch.from_numpy(labels)
        case "lists":
            return list(images), integers
        case "pairs":
            return list(zip(images.astype(np.float32) / 255, map(str, integers), strict=True))
        case "paths":
            return list(zip(map(Path, paths), integers, strict=True))
        case "pillow":
            return [(Image.fromarray(pixels), label) for pixels, label in zip(images, integers, strict=True)]
        case "bytes":
            return [(Path(path).read_bytes(), label) for path, label in zip(paths, integers, strict=True)]
        case "dataset":
            return Digits()
        case "tensor dataset":
            return TensorDataset(torch.from_numpy(images)[:, None] / 255, torch.from_numpy(labels))
        case "dataframe":
            return pd.DataFrame({"path": paths, "label": labels})
        case "huggingface" | "huggingface paths":
            rows = {"image": [Image.fromarray(one) for one in images] if kind == "huggingface" else paths}
            features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(n) for n in range(CLASSES)])}
            return datasets.Dataset.from_dict({**rows, "label": integers}, datasets.Features(features))
    raise ValueError(kind)
