"""Data loading throughput: ours vs. torchvision's and timm's loaders, alternating in one run.

    python benchmarks/loader.py --photos photos.tar

Each contender reads the same JPEG files with the same transforms: an inception crop to 224, a flip, with and without
RandAugment (2 operations of magnitude 9), in one thread of one process. torchvision and timm give normalised float32
tensors; ours gives uint8, which is normalised on the device, and in the rows "normalised" on the same core. The
numbers are images/s of one core; the ratios compare passes that ran in turns. `--photos` is a folder
of images or a tar of them.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.peers import import_peer

from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.randaugment import RandAugment
from vitrail.data.batches import Training, training_batches
from vitrail.data.cache import CacheSize, cached
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.data.sources.folders import open_folder
from vitrail.data.sources.source import Source
from vitrail.data.stream import Stream

SIZE, BATCH = 224, 32
PREPROCESS = Preprocess(size=(SIZE, SIZE), mean=IMAGENET_MEAN, std=IMAGENET_STD)
Passes = dict[str, Callable[[], int]]


def ours(source: Source, augmented: bool, normalised: bool = False) -> Callable[[], int]:
    augmentation = Augmentation(randaugment=RandAugment(layers=2, magnitude=9) if augmented else None)
    data = Training(source, Stream(len(source), BATCH), PREPROCESS, augmentation)
    steps = len(source) // BATCH
    state = {"step": 0}

    def run() -> int:
        start = state["step"]
        state["step"] += steps
        for batch in training_batches(data, start, start + steps, workers=0):
            if normalised:
                PREPROCESS.normalise(batch.pixels)
        return steps * BATCH

    return run


def torchvision(folder: Path, augmented: bool) -> Callable[[], int]:
    transforms, datasets = import_peer("torchvision.transforms"), import_peer("torchvision.datasets")
    parts = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    parts += [transforms.RandAugment(2, 9)] if augmented else []
    parts += [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    data = datasets.ImageFolder(str(folder), transforms.Compose(parts))
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, drop_last=True)
    return lambda: sum(len(pixels) for pixels, _ in loader)


def timm(folder: Path, augmented: bool) -> Callable[[], int]:
    module = import_peer("timm.data")
    loader = module.create_loader(
        module.create_dataset("", str(folder)),
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH,
        is_training=True,
        use_prefetcher=False,
        auto_augment="rand-m9-n2" if augmented else None,
        interpolation="bilinear",
        color_jitter=0.0,
        num_workers=0,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
    return lambda: sum(len(pixels) for pixels, _ in loader)


def measured(passes: Passes, repeats: int) -> dict[str, list[float]]:
    """Run the contenders in turns; return images per core-second for every turn."""
    for run in passes.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(repeats):
        for name, run in passes.items():
            start = time.process_time()
            count = run()
            rates[name].append(count / (time.process_time() - start))
    return rates


def report(title: str, rates: dict[str, list[float]]) -> None:
    for name, own in rates.items():
        ratios = [mine / other for mine, other in zip(own, rates["torchvision"], strict=True)]
        print(f"| {title} | {name} | {statistics.median(own):.0f} | {statistics.median(ratios):.2f} |", flush=True)


def unpacked(place: Path, folder: Path) -> list[Path]:
    if place.is_file():
        with tarfile.open(place) as tar:
            tar.extractall(folder, filter="data")
        place = folder
    return sorted(path for path in place.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))


def laid_out(photos: list[Path], folder: Path, copies: int, megapixels: float | None) -> Path:
    """Copy photos into two class folders, enlarged if requested."""
    for number in range(copies * len(photos)):
        photo = photos[number % len(photos)]
        target = folder / f"class{number % 2}" / f"{number:05d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        if megapixels is None:
            shutil.copy(photo, target)
            continue
        with Image.open(photo) as image:
            grow = (megapixels * 1e6 / (image.width * image.height)) ** 0.5
            size = round(image.width * grow), round(image.height * grow)
            image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(target, "JPEG", quality=90)
    return folder


def contenders(folder: Path, augmented: bool) -> Passes:
    return {
        "torchvision": torchvision(folder, augmented),
        "timm": timm(folder, augmented),
        "vitrail": ours(open_folder(folder), augmented),
        "vitrail, normalised": ours(open_folder(folder), augmented, normalised=True),
    }


def worker_memory(folder: Path) -> None:
    """Print the peak private memory of one worker, each loader in its own process."""
    for name in ("torchvision", "vitrail"):
        done = subprocess.run(
            [sys.executable, __file__, "--worker", name, "--photos", str(folder)],
            capture_output=True,
            text=True,
            check=True,
        )
        print(f"{name}: one worker adds {float(done.stdout.split()[-1]):.0f} MiB", flush=True)


def one_worker(name: str, folder: Path) -> None:
    """Read the folder with one worker, and print its peak private memory."""
    peak = 0.0
    for _ in _worker_batches(name, folder):
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        for child in children:
            lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
            own = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
            peak = max(peak, own / 1024)
    print(peak)


def _worker_batches(name: str, folder: Path) -> Iterator[object]:
    if name == "vitrail":
        source = open_folder(folder)
        data = Training(source, Stream(len(source), BATCH), PREPROCESS, Augmentation())
        yield from training_batches(data, 0, 12, workers=1)
        return
    transforms, datasets = import_peer("torchvision.transforms"), import_peer("torchvision.datasets")
    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    data = datasets.ImageFolder(str(folder), transforms.Compose([*steps, transforms.Normalize((0.5,) * 3, (0.5,) * 3)]))
    for _ in range(4):
        yield from torch.utils.data.DataLoader(data, BATCH, num_workers=1, drop_last=True, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--photos", type=Path, required=True, help="a folder of JPEGs, or a tar of them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--large", type=int, default=32, help="number of images (at least 32) to enlarge to 12 megapixels"
    )
    parser.add_argument("--worker", choices=("torchvision", "vitrail"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        one_worker(options.worker, options.photos)
        return
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        photos = unpacked(options.photos, place / "photos")
        plain = laid_out(photos, place / "plain", 1, None)
        print(f"{len(photos)} photos, one thread of {os.cpu_count()} cores")
        print("| images | loader | images/s per core | × torchvision |\n|---|---|---|---|")
        report("crop, flip", measured(contenders(plain, augmented=False), options.repeats))
        report("crop, flip, RandAugment", measured(contenders(plain, augmented=True), options.repeats))
        kept = cached(open_folder(plain), CacheSize(256), folder=place / "cache")
        passes = {
            "torchvision": torchvision(plain, False),
            "vitrail, cache": ours(kept, False),
            "vitrail, cache, normalised": ours(kept, False, normalised=True),
        }
        report("crop, flip", measured(passes, options.repeats))
        large = laid_out(photos[: options.large], place / "large", 1, 12)
        report("12 megapixels, crop, flip", measured(contenders(large, augmented=False), options.repeats))
        worker_memory(plain)


if __name__ == "__main__":
    main()
