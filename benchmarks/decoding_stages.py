"""From JPEG files to predictions and gradients: what decoding on the GPU brings, stage by stage.

    python benchmarks/decoding_stages.py photos --make 20000 --from photos/
    python benchmarks/decoding_stages.py decode photos --sweep
    python benchmarks/decoding_stages.py read photos
    python benchmarks/decoding_stages.py predict photos
    python benchmarks/decoding_stages.py train photos
    python benchmarks/decoding_stages.py agree photos --bundle runs/pets/best

photos    make JPEGs of 500×375 from a folder of photographs
decode    nvImageCodec alone, by backends, batch and threads
read      the workers alone: files, headers, memory
predict   `vitrail predict`, decoded on the CPU and on the GPU
train     training, likewise
agree     compare the pixels and predictions of both

Every stage prints one line per contestant, as soon as it is measured, and `--json` appends it to a file. `--device
cpu` runs nvImageCodec's CPU backend, for a try without a GPU. Files are read once before they are timed, so they come
from the page cache.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.peers import import_peer, scramble

import vitrail
from vitrail.data import decoder_choice, gpu_decoding
from vitrail.data.batches import Batch, Evaluation, checked_batches, default_workers, evaluation_batches
from vitrail.data.decode import open_image
from vitrail.data.device_resize import evaluation_window
from vitrail.data.encoded import EncodedBatch, StoredJpeg, encoded, pack_images
from vitrail.data.gpu_batches import EncodedEvaluation, evaluation_output, gpu_evaluation_batches
from vitrail.data.gpu_decoding import GpuDecoder
from vitrail.data.packing import PackedArrays
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.opening import open_source
from vitrail.training.pipeline import FinishedStep
from vitrail.training.run import TrainingRun
from vitrail.training.train import train

BACKENDS = {
    "hardware": ("HW_GPU_ONLY",),
    "hardware, then GPU": ("HW_GPU_ONLY", "GPU_ONLY", "HYBRID_CPU_GPU"),
    "GPU": ("GPU_ONLY", "HYBRID_CPU_GPU"),
    "hybrid": ("HYBRID_CPU_GPU",),
}
PREPROCESS = Preprocess(size=(224, 224), resize="cover", resize_to=(256, 256), interpolation="bicubic")


# ── photos ──


def make_photos(folder: Path, count: int, sources: Sequence[Path], classes: int = 10, first: int = 0) -> None:
    """Write JPEGs of 500×375, quality 90, each a different part of a photograph, in folders of classes.

    With as many classes as photographs, the class of an image is its photograph. `first`: the number of the first
    image; images with other numbers are other parts.
    """
    opened = [Image.open(path).convert("RGB") for path in sources]
    opened = [image.resize((max(700, image.width), max(525, image.height))) for image in opened]
    for name in range(classes):
        (folder / str(name)).mkdir(parents=True, exist_ok=True)

    def write(number: int) -> None:
        rng = np.random.default_rng(number)
        image = opened[number % len(opened)]
        width = int(rng.integers(500, image.width + 1))
        height = min(image.height, width * 3 // 4)
        left, top = int(rng.integers(image.width - width + 1)), int(rng.integers(image.height - height + 1))
        part = image.resize((500, 375), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
        part.save(folder / str(number % classes) / f"{number:06}.jpg", quality=90)

    with ThreadPoolExecutor(default_workers()) as pool:
        list(pool.map(write, range(first, first + count)))


def noise_photos(folder: Path) -> list[Path]:
    """Write images of smooth noise, where there are no photographs."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        image = Image.fromarray(rng.integers(0, 256, (48, 64, 3), np.uint8)).resize(
            (1200, 900), Image.Resampling.BICUBIC
        )
        grain = rng.normal(0, 6, (900, 1200, 1))
        Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8)).save(folder / f"{seed}.jpg")
    return sorted(folder.iterdir())


# ── stages ──


class Rows:
    """Where measured lines are also written."""

    file: Path | None = None

    @classmethod
    def add(cls, name: str, **values: float) -> None:
        """Append a row to the file."""
        if cls.file is not None:
            with cls.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"name": name, **values}) + "\n")


