"""From a folder of JPEGs to predictions, and to training steps: ours and a plain timm script, in one run.

    python benchmarks/end_to_end.py photos/ --images 9900 --json rows.json    a GPU: S/16 and B/16 at 224 px in bf16
    python benchmarks/end_to_end.py photos/ --only predict:S/16 train:S/16 --decode cpu gpu resident
    python benchmarks/end_to_end.py photos/ --tiny --device cpu --images 64   smoke test

Ours decodes on the CPU, on the GPU, or, to train, once: `resident` images stay on the device, with padded crops instead
of random ones.

predict   ours: `vitrail predict` to a JSONL file. timm: Pillow, timm's own transform, a DataLoader, softmax and top-5.
train     random crops and flips from the files, AdamW. Ours: the steps of `vitrail train` with compile. timm: its own
          loader, with prefetching on a GPU, and a plain loop.

Both compile the model and use bf16 autocast on a GPU, and `--workers` processes. `photos` are repeated up to
`--images` files. The first batch (loading, starting workers, compiling) is reported apart from the steady rate, which
does not count the first part of the job. Training also runs each step again with one batch that stays on the device:
`waiting` is the share of the time that this would have saved. `run_waiting` is what a run of ours would report.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.peers import import_peer

import vitrail
from vitrail.data import decoder_choice
from vitrail.data.batches import default_workers
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD
from vitrail.errors import ConfigError, VitrailError
from vitrail.runtime import Precision, Processes, autocast, choose_device
from vitrail.training.auto_batch import memory_limit
from vitrail.training.context import Job, open_splits, run_context
from vitrail.training.defaults import resolve_defaults
from vitrail.training.distributed import Ranks
from vitrail.training.pipeline import FinishedStep, PipelinedStepper
from vitrail.training.placement import place_images
from vitrail.training.plan import describe_data
from vitrail.training.recipe_files import recipe_for
from vitrail.training.run import start_run
from vitrail.training.step import reset_compiled

CLASSES = 10
WARM_UP = 0.3
"""The part of a job that the steady rate does not count."""
LR = 1e-4


class Size(NamedTuple):
    """A model and its images."""

    name: str
    width: int
    depth: int
    heads: int
    patch: int = 16
    image: int = 224


SIZES = {"S/16": Size("S/16", 384, 12, 6), "B/16": Size("B/16", 768, 12, 12)}
TINY = Size("tiny", 32, 2, 2, 8, 32)


class Setting(NamedTuple):
    """What a row is measured with."""

    size: Size
    photos: Path
    images: int
    batch: int
    steps: int
    workers: int
    device: torch.device
    precision: Precision
    compiled: bool
    scratch: Path


class SilentObserver:
    """Receives the progress of a run, and keeps none of it."""

    def note(self, text: str) -> None:
        """Ignore a message."""

    def step(self, row: dict[str, Any]) -> None:
        """Ignore the metrics of a step."""

    def validation(self, row: dict[str, Any]) -> None:
        """Ignore validation metrics."""


# ── prediction ──


def our_predictions(setting: Setting, decode: str) -> dict[str, Any]:
    """Predict with `vitrail.predict`, from a bundle with random weights."""
    size, folder = setting.size, setting.scratch / f"bundle-{setting.size.name.replace('/', '-')}"
    config = vitrail.ViTConfig(
        image_size=(size.image, size.image), patch_size=(size.patch, size.patch), width=size.width, depth=size.depth,
        heads=size.heads, classes=CLASSES, class_token="first", pool="cls", final_norm="before_pool",
    )  # fmt: skip
    cover = round(size.image / 0.9)
    preprocess = vitrail.Preprocess(
        size=(size.image, size.image), resize="cover", resize_to=(cover, cover), interpolation="bicubic",
        mean=IMAGENET_MEAN, std=IMAGENET_STD,
    )  # fmt: skip
    vitrail.Bundle(vitrail.create(config), preprocess, tuple(map(str, range(CLASSES)))).save(folder, overwrite=True)
    times: list[tuple[float, int]] = []
    vitrail.predict(
        folder,
        str(setting.photos),
        output=setting.scratch / "rows.jsonl",
        overwrite=True,
        batch=setting.batch,
        workers=setting.workers,
        device=str(setting.device),
        precision=setting.precision,
        on_progress=lambda _, done, __: times.append((time.perf_counter(), done)),
        decode=decode,
    )
    return {"images": times[-1][1], "marks": times}


class Files(Dataset[Any]):
    """The usual dataset around a timm transform."""

    def __init__(self, paths: Sequence[Path], transform: Any) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        """Return the model's input."""
        return self.transform(Image.open(self.paths[index]).convert("RGB"))


