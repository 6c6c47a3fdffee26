"""Bulk prediction on Ray with 1, 2, … workers of one core each, compared with one process.

    python benchmarks/ray_scaling.py photos/ --workers 1 2 --repeats 3

All contenders alternate in one run, with the same random weights and the same photos, which a manifest lists as often
as needed. A rate counts the images between the first and the last chunk, so it excludes starting Ray and loading the
model; that time is printed on its own. On a busy machine, look at the CPU time per image, which other programs change
less: if it does not grow with the workers, free cores give a proportional speedup. Reading and decoding alone, on one
core, and the bytes of a photo are measured too: a calculation for many GPUs needs them (docs/guides/bulk.md).
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import torch

import vitrail
from vitrail.data.inputs import fitted
from vitrail.inference.listing import list_items
from vitrail.inference.ray_cluster import connected

Rate = tuple[float, float, float]
"""Images/s after the first chunk, the CPU milliseconds per image of the workers, and the seconds to the first chunk."""


class Clock:
    """Receives the progress of a job."""

    def __init__(self, cpu_seconds: Callable[[], float]) -> None:
        self.cpu_seconds, self.started = cpu_seconds, time.perf_counter()
        self.seen: list[tuple[int, float, float]] = []

    def __call__(self, _stage: str, done: int, _total: int | None) -> None:
        """Note the time."""
        self.seen.append((done, time.perf_counter(), self.cpu_seconds()))

    def rate(self) -> Rate:
        """Return the rate."""
        (first, start, used), (last, end, used_in_all) = self.seen[0], self.seen[-1]
        images = last - first
        return images / (end - start), 1000 * (used_in_all - used) / images, start - self.started


def workers_cpu_seconds() -> float:
    """Return the CPU time of the Ray workers that run in this folder."""
    here, ticks = Path.cwd(), []
    for process in Path("/proc").iterdir():
        try:
            if (process / "cmdline").read_bytes().startswith(b"ray::MapWorker") and (
                process / "cwd"
            ).readlink() == here:
                user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
                ticks.append(int(user) + int(system))
        except OSError:  # it has ended, or is not ours
            continue
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def in_one_process(bundle: vitrail.Bundle, listed: Path, output: Path, chunk: int, threads: int) -> Rate:
    torch.set_num_threads(threads)
    clock = Clock(time.process_time)
    vitrail.predict(
        bundle, listed, output=output.with_suffix(".parquet"), batch=chunk, device="cpu", overwrite=True,
        workers=0 if threads == 1 else None, on_progress=clock,
    )  # fmt: skip
    return clock.rate()


def on_ray(bundle: vitrail.Bundle, listed: Path, output: Path, chunk: int, workers: int) -> Rate:
    import ray

    clock = Clock(workers_cpu_seconds)
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with connected("local"):  # uses the cluster that was just started
        options = vitrail.RayOptions(workers=workers, chunk=chunk)
        vitrail.predict(
            bundle, listed, output=output, batch=chunk, device="cpu", overwrite=True, ray=options, on_progress=clock
        )
    ray.shutdown()
    return clock.rate()


def decoding(listed: Path, preprocess: vitrail.Preprocess, images: int) -> tuple[float, float]:
    """Return the images that a CPU second reads, decodes and resizes, and the mean bytes of a file."""
    items = list(itertools.islice(list_items([str(listed)]), images))
    start = time.process_time()
    for item in items:
        fitted(item, preprocess)
    seconds = time.process_time() - start
    return len(items) / seconds, statistics.mean(os.stat(item.file).st_size for item in items)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", help="a folder of photos")
    parser.add_argument("--model", default="Ti/16")
    parser.add_argument("--images", type=int, default=512, help="number of images per turn")
    parser.add_argument("--chunk", type=int, default=16, help="images per chunk, and per batch")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args()
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    torch.manual_seed(0)
    bundle = vitrail.Bundle(vitrail.create(options.model), vitrail.Preprocess(size=(224, 224)))
    photos = [os.path.abspath(os.fsdecode(item.name)) for item in list_items([options.photos])]
    with tempfile.TemporaryDirectory() as temporary:
        listed, folder = Path(temporary) / "photos.csv", Path(temporary)
        rows = itertools.islice(itertools.cycle(photos), options.images)
        listed.write_text("\n".join(["path", *rows]) + "\n")
        contenders: dict[str, Callable[[], Rate]] = {}
        for count in options.workers:
            contenders[f"one process, {count} threads"] = lambda count=count: in_one_process(  # type: ignore[misc]
                bundle, listed, folder / f"process-{count}", options.chunk, count
            )
            contenders[f"Ray, {count} workers of one core"] = lambda count=count: on_ray(  # type: ignore[misc]
                bundle, listed, folder / f"ray-{count}", options.chunk, count
            )
        turns: dict[str, list[Rate]] = {name: [] for name in contenders}
        for turn in range(options.repeats):
            for name, run in list(contenders.items())[:: 1 if turn % 2 else -1]:
                turns[name].append(run())
                load = os.getloadavg()[0]
                rate, cpu, _ = turns[name][-1]
                print(f"turn {turn + 1}: {name}: {rate:.1f} images/s, {cpu:.1f} CPU ms, load {load:.1f}", flush=True)
        tables = [pq.read_table(folder / f"ray-{count}") for count in options.workers]
        alone = pq.read_table(folder / f"process-{options.workers[0]}.parquet")
        equal = all(table["classes"].equals(alone["classes"]) for table in tables)
        torch.set_num_threads(1)
        decode, size = decoding(listed, bundle.preprocess, options.images)
    report(turns, options.model, equal, decode, size, options.json)


def report(
    turns: dict[str, list[Rate]], model: str, equal: bool, decode: float, size: float, target: Path | None
) -> None:
    first = next(iter(turns))
    print(f"\n| {model} | images/s | ratio to {first} | CPU ms/image | seconds to the first chunk |")
    print("|---|---|---|---|---|")
    numbers = {}
    for name, rates in turns.items():
        ratio = statistics.median(own[0] / base[0] for own, base in zip(rates, turns[first], strict=True))
        rate, cpu, begin = (statistics.median(values) for values in zip(*rates, strict=True))
        numbers[name] = {"images_per_second": rate, "ratio": ratio, "cpu_ms": cpu, "seconds_to_first_chunk": begin}
        print(f"| {name} | {rate:.1f} | {ratio:.2f} | {cpu:.1f} | {begin:.1f} |")
    print(f"\nclasses equal: {equal}; decoding: {decode:.0f} images per CPU second; a photo has {size / 1000:.0f} kB")
    if target is not None:
        target.write_text(json.dumps({"model": model, "rows": numbers, "decode": decode, "bytes": size}, indent=1))


if __name__ == "__main__":
    main()