def shown(name: str, speed: float, more: str = "", **values: float) -> None:
    """Print a line, and write its row."""
    print(f"{name:60} {speed:10,.0f} images/s{more}", flush=True)
    Rows.add(name, images_per_second=speed, **values)


def measured(name: str, work: Callable[[], int], seconds: float) -> float:
    """Print and return images/s of `work`, which returns how many images it did; the first call is not timed."""
    work()
    done, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds or not done:
        done += work()
    passed = time.perf_counter() - started
    shown(name, done / passed)
    return done / passed


def jpegs_of(paths: Sequence[Path]) -> list[StoredJpeg]:
    batch, memory = packed_of(paths)
    return batch.jpegs(memory)


def packed_of(paths: Sequence[Path]) -> tuple[EncodedBatch, torch.Tensor]:
    images = []
    for path in paths:
        image = open_image(path.read_bytes())
        one = encoded(image, evaluation_window(PREPROCESS, image.height, image.width), 3)
        assert one is not None, path
        images.append(one)
    arrays = PackedArrays()
    return pack_images(images, PREPROCESS.size, 3, arrays), arrays.memory()


def decode(files: Sequence[Path], device: torch.device, seconds: float, sweep: bool) -> None:
    """Measure the decoder alone, and with the resize."""
    decoder = GpuDecoder(device)
    for size in (64, 256, 512) if sweep else (256,):
        some = list(islice(cycle(files), size))
        batch, memory = packed_of(some)
        jpegs = batch.jpegs(memory)

        def alone(jpegs: list[StoredJpeg] = jpegs) -> int:
            assert all(image is not None for image in decoder.decode(jpegs))
            decoder.wait()
            return len(jpegs)

        def resized(batch: EncodedBatch = batch, memory: torch.Tensor = memory, size: int = size) -> int:
            decoder.pixels(batch, memory, evaluation_output(PREPROCESS), lambda *_: sys.exit("not decoded"))
            return size

        measured(f"decode, batch {size}", alone, seconds)
        measured(f"decode and resize, batch {size}", resized, seconds)
    some = list(islice(cycle(files), 256))
    decode_by_torchvision(some, device, seconds)
    if not sweep or device.type != "cuda":
        return
    jpegs = jpegs_of(some)
    for name, kinds in BACKENDS.items():
        for threads in (1, 2, 3):
            _measure_threads(name, kinds, threads, jpegs, device, seconds)


def decode_by_torchvision(files: Sequence[Path], device: torch.device, seconds: float) -> None:
    """Measure torchvision's decoder, which uses nvJPEG on a GPU."""
    name = f"torchvision decode_jpeg, batch {len(files)}, {device.type}"
    try:
        io = import_peer("torchvision.io")
        contents = [torch.from_numpy(np.fromfile(file, np.uint8)) for file in files]
        measured(name, lambda: len(io.decode_jpeg(contents, io.ImageReadMode.RGB, device=device)), seconds)
    except (ImportError, RuntimeError, AttributeError) as error:
        print(f"{name:60} not measured: {str(error).splitlines()[0]}", flush=True)


def _measure_threads(
    name: str, kinds: Iterable[str], threads: int, jpegs: list[StoredJpeg], device: torch.device, seconds: float
) -> None:
    """Measure some backends, with a decoder per thread."""
    decoders = [GpuDecoder(device) for _ in range(threads)]
    codec = decoders[0].codec
    for one in decoders:
        one.decoder = codec.Decoder(
            device_id=0,
            max_num_cpu_threads=gpu_decoding.CPU_THREADS,
            backends=[codec.Backend(getattr(codec.BackendKind, kind)) for kind in kinds],
        )
    failed = 0

    def work() -> int:
        nonlocal failed

        def one(decoder: GpuDecoder) -> int:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                missing = sum(image is None for image in decoder.decode(jpegs))
                decoder.wait()
            return missing

        with ThreadPoolExecutor(threads) as pool:
            failed += sum(pool.map(one, decoders))
        return threads * len(jpegs)

    measured(f"decode, batch 256, {name}, {threads} threads", work, seconds)
    if failed:
        print(f"    {failed} images were not decoded")


