"""Make small datasets with several labels or a number per image from public ones, as images and a manifest.

    python benchmarks/manifests.py digit-pairs digit-pairs/                   # list.csv: path, labels
    python benchmarks/manifests.py digit-angles digit-angles/                 # list.csv: path, angle
    python benchmarks/manifests.py leaves PlantVillage-Dataset/ leaves/       # list.csv: path, labels
    python benchmarks/manifests.py pet-area oxford-iiit-pet/ pet-area/        # list.csv: path, area, split

digit-pairs: 2,000 images of two of scikit-learn's digits side by side; their labels are the digits.
digit-angles: 2,000 of these digits, turned by up to 45 degrees to either side; the number is the angle.
leaves: every sixth photo of PlantVillage, labelled with its crop and its disease ("Tomato;Early blight"; healthy leaves
have the label "healthy"). Crops and diseases are shared by several of the 38 original classes.
pet-area: Oxford-IIIT Pets (the folder with images/ and annotations/); the number is the percentage of the photo that
the pet covers, counted in its trimap with the border as pet. The split is the dataset's own.
Photos are saved with a shorter side of 96 pixels.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SIDE = 96
DIGITS = 2_000
EVERY = 6
"""One of so many photos of PlantVillage."""
SUFFIXES = {".jpg", ".jpeg", ".png"}


class Row(NamedTuple):
    """An image, as the path of a photo or ready, and what the manifest says of it."""

    image: Path | Image.Image
    name: str
    cells: tuple[str, ...]


def digit_pairs() -> Iterator[Row]:
    """Yield two digits side by side."""
    digits, labels = load_digits(return_X_y=True)
    images = (digits.reshape(-1, 8, 8) * 15.9).astype(np.uint8)
    for number, pair in enumerate(np.random.default_rng(0).integers(0, len(images), (DIGITS, 2)).tolist()):
        names = ";".join(sorted({str(labels[index]) for index in pair}))
        both = np.concatenate([images[index] for index in pair], axis=1)
        yield Row(Image.fromarray(both), f"{number:04d}.png", (names,))


def digit_angles() -> Iterator[Row]:
    """Yield turned digits."""
    images = (load_digits().images * 15.9).astype(np.uint8)
    generator = np.random.default_rng(0)
    for number, index in enumerate(generator.integers(0, len(images), DIGITS).tolist()):
        angle = round(float(generator.uniform(-45, 45)), 2)
        image = Image.fromarray(images[index]).resize((16, 16), Image.Resampling.BICUBIC)
        yield Row(image.rotate(angle, Image.Resampling.BICUBIC), f"{number:04d}.png", (str(angle),))


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


FROM_DIGITS: dict[str, tuple[Callable[[], Iterator[Row]], tuple[str, ...]]] = {
    "digit-pairs": (digit_pairs, ("labels",)),
    "digit-angles": (digit_angles, ("angle",)),
}
FROM_PHOTOS: dict[str, tuple[Callable[[Path], Iterator[Row]], tuple[str, ...]]] = {
    "leaves": (leaves, ("labels",)),
    "pet-area": (pet_area, ("area", "split")),
}


def small(photo: Path) -> Image.Image:
    """Return a photo with a shorter side of 96 pixels."""
    with Image.open(photo) as opened:
        opened.draft("RGB", (2 * SIDE, 2 * SIDE))
        image = opened.convert("RGB")
    scale = SIDE / min(image.size)
    return image.resize((round(scale * image.width), round(scale * image.height)), Image.Resampling.BICUBIC)


def write(rows: Iterator[Row], columns: tuple[str, ...], target: Path) -> int:
    """Write the images and the manifest; return how many there are."""
    (target / "images").mkdir(parents=True, exist_ok=True)
    written = 0
    with (target / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["path", *columns])
        for row in rows:
            image = small(row.image) if isinstance(row.image, Path) else row.image
            image.save(target / "images" / row.name, quality=92)
            writer.writerow([f"images/{row.name}", *row.cells])
            written += 1
    return written


def main() -> None:
    """Make a dataset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=[*FROM_DIGITS, *FROM_PHOTOS])
    parser.add_argument("folders", nargs="+", type=Path, help="the source, if it is not the digits, and the target")
    given = parser.parse_args()
    if len(given.folders) != (1 if given.dataset in FROM_DIGITS else 2):
        parser.error("give a source and a target, or for digits only a target")
    if given.dataset in FROM_DIGITS:
        make, columns = FROM_DIGITS[given.dataset]
        rows = make()
    else:
        from_photos, columns = FROM_PHOTOS[given.dataset]
        rows = from_photos(given.folders[0])
    print(f"{write(rows, columns, given.folders[-1]):,} images in {given.folders[-1]}")


if __name__ == "__main__":
    main()
