"""Reading tar shards over HTTP: ours vs. webdataset on the same shards and server, and vs. local files, in one run.

    python benchmarks/remote.py --images 4000 --repeats 5

A server with range requests runs on loopback, in its own process. The shards hold synthetic JPEGs. Contenders read all
images once per pass, in turns: as bytes, and decoded. Ours reads them in random order, as training does; webdataset
streams the shards in order, its fastest way. "with the index" starts from nothing: it makes the index, which fills the
cache, then reads. "empty cache" has the index only, as if the blocks had been removed; "later epochs" has both.
`--json FILE` writes the rows. Also printed: CPU time per image of the reading processes, which other load changes less.
"""

import argparse
import io
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.peers import import_peer
from tests.support.remote_servers import FileServer

from vitrail.data.decode import open_image
from vitrail.data.remote.block_cache import block_cache
from vitrail.data.sources.index_files import cache_folder
from vitrail.data.sources.opening import open_source
from vitrail.data.sources.source import Source

BATCH = 64


def main() -> None:
    options = parse()
    root = Path(tempfile.mkdtemp(prefix="remote-"))
    os.environ["VITRAIL_CACHE"] = str(root / "cache")
    try:
        size = write_shards(root / "shards", options.images, options.shards, options.side)
        with serving(root / "shards") as url:
            rows = measure(root, url, options)
    finally:
        shutil.rmtree(root)
    print(f"{options.images:,} JPEGs of {size / options.images / 1000:.0f} kB in {options.shards} shards")
    print(f"{options.workers} workers, {options.repeats} passes, medians of images/s and of ratios")
    for row in rows:
        ratio = f"{row['vs_webdataset']:.2f}× webdataset" if row["vs_webdataset"] else ""
        speed = f"{row['images_per_second']:10,.0f} {row['cpu_ms']:8.2f} ms CPU"
        print(f"{row['work']:8} {row['contender']:32} {speed}  {ratio}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    return parser.parse_args()


def write_shards(folder: Path, images: int, shards: int, side: int) -> int:
    """Write shards of JPEGs; return the size of the images."""
    folder.mkdir()
    generator, contents = np.random.default_rng(0), []
    for _ in range(50):
        small = Image.fromarray(generator.integers(0, 256, (side // 4, side // 4, 3), np.uint8))
        stream = io.BytesIO()
        small.resize((side, side)).save(stream, "JPEG", quality=95)
        contents.append(stream.getvalue())
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:04}.tar", "w") as tar:
            for number in range(shard, images, shards):
                for suffix, content in (("jpg", contents[number % 50]), ("cls", str(number % 10).encode())):
                    entry = tarfile.TarInfo(f"{number:06}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return sum(len(contents[number % 50]) for number in range(images))


class serving:  # noqa: N801 - used as a function
    """Serve a folder from another process; the context is its URL."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.mine, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(folder, theirs), daemon=True)

    def __enter__(self) -> str:
        self.process.start()
        return str(self.mine.recv())

    def __exit__(self, *_: object) -> None:
        self.mine.send("stop")
        self.process.join()


def _serve(folder: Path, connection: Connection) -> None:
    with FileServer(folder).running() as server:
        connection.send(server.url)
        connection.recv()


def measure(root: Path, url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    pattern = f"{{0000..{options.shards - 1:04}}}.tar"
    urls = [f"{url}/{shard:04}.tar" for shard in range(options.shards)]
    local = open_source(f"{root / 'shards'}/{pattern}")
    remote = open_source(f"{url}/{pattern}")
    rows = []
    for work in ("bytes", "decoded"):
        place, workers, images = f"{url}/{pattern}", options.workers, options.images
        passes: dict[str, Callable[[], Cost]] = {
            "webdataset": partial(timed, streamed(urls, work, workers), images),
            "ours, first epoch with the index": partial(from_nothing, place, work, options),
            "ours, empty cache": partial(from_empty_cache, remote, work, options),
            "ours, later epochs": partial(timed, shuffled(remote, work, workers), images),
            "ours, local files": partial(timed, shuffled(local, work, workers), images),
        }
        costs: dict[str, list[Cost]] = {name: [] for name in passes}
        for _ in range(options.repeats):
            for name, run in passes.items():
                costs[name].append(run())
        rows += [row_of(work, name, costs, options.images) for name in costs]
    return rows


class Cost(NamedTuple):
    """What a pass took."""

    seconds: float
    cpu_seconds: float
    """Of this process and its workers, without the server."""


def row_of(work: str, name: str, costs: dict[str, list[Cost]], images: int) -> dict[str, Any]:
    ratios = [peer.seconds / own.seconds for peer, own in zip(costs["webdataset"], costs[name], strict=True)]
    return {
        "work": work,
        "contender": name,
        "images_per_second": images / statistics.median(cost.seconds for cost in costs[name]),
        "cpu_ms": 1000 * statistics.median(cost.cpu_seconds for cost in costs[name]) / images,
        "vs_webdataset": None if name == "webdataset" else statistics.median(ratios),
    }


def timed(loader: Callable[[], Iterator[Any]], images: int) -> Cost:
    began, cpu = time.perf_counter(), sum(os.times()[:4])
    count = sum(len(sizes) for sizes in loader())
    assert count == images, (count, images)
    return Cost(time.perf_counter() - began, sum(os.times()[:4]) - cpu)


def from_nothing(place: str, work: str, options: argparse.Namespace) -> Cost:
    shutil.rmtree(cache_folder())
    return timed(lambda: shuffled(open_source(place), work, options.workers)(), options.images)


def from_empty_cache(remote: Source, work: str, options: argparse.Namespace) -> Cost:
    shutil.rmtree(block_cache().folder)
    return timed(shuffled(remote, work, options.workers), options.images)


def use(content: bytes, work: str) -> int:
    return len(content) if work == "bytes" else open_image(content).pixels(3).nbytes


class Images(Dataset[int]):
    """The sizes of a source's images, after they were read."""

    def __init__(self, source: Source, work: str) -> None:
        self.source, self.work = source, work

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> int:
        content = self.source.read(index)
        assert isinstance(content, bytes)
        return use(content, self.work)


def shuffled(source: Source, work: str, workers: int) -> Callable[[], Iterator[Any]]:
    return lambda: iter(DataLoader(Images(source, work), BATCH, shuffle=True, num_workers=workers))


def streamed(urls: list[str], work: str, workers: int) -> Callable[[], Iterator[Any]]:
    wds = import_peer("webdataset")
    data = wds.WebDataset(urls, shardshuffle=False, empty_check=False).map(lambda sample: use(sample["jpg"], work))
    return lambda: iter(DataLoader(data, BATCH, num_workers=workers))


if __name__ == "__main__":
    main()