def read(folder: Path, workers: Sequence[int]) -> None:
    """Measure the workers alone."""
    source = open_source(folder)
    for count in workers:
        job = EncodedEvaluation(Evaluation(source, PREPROCESS, 256))
        started = time.perf_counter()
        done = sum(len(batch.good) for batch in checked_batches(job, range(len(job.data)), count, False, None))
        shown(f"read, {count} workers (with their start)", done / (time.perf_counter() - started))


def batches(folder: Path, device: torch.device, workers: int) -> None:
    """Measure evaluation batches, without a model."""
    data = Evaluation(open_source(folder), PREPROCESS, 256)
    made: dict[str, Callable[[], Iterator[Batch]]] = {
        "cpu": lambda: evaluation_batches(data, workers=workers, pin=device.type == "cuda"),
        "gpu": lambda: gpu_evaluation_batches(data, device, workers=workers),
    }
    for decoder, make in made.items():
        times, done = [], 0
        for batch in make():
            done += len(batch.labels)
            times.append((time.perf_counter(), done))
        shown(f"batches, decoded on the {decoder}, {workers} workers", _steady(times), batches=len(times))


def predict(folder: Path, name: str, device: str, workers: int, batch: int, precision: str) -> None:
    """Measure `vitrail.predict` with random weights, from the first row to the last."""
    bundle = model_of(name)
    for decode in ("cpu", "gpu"):
        times = list[tuple[float, int]]()

        def note(_: str, done: int, __: int | None, times: list[tuple[float, int]] = times) -> None:
            times.append((time.perf_counter(), done))

        with tempfile.TemporaryDirectory() as place:
            done = vitrail.predict(
                bundle, str(folder), output=Path(place) / "rows.jsonl", decode=decode, device=device, workers=workers,
                batch=batch, precision=precision, on_progress=note, on_plan=lambda text: print(f"    {text}"),
            )  # fmt: skip
        whole = done.images / done.seconds
        shown(
            f"predict {name}, {precision}, decoded on the {decode}", _steady(times),
            f", {whole:,.0f} images/s as a whole", whole=whole,
        )  # fmt: skip


def train_on(folder: Path, name: str, device: str, workers: int, batch: int, steps: int, tiny: bool) -> None:
    """Measure training with its defaults from scratch; the first half of the steps compiles and warms up."""
    for decode in ("cpu", "gpu"):
        with tempfile.TemporaryDirectory() as place:
            changes = [
                f"model.name={name}", "model.image_size=224", f"batch={batch}", f"steps={steps}", "evaluations=1",
                "data.val=0.02", "data.test=0.02", f"data.decode={decode}",
                *(("compile=true",) if device != "cpu" else ()),
                *(("model.depth=1", "model.width=48", "model.heads=3") if tiny else ()),
            ]  # fmt: skip
            with recorded() as times, contextlib.redirect_stdout(sys.stderr):
                train(folder, changes=changes, folder=Path(place) / "run", device=device, workers=workers, quiet=True)
        second = times[len(times) // 2 :]
        seconds = second[-1][0] - second[0][0]
        waited = sum(one for _, one in second[1:]) / seconds
        speed = batch * (len(second) - 1) / seconds
        more = f", waiting {waited:.0%} of the time"
        shown(f"train {name}, batch {batch}, decoded on the {decode}", speed, more, waiting=waited)


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[float, float]]]:
    """Record when each step of a run is logged, and how long it waited for images."""
    times: list[tuple[float, float]] = []
    log = TrainingRun.log

    def record(self: TrainingRun, finished: Iterable[FinishedStep]) -> None:
        steps = list(finished)
        log(self, steps)
        times.extend((time.perf_counter(), step.waited) for step in steps)

    TrainingRun.log = record  # type: ignore[method-assign]
    try:
        yield times
    finally:
        TrainingRun.log = log  # type: ignore[method-assign]


