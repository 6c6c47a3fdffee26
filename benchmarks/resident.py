"""Throughput of on-device augmentation (`data.on_device = true`).

    python benchmarks/resident.py --device cuda --workers 4
    python benchmarks/resident.py --device cuda --side 224 --images 300000 --batch 512     45 GB of images

Random images of 32×32, of which the first ones repeat if they are many, batches of 1,024, padded crops, flips,
RandAugment (2 operations of magnitude 9), mixup and CutMix. It says how many images/s one core draws and packs; how
long reading them takes; how many images/s the device makes of what was drawn before; for how long this process is busy
with a batch (on a GPU with Python and launches, on a CPU also with the pixels), and with how many operations of torch;
how many images come out when workers draw; and, on a GPU, how long a caller waits for a batch between steps that keep
the device busy for `--step` milliseconds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.augmentation.randaugment import RandAugment
from vitrail.data.batches import Training, default_workers
from vitrail.data.preprocess import Preprocess
from vitrail.data.resident import Planned, Planning, Resident
from vitrail.data.sources.source import Pixels
from vitrail.data.stream import Stream

CLASSES = tuple("abcdefghij")
DIFFERENT = 2**23
"""Most pixels of different images on the host."""


class Launches(TorchDispatchMode):
    """Counts operations that compute something: all but views and empty allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(args.alias_info is not None and not args.alias_info.is_write for args in func._schema.returns)
        self.count += not view and "empty" not in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


class Repeated:
    """A source of images that repeat, so that the host needs little memory."""

    classes = CLASSES

    def __init__(self, images: Pixels, count: int) -> None:
        self.images, self.labels = images, np.arange(count, dtype=np.int64) % len(CLASSES)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Return the name of an image."""
        return f"image {index}"

    def read(self, index: int) -> Pixels:
        """Return the pixels of an image."""
        return np.asarray(self.images[index % len(self.images)])

    def stamp(self, index: int) -> tuple[int, int]:
        """Return what identifies an image."""
        return index, 0


def training(operations: Literal["usual", "big_vision"], side: int, batch: int, images: int) -> Training:
    augmentation = Augmentation(crop="padded", randaugment=RandAugment(layers=2, magnitude=9, operations=operations))
    different = min(images, max(1, DIFFERENT // side**2))
    source = Repeated(np.random.default_rng(0).integers(0, 256, (different, side, side, 3), np.uint8), images)
    mixing = Mixing(mixup=0.8, cutmix=1.0)
    return Training(source, Stream(images, batch), Preprocess(size=(side, side)), augmentation, mixing)


def seconds(work: Callable[[int], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the median time of `work`, after two warm-up calls."""
    taken = []
    for number in range(repeats + 2):
        start = clock()
        work(number)
        taken.append(clock() - start)
    return statistics.median(taken[2:])


def finished(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def by_workers(resident: Resident, batches: int) -> float:
    """Return the seconds per batch without a consumer; prefetched batches at the start are not counted."""
    first = 2 * resident.workers + 4
    with closing(resident.batches(0, first + batches)) as coming:
        for _ in range(first):
            next(coming)
        finished(resident.device)
        start = time.perf_counter()
        for _ in range(batches):
            next(coming)
        finished(resident.device)
        return (time.perf_counter() - start) / batches


def waits(resident: Resident, batches: int, step: float) -> tuple[float, float]:
    """Return how long a caller waits for a batch while the device is busy, and the time per step."""
    left, right = torch.randn(2, 4096, 4096, device=resident.device, dtype=torch.bfloat16).unbind()

    def compute(matmuls: int) -> None:
        for _ in range(matmuls):
            torch.mm(left, right)
        finished(resident.device)

    matmuls = max(1, round(50 * step / seconds(lambda _: compute(50), 5)))
    waited, whole = [], []
    with closing(resident.batches(0, batches)) as coming:
        for _ in range(batches):
            start = time.perf_counter()
            next(coming)
            waited.append(time.perf_counter() - start)
            compute(matmuls)
            whole.append(time.perf_counter() - start)
    later = batches // 5
    return statistics.median(waited[later:]), statistics.median(whole[later:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--operations", default="usual", choices=["usual", "big_vision"])
    parser.add_argument("--side", type=int, default=32, help="height and width of the images")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--step", type=float, default=20, help="step time in milliseconds")
    args = parser.parse_args()
    device, repeats = torch.device(args.device), args.repeats
    data, batch = training(args.operations, args.side, args.batch, args.images), args.batch

    drawing = Planning(data)
    core = seconds(drawing.__getitem__, repeats, time.process_time)
    print(
        f"random draws and packing, one core: {batch / core:,.0f} images/s ({1e3 * core:.1f} ms per batch)", flush=True
    )

    start = time.perf_counter()
    resident = Resident(data, device, args.workers)
    finished(device)
    reading = time.perf_counter() - start
    print(f"{args.images:,} images, {resident.pixels.nbytes / 1e9:.1f} GB, read in {reading:.1f} s", flush=True)
    planned: list[Planned] = [drawing[step] for step in range(4)]

    def made(number: int) -> None:
        resident.make(planned[number % 4])
        finished(device)

    whole = seconds(made, repeats)
    print(
        f"augmentation on {device}, precomputed draws: {batch / whole:,.0f} images/s ({1e3 * whole:.2f} ms per batch)",
        flush=True,
    )

    with Launches() as launches:
        resident.make(planned[0])
    taken = []
    for number in range(repeats):
        finished(device)
        start = time.thread_time()
        resident.make(planned[number % 4])
        taken.append(time.thread_time() - start)
    busy = 1e3 * statistics.median(taken)
    print(f"host time per batch: {busy:.2f} ms, {launches.count} torch operations", flush=True)

    rate = by_workers(resident, max(20, 4 * repeats))
    print(f"end to end, {args.workers} workers: {batch / rate:,.0f} images/s", flush=True)
    results = {
        "images": args.images, "side": args.side, "gb": resident.pixels.nbytes / 1e9, "read_s": reading,
        "drawing": batch / core, "device": batch / whole, "images_per_second": batch / rate,
    }  # fmt: skip
    if device.type == "cuda":
        waited, step = waits(resident, max(20, 4 * repeats), args.step / 1e3)
        print(
            f"with steps of {args.step:.0f} ms: {1e3 * waited:.2f} ms waiting for a batch, {1e3 * step:.2f} ms per step"
        )
        results |= {"waited_ms": 1e3 * waited, "step_ms": 1e3 * step}
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": [results]}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
