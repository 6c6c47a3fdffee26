"""What a faster way of answering costs: accuracy, and how often the first answer stays the same, on labelled images.

    python benchmarks/agreement.py runs/cifar10/best cifar10/test --calibration cifar10/train
    python benchmarks/agreement.py runs/digits-scratch-small/best digits --device cpu

Every way answers about the same images: the model in float32 and under autocast; what `vitrail.accelerate` computes
in bf16, with exact GELU, and in fp8 chosen by some images of `--calibration`; fp8 with every weight rounded to the
nearest number, with no block spared, with both; and bf16 with some tokens merged in every block. "Like bf16" compares
with the fast encoder in bf16, "error" is the distance of the logits from float32's. A processor computes the same
encoder by plain torch, with the same roundings, fp8's too.
"""

import argparse
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

import vitrail
from vitrail.acceleration.accelerate import check_fp8
from vitrail.acceleration.cuda.calibration import calibrate
from vitrail.acceleration.cuda.encoder import EncoderPrecision, can_fold
from vitrail.acceleration.cuda.model import FastModel
from vitrail.data.batches import Evaluation, evaluation_batches
from vitrail.data.sources.opening import open_source
from vitrail.data.sources.source import Source, Subset
from vitrail.errors import ConfigError, VitrailError
from vitrail.runtime import autocast, choose_device

Way = Callable[[Tensor], Tensor]
CALIBRATION = 1024
"""By how many images fp8 is chosen."""


def images(source: Source, bundle: vitrail.Bundle, device: torch.device, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Give normalised images on the device, and their labels."""
    for found in evaluation_batches(Evaluation(source, bundle.preprocess, batch)):
        yield bundle.preprocess.normalise(found.pixels.to(device)), found.labels


def ways(
    bundle: vitrail.Bundle, device: torch.device, calibration: Tensor, merges: list[int]
) -> Iterator[tuple[str, Way]]:
    """Give every way of answering that there is for this model."""
    model = bundle.model.to(device).eval()
    yield "float32", model

    def cast(x: Tensor) -> Tensor:
        with autocast(device, "bf16"):
            answer: Tensor = model(x)
        return answer

    yield "autocast", cast
    if not can_fold(model.config):
        print("what the fast encoder does not know is left out: fp8, exact GELU, merging")
        yield "bf16", vitrail.accelerate(model)
        return
    yield "bf16", FastModel(model, EncoderPrecision())
    yield "bf16, exact GELU", FastModel(model, EncoderPrecision(exact=True))
    try:
        if device.type == "cuda":
            check_fp8(model, device)
        seen = calibrate(model, calibration, spared=0)
    except VitrailError as error:
        print(f"fp8: left out, {error}")
    else:
        yield "fp8", FastModel(model, EncoderPrecision(inputs=seen))
        nearest = {name: calibration._replace(correlation=None) for name, calibration in seen.items()}
        yield "fp8, nearest", FastModel(model, EncoderPrecision(inputs=nearest))
        yield "fp8, all blocks", FastModel(model, EncoderPrecision(inputs=seen, spared=0))
        yield "fp8, both", FastModel(model, EncoderPrecision(inputs=nearest, spared=0))
    for tokens in merges:
        try:
            merged = FastModel(model, EncoderPrecision(), merge=tokens)
        except ConfigError as error:
            print(f"merge {tokens}: left out, {error}")
        else:
            yield f"bf16, merge {tokens}", merged


def main() -> None:
    parser = argparse.ArgumentParser(description="What a faster way of answering costs.")
    parser.add_argument("model", help="anything that vitrail.load opens")
    parser.add_argument("data", help="labelled images: a folder, a manifest, shards, digits")
    parser.add_argument("--calibration", help="images to choose fp8 by (default: the same)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--merge", type=int, nargs="*", default=[1, 2, 4], help="tokens merged in every block")
    options = parser.parse_args()
    device, bundle = choose_device(options.device), vitrail.load(options.model)
    source = open_source(options.data)
    like = open_source(options.calibration) if options.calibration else source
    # Of all classes: a folder has them one after the other.
    spread = Subset(like, np.linspace(0, len(like) - 1, min(CALIBRATION, len(like))).astype(np.int64))
    calibration, _ = next(images(spread, bundle, device, CALIBRATION))
    names = [source.classes.index(name) for name in bundle.classes or source.classes]
    exact = fast = None
    print(f"{'way':18} {'accuracy':>8} {'like float32':>12} {'like bf16':>10} {'error':>8}   ({len(source):,} images)")
    for name, way in ways(bundle, device, calibration, options.merge):
        answers, labels = [], []
        with torch.inference_mode():
            for batch, found in images(source, bundle, device, options.batch):
                answers.append(way(batch).float().cpu())
                labels.append(found)
        logits, first = torch.cat(answers), np.array(names)[torch.cat(answers).argmax(dim=1)]
        exact = logits if name == "float32" else exact
        fast = first if name == "bf16" else fast
        error = float((logits - exact).norm() / exact.norm()) if exact is not None else 0.0
        same = np.array(names)[exact.argmax(dim=1)] == first if exact is not None else np.ones(1)
        alike = "-" if fast is None else f"{(fast == first).mean():.4f}"
        right = (first == torch.cat(labels).numpy()).mean()
        print(f"{name:18} {right:8.4f} {same.mean():12.4f} {alike:>10} {error:8.1e}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except VitrailError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