def agree(folder: Path, device: torch.device, workers: int, bundle: str | None) -> None:
    """Compare pixels, and the predictions of a trained model."""
    data = Evaluation(open_source(folder), PREPROCESS, 256, bad_files="skip")
    pairs = zip(
        evaluation_batches(data, workers=workers), gpu_evaluation_batches(data, device, workers=workers), strict=True
    )
    means, most, over = [], 0, 0.0
    for one, other in pairs:
        assert torch.equal(one.indices, other.indices.cpu())
        difference = (one.pixels.int() - other.pixels.cpu().int()).abs()
        means += difference.float().mean((1, 2, 3)).tolist()
        most, over = max(most, int(difference.max())), max(over, float((difference > 2).float().mean()))
    print(
        f"pixels of {len(means):,} images: {statistics.mean(means):.4f} grey levels apart on average, "
        f"{max(means):.3f} in the worst image, {most} at most; more than 2 in {over:.2%} of the worst batch"
    )
    Rows.add("pixels", images=len(means), mean_difference=statistics.mean(means), worst_image=max(means), largest=most)
    if bundle is None:
        return
    first, second = (
        vitrail.predict(
            bundle, str(folder), decode=decode, device=str(device), workers=workers, precision="float32", batch=256
        )
        for decode in ("cpu", "gpu")
    )
    pairs_of = [(a, b) for a, b in zip(first, second, strict=True) if a.error is None]
    changed = sum(a.fields()["classes"][0] != b.fields()["classes"][0] for a, b in pairs_of)
    print(f"top-1 predictions: {changed} of {len(pairs_of):,} changed ({1000 * changed / len(pairs_of):.2f} in 1,000)")
    right = sum(a.fields()["classes"][0] == Path(str(a.image)).parent.name for a, _ in pairs_of) / len(pairs_of)
    print(f"{right:.1%} of the predictions on the CPU are the name of the image's folder")
    Rows.add("top-1", images=len(pairs_of), changed=changed, accuracy=right)


# ── helpers ──


def _steady(times: Sequence[tuple[float, int]]) -> float:
    """Return images/s of the second half."""
    (start, before), (end, after) = times[len(times) // 2], times[-1]
    return (after - before) / max(end - start, 1e-9)


def model_of(name: str) -> vitrail.Bundle:
    model = vitrail.create(name, classes=1000)
    scramble(model)
    return vitrail.Bundle(model, PREPROCESS, tuple(map(str, range(1000))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["photos", "decode", "read", "batches", "predict", "train", "agree"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("photos"))
    parser.add_argument("--make", type=int, default=10_000)
    parser.add_argument("--from", dest="photographs", type=Path)
    parser.add_argument("--first", type=int, default=0, help="number of the first image to make")
    parser.add_argument("--by-photograph", action="store_true", help="a class per photograph instead of ten")
    parser.add_argument("--json", type=Path, help="append a row per line to this file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--model")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--bundle")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    Rows.file = chosen.json
    if device.type == "cpu":
        decoder_choice.DEVICES = ("cuda", "cpu")
    match chosen.stage:
        case "photos":
            found = [] if chosen.photographs is None else sorted(chosen.photographs.rglob("*.jpg"))
            found = found or noise_photos(chosen.folder.with_name("noise"))
            classes = len(found) if chosen.by_photograph else 10
            make_photos(chosen.folder, chosen.make, found, classes, chosen.first)
        case "decode":
            decode(sorted(chosen.folder.rglob("*.jpg"))[:2048], device, chosen.seconds, chosen.sweep)
        case "read":
            read(chosen.folder, sorted({chosen.workers, max(1, chosen.workers // 2)}))
        case "batches":
            batches(chosen.folder, device, chosen.workers)
        case "predict":
            name = chosen.model or "B/16"
            predict(chosen.folder, name, chosen.device, chosen.workers, chosen.batch, chosen.precision)
        case "train":
            train_on(
                chosen.folder, chosen.model or "S/16", chosen.device, chosen.workers, chosen.batch, chosen.steps,
                chosen.tiny,
            )  # fmt: skip
        case "agree":
            agree(chosen.folder, device, chosen.workers, chosen.bundle)


if __name__ == "__main__":
    main()
