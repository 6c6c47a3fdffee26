"""The cost of detecting corruption: standard library hashes, opening a bundle with and without its digest, stamps.

    python benchmarks/digest.py [--files 20000] [--repeats 3]

A ViT-B/16 in float32 (86.6 M parameters, 346 MB) is saved as a bundle. Reported is CPU time (independent of other load
on the machine), the minimum of several runs with the file in the page cache: of each hash over the file; of
`vitrail.load` with and without the digest in config.json; of saving; and of reading the size and time of every file in
a folder, as a run does when it starts.
"""

import argparse
import hashlib
import json
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

import vitrail
from vitrail.data.sources.folders import open_folder
from vitrail.data.sources.splits import split_source
from vitrail.training.stamps import check_stamps

HASHES = ("sha256", "sha1", "blake2b", "blake2s", "sha512", "sha3_256", "md5")
CHUNK = 1 << 20


def min_cpu_seconds(action: Callable[[], object], repeats: int) -> float:
    """Return the minimum CPU time of several runs."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        seconds.append(time.process_time() - start)
    return min(seconds)


def hashed(file: Path, name: str) -> str:
    """Hash a file as `vitrail.io.file_digest` does, with any hashlib algorithm."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, name).hexdigest()


def checksummed(file: Path, add: Callable[[bytes, int], int]) -> int:
    """Compute a zlib checksum of a file."""
    total = 0
    with file.open("rb", buffering=0) as content:
        while chunk := content.read(CHUNK):
            total = add(chunk, total)
    return total


def without_digest(bundle: Path) -> None:
    """Remove the digest from a bundle's config."""
    config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    del config["vitrail"]["weights_sha256"]
    (bundle / "config.json").write_text(json.dumps(config), encoding="utf-8")


def many_files(root: Path, files: int) -> None:
    """Write small files in two classes."""
    for number in range(files):
        folder = root / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:07}.jpg").write_bytes(b"\xff\xd8 not an image")


def benchmark(place: Path, files: int, repeats: int) -> None:
    """Run all measurements and print them."""
    torch.manual_seed(0)
    bundle = vitrail.Bundle(vitrail.create("B/16"), vitrail.Preprocess())
    print(f"saving: {min_cpu_seconds(lambda: bundle.save(place / 'm', overwrite=True), repeats):.2f} s")
    weights = place / "m" / "model.safetensors"
    print(f"file: {weights.stat().st_size / 1e6:.0f} MB")
    for name in HASHES:
        print(f"{name}: {min_cpu_seconds(lambda name=name: hashed(weights, name), repeats):.2f} s")  # type: ignore[misc]
    for name, add in (("crc32", zlib.crc32), ("adler32", zlib.adler32)):
        print(f"{name}: {min_cpu_seconds(lambda add=add: checksummed(weights, add), repeats):.2f} s")  # type: ignore[misc]
    print(f"vitrail.load, with digest: {min_cpu_seconds(lambda: vitrail.load(place / 'm'), repeats):.2f} s")
    without_digest(place / "m")
    print(f"vitrail.load, without digest: {min_cpu_seconds(lambda: vitrail.load(place / 'm'), repeats):.2f} s")
    many_files(place / "data", files)
    splits = split_source(open_folder(place / "data"))
    took = min_cpu_seconds(lambda: check_stamps(place, splits), repeats)
    print(f"stamps of {files:,} files: {took:.2f} s")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        benchmark(Path(folder), args.files, args.repeats)


if __name__ == "__main__":
    main()
