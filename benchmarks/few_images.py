"""Few images: what `vitrail train` makes of 300, 500 and 1,000 as it comes, beside HOG features and an SVM.

    pip install scikit-image scikit-learn
    python benchmarks/few_images.py sign-language-digits/ few/signs/
    python benchmarks/few_images.py PlantVillage/ few/plants/ --images 300 --only hog

The first folder has a sub-folder for each class. 1,000 test images are drawn once, for both contestants and all runs;
the images to train on are drawn from the others, by a seed, every class equally often. Copies whose shorter side is at
most 144 pixels, and a manifest for each run, go into the second folder; what is there is used again. HOG with an SVM
learns from all training images (kernel and C by 3-fold cross-validation); `vitrail train` keeps a tenth of them for
validation.
"""

import argparse
import csv
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

TEST, POOL, LEAST = 1_000, 3_000, 60
"""Images to test on, images that training sets are drawn from, and how many a class needs to take part."""
SHORTER_SIDE = 144
SUFFIXES = (".jpg", ".jpeg", ".png")

Drawn = list[tuple[Path, str]]


def drawn(by_class: Mapping[str, Sequence[Path]], count: int, chance: random.Random) -> Drawn:
    """Draw images from every class in turn, as long as it has any."""
    left = {label: chance.sample(files, len(files)) for label, files in by_class.items()}
    taken: Drawn = []
    while len(taken) < count and any(left.values()):
        for label in chance.sample(sorted(left), len(left)):
            if left[label] and len(taken) < count:
                taken.append((left[label].pop(), label))
    return taken


def by_class_of(rows: Drawn) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file, label in rows:
        found.setdefault(label, []).append(file)
    return found


def prepare(photos: Path, folder: Path, counts: Sequence[int], seeds: int) -> None:
    """Write the copies and a manifest for every count and seed."""
    listed = [(file, place.name) for place in sorted(photos.iterdir()) if place.is_dir() for file in _images(place)]
    every = {label: files for label, files in by_class_of(listed).items() if len(files) >= LEAST}
    if not every:
        sys.exit(f"no class in {photos} has {LEAST} images")
    chance = random.Random(0)
    test = drawn(every, TEST, chance)
    tested = {file for file, _ in test}
    rest = {label: [file for file in files if file not in tested] for label, files in every.items()}
    pool = by_class_of(drawn(rest, POOL, chance))
    for count in counts:
        for seed in range(seeds):
            train = drawn(pool, count, random.Random(1_000 + seed))
            rows = [(file, label, "train") for file, label in train] + [(file, label, "test") for file, label in test]
            _write(folder, manifest(folder, count, seed), rows)


def manifest(folder: Path, count: int, seed: int) -> Path:
    return folder / f"n{count}-s{seed}.csv"


def _images(place: Path) -> list[Path]:
    return sorted(file for file in place.iterdir() if file.suffix.lower() in SUFFIXES)


def _write(folder: Path, place: Path, rows: Sequence[tuple[Path, str, str]]) -> None:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    with place.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(("path", "label", "split"))
        for source, label, split in rows:
            copy = Path("images") / f"{label}-{source.stem}.jpg"
            if not (folder / copy).exists():
                _shrink(source, folder / copy)
            lines.writerow((copy, label, split))


def _shrink(source: Path, copy: Path) -> None:
    with Image.open(source) as opened:
        image = opened.convert("RGB")
    scale = min(1.0, SHORTER_SIDE / min(image.size))
    size = round(image.width * scale), round(image.height * scale)
    image.resize(size, Image.Resampling.BICUBIC).save(copy, quality=88)


def hog_accuracy(place: Path) -> float:
    """Train an SVM on histograms of oriented gradients, and return its accuracy on the test images."""
    try:
        from skimage.feature import hog
        from sklearn.model_selection import GridSearchCV
        from sklearn.svm import SVC
    except ImportError as error:
        sys.exit(f"{error}; pip install scikit-image scikit-learn")
    features: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    labels: dict[str, list[str]] = {"train": [], "test": []}
    with place.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            with Image.open(place.parent / row["path"]) as image:
                pixels = np.asarray(image.convert("RGB").resize((128, 128), Image.Resampling.BILINEAR))
            features[row["split"]].append(
                hog(pixels, orientations=9, pixels_per_cell=(16, 16), cells_per_block=(2, 2), channel_axis=-1)
            )
            labels[row["split"]].append(row["label"])
    grid = [{"kernel": ["rbf"], "C": [1, 10, 100]}, {"kernel": ["linear"], "C": [0.1, 1, 10]}]
    search = GridSearchCV(SVC(), grid, cv=3).fit(np.stack(features["train"]), labels["train"])
    return float(search.score(np.stack(features["test"]), labels["test"]))


def vitrail_accuracy(place: Path, seed: int, device: str) -> float:
    """Train as the command does, and return the accuracy on the test images."""
    import vitrail

    run = vitrail.train(place, changes=[f"seed={seed}"], folder=place.with_suffix(""), device=device)
    return run.metrics.top1


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of those that read images for it and have ended."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[300, 500, 1_000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=("hog", "vitrail"))
    asked = parser.parse_args()
    prepare(asked.photos, asked.folder, asked.images, asked.seeds)
    for count in asked.images:
        reached: dict[str, list[float]] = {}
        for seed in range(asked.seeds):
            place = manifest(asked.folder, count, seed)
            for contestant in ("hog", "vitrail") if asked.only is None else (asked.only,):
                began = _cpu_seconds()
                top1 = hog_accuracy(place) if contestant == "hog" else vitrail_accuracy(place, seed, asked.device)
                seconds = _cpu_seconds() - began
                found = {"contestant": contestant, "images": count, "seed": seed, "top1": top1, "cpu_s": seconds}
                print(json.dumps(found), flush=True)
                reached.setdefault(contestant, []).append(top1)
        for contestant, all_of in reached.items():
            print(f"{count:,} images, {contestant}: {np.mean(all_of):.1%}, mean of {len(all_of)} seeds", flush=True)


if __name__ == "__main__":
    main()
