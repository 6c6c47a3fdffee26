"""Training on few images: `vitrail train` with its defaults on 300, 500 and 1,000 images, compared with HOG and an SVM.

    pip install scikit-image scikit-learn
    python benchmarks/few_images.py sign-language-digits/ few/signs/
    python benchmarks/few_images.py PlantVillage/ few/plants/ --images 300 --only hog

The first folder has one subfolder per class. 1,000 test images are drawn once, for both methods and all runs; training
images are drawn from the rest by seed, balanced over classes. Copies with a shorter side of at most 144 pixels, and a
manifest for each run, are written to the second folder and reused. HOG + SVM trains on all training images (kernel and
C by 3-fold cross-validation); `vitrail train` uses a tenth of them for validation.
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
"""Test images, pool of training images, and minimum number of images per class."""
SHORTER_SIDE = 144
SUFFIXES = (".jpg", ".jpeg", ".png")

Samples = list[tuple[Path, str]]


def draw(by_class: Mapping[str, Sequence[Path]], count: int, rng: random.Random) -> Samples:
    """Draw images from the classes in turn, as long as they last."""
    left = {label: rng.sample(files, len(files)) for label, files in by_class.items()}
    samples: Samples = []
    while len(samples) < count and any(left.values()):
        for label in rng.sample(sorted(left), len(left)):
            if left[label] and len(samples) < count:
                samples.append((left[label].pop(), label))
    return samples


def by_class_of(rows: Samples) -> dict[str, list[Path]]:
    by_class: dict[str, list[Path]] = {}
    for file, label in rows:
        by_class.setdefault(label, []).append(file)
    return by_class


def prepare(photos: Path, folder: Path, counts: Sequence[int], seeds: int) -> None:
    """Write the image copies, and a manifest for every count and seed."""
    listed = [(file, place.name) for place in sorted(photos.iterdir()) if place.is_dir() for file in _images(place)]
    every = {label: files for label, files in by_class_of(listed).items() if len(files) >= LEAST}
    if not every:
        sys.exit(f"no class in {photos} has {LEAST} images")
    rng = random.Random(0)
    test = draw(every, TEST, rng)
    tested = {file for file, _ in test}
    rest = {label: [file for file in files if file not in tested] for label, files in every.items()}
    pool = by_class_of(draw(rest, POOL, rng))
    for count in counts:
        for seed in range(seeds):
            train = draw(pool, count, random.Random(1_000 + seed))
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
    """Train with the defaults of `vitrail train`, and return the accuracy on the test images."""
    import vitrail

    run = vitrail.train(place, changes=[f"seed={seed}"], folder=place.with_suffix(""), device=device)
    return run.metrics.headline.value or 0.0


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its finished workers."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[300, 500, 1_000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=("hog", "vitrail"))
    args = parser.parse_args()
    prepare(args.photos, args.folder, args.images, args.seeds)
    for count in args.images:
        reached: dict[str, list[float]] = {}
        for seed in range(args.seeds):
            place = manifest(args.folder, count, seed)
            for method in ("hog", "vitrail") if args.only is None else (args.only,):
                start = _cpu_seconds()
                top1 = hog_accuracy(place) if method == "hog" else vitrail_accuracy(place, seed, args.device)
                seconds = _cpu_seconds() - start
                row = {"method": method, "images": count, "seed": seed, "top1": top1, "cpu_s": seconds}
                print(json.dumps(row), flush=True)
                reached.setdefault(method, []).append(top1)
        for method, values in reached.items():
            print(f"{count:,} images, {method}: {np.mean(values):.1%}, mean of {len(values)} seeds", flush=True)


if __name__ == "__main__":
    main()
