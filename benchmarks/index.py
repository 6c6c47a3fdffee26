"""Time and memory to index a million images.

    python benchmarks/index.py [--files 1000000] [--classes 1000] [--folder PLACE]

Tiny files are generated, as a folder with one subfolder per class and as tar shards, and removed at the end. Each
measurement runs in a fresh process. Reported are the seconds to open the data (without imports) and the peak memory of
the process, for the first open and for the second, which reads the index from disk; `open_data` also splits the data
and builds the record of the splits. Targets for a million images: folder at most 60 s and 1 GiB, shards at most 120 s,
from the index at most 2 s.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path

MEASURE = """
import json, resource, sys, time
from vitrail.data.sources.opening import open_data, open_source
place, what = sys.argv[1:]
start = time.perf_counter()
source = (open_data(place).train.base if what == "open_data" else open_source(place))
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([len(source), len(source.classes), seconds, peak / (1024 if sys.platform == "linux" else 1024**2)]))
"""
CONTENT = b"\xff\xd8 not really an image"


def make_folder(root: Path, files: int, classes: int) -> None:
    for label in range(classes):
        folder = root / f"class_{label:04}"
        folder.mkdir(parents=True)
        for number in range(label, files, classes):
            with open(f"{folder}/image_{number:08}.jpg", "wb", buffering=0) as file:
                file.write(CONTENT)


def make_shards(root: Path, files: int, classes: int, *, shard: int = 10_000) -> None:
    root.mkdir()
    for first in range(0, files, shard):
        with tarfile.open(root / f"shard-{first // shard:05}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(first, min(first + shard, files)):
                for suffix, content in (("jpg", CONTENT), ("cls", str(number % classes).encode())):
                    info = tarfile.TarInfo(f"{number:08}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, BytesIO(content))


def wait_for_timestamps() -> None:
    """Wait: files modified just now are not indexed, because they could change again within the same timestamp."""
    time.sleep(4)


def benchmark(place: Path, cache: Path, what: str) -> tuple[int, int, float, float]:
    command = [sys.executable, "-c", MEASURE, str(place), what]
    environment = {**os.environ, "VITRAIL_CACHE": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    images, classes, seconds, peak = json.loads(done.stdout)
    return images, classes, seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where to generate the files (default: the temporary folder)")
    options = parser.parse_args()
    print(f"{options.files:,} files in {options.classes:,} classes")
    for kind, make in (("folder", make_folder), ("shards", make_shards)):
        with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
            place, cache = Path(temporary, "data"), Path(temporary, "cache")
            start = time.perf_counter()
            make(place, options.files, options.classes)
            wait_for_timestamps()
            print(f"{kind}: generated in {time.perf_counter() - start:.0f} s", flush=True)
            for title, what in (
                ("first", "open_source"),
                ("from the index", "open_source"),
                ("open_data", "open_data"),
            ):
                images, classes, seconds, peak = benchmark(place, cache, what)
                if (images, classes) != (options.files, options.classes):
                    raise SystemExit(f"{images} images in {classes} classes found")
                print(f"  {title:<16} {seconds:7.2f} s {peak:7.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