def timm_model(setting: Setting) -> nn.Module:
    """Return timm's model of this size, with random weights."""
    size = setting.size
    model: nn.Module = import_peer("timm.models.vision_transformer").VisionTransformer(
        img_size=size.image, patch_size=size.patch, embed_dim=size.width, depth=size.depth, num_heads=size.heads,
        num_classes=CLASSES,
    )  # fmt: skip
    return model.to(setting.device)


def timm_predictions(setting: Setting) -> dict[str, Any]:
    """Predict with a plain script around timm."""
    side, device = setting.size.image, setting.device
    transform = import_peer("timm.data").create_transform(
        (3, side, side), interpolation="bicubic", crop_pct=0.9, mean=IMAGENET_MEAN, std=IMAGENET_STD
    )
    paths = sorted(setting.photos.rglob("*.jpg"))
    loader = DataLoader(
        Files(paths, transform), setting.batch, num_workers=setting.workers, pin_memory=device.type == "cuda"
    )
    model = timm_model(setting).eval()
    forward = torch.compile(model) if setting.compiled else model
    rows: list[tuple[list[int], list[float]]] = []
    times = []
    with torch.inference_mode(), autocast(device, setting.precision):
        for pixels in loader:
            best = forward(pixels.to(device, non_blocking=True)).float().softmax(dim=1).topk(5, dim=1)
            rows += zip(best.indices.tolist(), best.values.tolist(), strict=True)
            times.append((time.perf_counter(), len(rows)))
    lines = (
        json.dumps({"path": str(path), "classes": row[0], "probabilities": row[1]})
        for path, row in zip(paths, rows, strict=True)
    )
    (setting.scratch / "timm.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {"images": len(rows), "marks": times}


# ── training ──


def our_steps(setting: Setting, decode: str) -> dict[str, Any]:
    """Take the steps of `vitrail train`, without validation and saving."""
    size = setting.size
    changes = [
        f"batch={setting.batch}", f"steps={10 * setting.steps}", f"compile={str(setting.compiled).lower()}",
        f"precision={setting.precision}", "optimizer.kind=adamw", f"optimizer.lr={LR}", "averaging.kind=none",
        f"model.image_size={size.image}", f"model.patch_size={size.patch}", f"model.width={size.width}",
        f"model.depth={size.depth}", f"model.heads={size.heads}", "model.stem=linear", "model.class_token=first",
        "model.pool=cls", "model.final_norm=before_pool", "mixing.mixup=0.0", "mixing.cutmix=0.0", "data.val=0.01",
        "data.test=0.01",
    ]  # fmt: skip
    stays = decode == "resident"
    changes += ["data.on_device=true", "data.decode=cpu"] if stays else [f"data.decode={decode}"]
    changes += [f"augmentation.crop={'padded' if stays else 'inception'}"]
    recipe = recipe_for(None, "scratch-small", changes)
    splits = open_splits(str(setting.photos), recipe)
    plan = resolve_defaults(recipe, describe_data(splits.train, setting.device.type), None)
    ranks = Ranks(Processes(), setting.device)
    job = place_images(
        Job(plan, run_context(plan, splits, ranks, setting.workers)), splits, memory_limit(setting.device)
    )
    folder = Path(tempfile.mkdtemp(dir=setting.scratch))
    run = start_run(job, splits, None, folder, SilentObserver())
    finished: list[tuple[float, FinishedStep]] = []
    with PipelinedStepper(run.job, run.stepper, run.state, run.folder) as stepper, closing(run.batches()) as loader:
        for batch in islice(stepper.timed(loader), setting.steps):
            finished += _marked(stepper.step(batch))
        finished += _marked(stepper.flush())
        fixed = batch.to(setting.device)
        alone = _alone(lambda: len(stepper.step(fixed)), setting)
    if run.logger is not None:
        run.logger.close()
    run.writer.close()
    later = [one for _, one in finished[round(WARM_UP * len(finished)) :]]
    waited = sum(one.waited for one in later)
    marks = [(at, number * setting.batch) for number, (at, _) in enumerate(finished, start=1)]
    shares = {"run_waiting": waited / (waited + sum(one.seconds for one in later)), "path": str(job.context.execution)}
    return {"images": len(finished) * setting.batch, "marks": marks, "alone_s": alone, **shares}


def _marked(finished: Sequence[FinishedStep]) -> list[tuple[float, FinishedStep]]:
    return [(time.perf_counter(), one) for one in finished]


def _alone(step: Callable[[], object], setting: Setting) -> float:
    """Return the seconds of a step with a batch that is on the device."""
    for _ in range(3):
        step()
    _synchronise(setting.device)
    start = time.perf_counter()
    for _ in range(setting.steps):
        step()
    _synchronise(setting.device)
    return (time.perf_counter() - start) / setting.steps


def timm_steps(setting: Setting) -> dict[str, Any]:
    """Train with a plain loop around timm's loader and model."""
    data, device, side = import_peer("timm.data"), setting.device, setting.size.image
    loader = data.create_loader(
        data.create_dataset("", str(setting.photos)),
        input_size=(3, side, side),
        batch_size=setting.batch,
        is_training=True,
        use_prefetcher=device.type == "cuda",
        interpolation="bilinear",
        color_jitter=0.0,
        num_workers=setting.workers,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        device=device,
        persistent_workers=False,
        pin_memory=device.type == "cuda",
    )
    model = timm_model(setting).train()
    forward = torch.compile(model) if setting.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=device.type == "cuda")

    def step(pixels: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with autocast(device, setting.precision):
            loss = nn.functional.cross_entropy(forward(pixels), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    marks, before = [], torch.zeros(())
    for number, (pixels, labels) in enumerate(islice(_endless(loader), setting.steps), start=1):
        pixels, labels = pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = step(pixels, labels)
        before.item()  # as a loop that logs: the loss of the previous step
        before = loss
        marks.append((time.perf_counter(), number * setting.batch))
    before.item()
    alone = _alone(partial(step, pixels, labels), setting)
    return {"images": setting.steps * setting.batch, "marks": marks, "alone_s": alone}


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


# ── measuring ──


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(work: Callable[[], dict[str, Any]], setting: Setting, task: str) -> dict[str, Any]:
    """Run a contestant; return the time until its first batch, and the rate of the rest of its job."""
    start = time.perf_counter()
    try:
        made = work()
    finally:
        reset_compiled(setting.device)
    marks = made.pop("marks")
    first, last = marks[min(len(marks) - 1, round(WARM_UP * len(marks)))], marks[-1]
    seconds, images = last[0] - first[0], last[1] - first[1]
    rate = images / seconds if images else last[1] / (last[0] - start)
    row = {"first_s": marks[0][0] - start, "total_s": last[0] - start, "images_per_second": rate, **made}
    if task == "train":
        row["waiting"] = max(0.0, 1 - made["alone_s"] * rate / setting.batch)
    return row


def contestants(setting: Setting, decodes: Sequence[str]) -> dict[str, dict[str, Callable[[], dict[str, Any]]]]:
    """Return what to run, by task and name."""
    ours = {f"vitrail, {'resident' if decode == 'resident' else f'{decode} decode'}": decode for decode in decodes}
    return {
        "predict": {
            **{
                name: partial(our_predictions, setting, decode) for name, decode in ours.items() if decode != "resident"
            },
            "timm": partial(timm_predictions, setting),
        },
        "train": {
            **{name: partial(our_steps, setting, decode) for name, decode in ours.items()},
            "timm": partial(timm_steps, setting),
        },
    }


def laid_out(photos: Path, folder: Path, images: int) -> Path:
    """Link photos into class folders, repeated up to a number of files."""
    found = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not found:
        raise ConfigError(f"{photos} has no JPEGs; give a folder of photos")
    for number in range(images):
        target = folder / f"class{number % CLASSES}" / f"{number:06d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(found[number % len(found)].resolve(), target)
    return folder


def text_of(row: dict[str, Any]) -> str:
    """Say what a row holds."""
    name = f"{row['task']:7} {row['model']:5} batch {row['batch']:4}  {row['library']:22}"
    if "missing" in row:
        return f"{name} {row['missing']}"
    waiting = f", waiting {row['waiting']:.0%}" if "waiting" in row else ""
    return f"{name} {row['images_per_second']:8,.0f} images/s{waiting}, first batch after {row['first_s']:.1f} s"


def write_json(file: Path, rows: list[dict[str, Any]], device: torch.device, workers: int) -> None:
    """Write all rows, with what they were measured on."""
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    about = {"device": machine, "cores": os.cpu_count(), "workers": workers, "torch": torch.__version__}
    file.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="a folder of JPEGs")
    parser.add_argument("--images", type=int, default=9900, help="number of files; photos are repeated")
    parser.add_argument("--only", nargs="+", metavar="TASK:MODEL", help="such as predict:S/16 train:B/16")
    parser.add_argument(
        "--decode", nargs="+", default=["cpu"], choices=("cpu", "gpu", "resident"), help="how ours decodes"
    )
    parser.add_argument("--batch", type=int, help="images per batch; default 256 to predict, 512 to train")
    parser.add_argument("--steps", type=int, help="training steps; default 60")
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, few steps, not compiled: to test this script"
    )
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args()
    for name in ("images", "batch", "steps", "workers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; give 1 or more")
    device, sizes = choose_device(options.device), (TINY,) if options.tiny else tuple(SIZES.values())
    if options.tiny and device.type == "cpu":
        decoder_choice.DEVICES = ("cuda", "cpu")  # nvImageCodec's CPU backend
    if unknown := set(options.only or ()) - {f"{task}:{size.name}" for task in ("predict", "train") for size in sizes}:
        raise ConfigError(f"unknown row {min(unknown)!r}; give such as predict:S/16 or train:B/16")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        photos = laid_out(options.photos, Path(temporary) / "photos", options.images)
        for task, usual in (("predict", 256), ("train", 512)):
            for size in sizes:
                if options.only is not None and f"{task}:{size.name}" not in options.only:
                    continue
                batch, steps = options.batch or (8 if options.tiny else usual), options.steps or 60
                setting = Setting(
                    size, photos, options.images, batch, 4 if options.tiny else steps, options.workers, device,
                    "bf16" if device.type == "cuda" else "float32", not options.tiny, Path(temporary),
                )  # fmt: skip
                for library, work in contestants(setting, options.decode)[task].items():
                    row = {"task": task, "model": size.name, "batch": batch, "library": library}
                    try:
                        row |= measured(work, setting, task)
                    except (VitrailError, ImportError, torch.OutOfMemoryError) as error:
                        row["missing"] = str(error).splitlines()[0]
                    print(text_of(row), flush=True)
                    rows.append(row)
                    if options.json is not None:  # after every row: a machine may be taken away
                        write_json(options.json, rows, device, options.workers)


if __name__ == "__main__":
    try:
        main()
    except VitrailError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
