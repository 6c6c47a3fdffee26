"""Prediction throughput on photos: ours vs. a plain timm script and transformers' pipeline.

    python benchmarks/predict.py photos/ --workers 2

All contenders alternate in one run, with the same weights (an S/16 at 224 with random weights) and the same files. The
plain script opens each file with Pillow, applies timm's own transform in a DataLoader with that many workers, and calls
the model eagerly; ours decodes with its defaults. Ratios compare runs of the same turn. For a fair comparison timm is
also run in the same precision as ours; bf16 is included if the CPU is faster with it, other engines if installed.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.peers import import_peer, scramble

from vitrail import Bundle, Classifier, VitrailError, convert, load
from vitrail.inference.listing import list_items
from vitrail.inference.row_batches import predict_items
from vitrail.runtime import faster_in_bf16

Predictions = dict[str, tuple[int, float]]
"""By path, the top-1 class and its probability."""
Pass = Callable[[Sequence[str]], Predictions]
CLASSES = 1000


class Files(Dataset[Any]):
    """The usual dataset around a timm transform."""

    def __init__(self, paths: Sequence[str], transform: Any) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        """Return the model's input."""
        return self.transform(Image.open(self.paths[index]).convert("RGB"))


def with_timm(model: Any, transform: Any, batch: int, workers: int, bf16: bool) -> Pass:
    def run(paths: Sequence[str]) -> Predictions:
        predictions: list[tuple[int, float]] = []
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            for pixels in DataLoader(Files(paths, transform), batch, num_workers=workers if len(paths) > 1 else 0):
                values, indices = model(pixels).float().softmax(dim=1).topk(5)
                predictions += zip(indices[:, 0].tolist(), values[:, 0].tolist(), strict=True)
        return dict(zip(paths, predictions, strict=True))

    return run


def with_transformers(folder: Path, batch: int, workers: int) -> Pass:
    module = import_peer("transformers")
    pipeline = module.pipeline("image-classification", model=str(folder), device="cpu")

    def run(paths: Sequence[str]) -> Predictions:
        size, helpers = (batch, workers) if len(paths) > 1 else (1, 0)
        rows = pipeline(list(paths), batch_size=size, num_workers=helpers, top_k=5)
        return {
            path: (int(row[0]["label"].split("_")[-1]), row[0]["score"]) for path, row in zip(paths, rows, strict=True)
        }

    return run


def with_vitrail(classifier: Classifier, batch: int) -> Pass:
    def run(paths: Sequence[str]) -> Predictions:
        if len(paths) == 1:
            prediction = classifier(paths[0])
            return {paths[0]: (int(prediction.name), prediction.probability)}
        rows = [row for rows in predict_items(classifier, list_items(paths), batch=batch) for row in rows]
        return {
            os.fsdecode(row.path): (
                int(row.prediction.fields()["classes"][0]),
                row.prediction.fields()["probabilities"][0],
            )
            for row in rows
        }

    return run


def contenders(folder: Path, batch: int, workers: int, engines: Sequence[str]) -> dict[str, Pass]:
    timm = import_peer("timm")
    peer = scramble(timm.create_model("vit_small_patch16_224", num_classes=CLASSES))
    timm.models.save_for_hf(peer, folder / "timm")
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(peer), is_training=False)
    bundle = load(folder / "timm")
    bundle = Bundle(bundle.model, bundle.preprocess, tuple(map(str, range(CLASSES))))
    convert(Bundle(bundle.model, bundle.preprocess), folder / "hf", to="transformers")
    passes = {
        "timm, eager, float32": with_timm(peer, transform, batch, workers, bf16=False),
        "transformers' pipeline, float32": with_transformers(folder / "hf", batch, workers),
    }
    precisions = ("float32", "bf16") if faster_in_bf16(torch.device("cpu")) else ("float32",)
    if "bf16" in precisions:
        passes["timm, eager, bf16"] = with_timm(peer, transform, batch, workers, bf16=True)
    for engine in engines:
        for precision in precisions:
            try:
                classifier = Classifier(bundle, engine=engine, precision=precision, device="cpu")  # type: ignore[arg-type]
            except (VitrailError, ImportError) as error:
                print(f"skipped: {engine}, {precision}: {error}")
                continue
            passes[f"vitrail, {engine}, {precision}"] = with_vitrail(classifier, batch)
    return passes


def in_turns(passes: dict[str, Pass], work: Callable[[Pass], int], repeats: int) -> dict[str, list[float]]:
    """Warm up every contender, then alternate; return the seconds per image of every turn."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(repeats + 1):
        order = list(passes.items())
        for name, run in order if turn % 2 else reversed(order):
            start = time.perf_counter()
            count = work(run)
            if turn:
                seconds[name].append((time.perf_counter() - start) / count)
    return seconds


def report(title: str, seconds: dict[str, list[float]], show: Callable[[float], str]) -> None:
    first, second = list(seconds)[:2]
    print(f"\n| {title} | {show.__name__} | × timm float32 | × transformers |\n|---|---|---|---|")
    for name, own in seconds.items():
        ratios = [statistics.median(o / m for o, m in zip(seconds[base], own, strict=True)) for base in (first, second)]
        print(f"| {name} | {show(statistics.median(own))} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


def images_a_second(seconds: float) -> str:
    return f"{1 / seconds:.1f}"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def agreement(passes: dict[str, Pass], paths: Sequence[str]) -> None:
    """Print the top-1 agreement with timm and the largest difference in probability."""
    predictions = {name: run(paths) for name, run in passes.items()}
    expected = next(iter(predictions.values()))
    print(
        f"\n| on {len(paths)} photos | top-1 agreement with timm | largest difference in probability |\n|---|---|---|"
    )
    for name, actual in predictions.items():
        same = [actual[path][0] == expected[path][0] for path in paths]
        apart = [abs(actual[path][1] - expected[path][1]) for path, equal in zip(paths, same, strict=True) if equal]
        print(f"| {name} | {100 * sum(same) / len(same):.1f}% | {max(apart):.1e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", help="a folder of photos")
    parser.add_argument("--images", type=int, default=256, help="number of photos per run")
    parser.add_argument("--single", type=int, default=30, help="number of photos for single predictions")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=["torch", "onnx", "openvino"], help="our engines to compare")
    options = parser.parse_args()
    paths = [os.fsdecode(item.name) for item in islice(list_items([options.photos]), options.images)]
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.workers} workers, {len(paths)} photos"
    )
    with tempfile.TemporaryDirectory() as temporary:
        passes = contenders(Path(temporary), options.batch, options.workers, options.engines)
        agreement(passes, paths)
        together = in_turns(passes, lambda run: len(run(paths)), options.repeats)
        report(f"folder, batch size {options.batch}", together, images_a_second)
        single = paths[: options.single]
        alone = in_turns(passes, lambda run: sum(len(run([path])) for path in single), options.repeats)
        report("one at a time", alone, milliseconds)


if __name__ == "__main__":
    main()
