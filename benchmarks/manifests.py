"""Make small datasets with several labels or a number per image from public ones, as images and a manifest.

    python benchmarks/manifests.py leaves PlantVillage-Dataset/ leaves/       # list.csv: path, labels
    python benchmarks/manifests.py pet-area oxford-iiit-pet/ pet-area/        # list.csv: path, area, split

leaves: every sixth photo of PlantVillage, labelled with its crop and its disease ("Tomato;Early blight"; healthy leaves
have the label "healthy"). Crops and diseases are shared by several of the 38 original classes.
pet-area: Oxford-IIIT Pets (the folder with images/ and annotations/); the number is the percentage of the photo that
the pet covers, counted in its trimap with the border as pet. The split is the dataset's own.
Images are saved with a shorter side of 96 pixels.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

SIDE = 96
EVERY = 6
"""One of so many photos of PlantVillage."""
SUFFIXES = {".jpg", ".jpeg", ".png"}


class Row(NamedTuple):
    """A source image, and what the manifest says of it."""

    image: Path
    name: str
    cells: tuple[str, ...]


def leaves(folder: Path) -> Iterator[Row]:
    """Yield photos of leaves with crop and disease."""
    for place in sorted(folder.glob("*___*")):
        crop, disease = (text.replace("_", " ").strip() for text in place.name.split("___"))
        photos = sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES)
        for number, photo in enumerate(photos[::EVERY]):
            yield Row(photo, f"{place.name}-{number:04d}.jpg".replace(" ", "_"), (f"{crop};{disease}",))


def pet_area(folder: Path) -> Iterator[Row]:
    """Yield photos of pets with the percentage that the pet covers."""
    for split, listing in (("train", "trainval.txt"), ("test", "test.txt")):
        for line in (folder / "annotations" / listing).read_text().splitlines():
            name = line.split()[0]
            with Image.open(folder / "annotations" / "trimaps" / f"{name}.png") as opened:
                trimap = np.asarray(opened)
            area = 100 * float((trimap != 2).mean())  # 1: pet, 2: background, 3: border
            yield Row(folder / "images" / f"{name}.jpg", f"{name}.jpg", (f"{area:.2f}", split))


DATASETS: dict[str, tuple[Callable[[Path], Iterator[Row]], tuple[str, ...]]] = {
    "leaves": (leaves, ("labels",)),
    "pet-area": (pet_area, ("area", "split")),
}


def main() -> None:
    """Write the images and the manifest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=DATASETS)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    make, columns = DATASETS[given.dataset]
    (given.target / "images").mkdir(parents=True, exist_ok=True)
    with (given.target / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["path", *columns])
        written = 0
        for row in make(given.source):
            with Image.open(row.image) as opened:
                opened.draft("RGB", (2 * SIDE, 2 * SIDE))
                image = opened.convert("RGB")
            scale = SIDE / min(image.size)
            size = round(scale * image.width), round(scale * image.height)
            image.resize(size, Image.Resampling.BICUBIC).save(given.target / "images" / row.name, quality=92)
            writer.writerow([f"images/{row.name}", *row.cells])
            written += 1
    print(f"{written:,} images in {given.target}")


if __name__ == "__main__":
    main()
