"""The cost of faster inference paths: accuracy and top-1 agreement on labelled images.

    python benchmarks/agreement.py runs/cifar10/best cifar10/test --calibration cifar10/train
    python benchmarks/agreement.py runs/digits-scratch-small/best digits --device cpu

Every path predicts the same images: the model in float32 and under autocast; `vitrail.accelerate` in bf16, with exact
GELU, and in fp8 calibrated on images of `--calibration`; fp8 with every weight rounded to nearest, with all blocks in
fp8, and with both. "like bf16" is the top-1 agreement with the fast encoder in bf16, "error" the relative distance of
the logits from float32. On a CPU the same encoder runs in plain torch with the same rounding, including fp8.
"""

import argparse
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

import vitrail
from vitrail.acceleration.cuda.fp8.calibration import calibrate
from vitrail.acceleration.cuda.inference.encoder import EncoderPrecision
from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.acceleration.planner import hardware_of, unsupported_by_fused_encoder, why_not_fp8
from vitrail.data.batches import Evaluation, evaluation_batches
from vitrail.data.sources.opening import open_source
from vitrail.data.sources.source import Source, Subset
from vitrail.errors import ConfigError, VitrailError
from vitrail.runtime import autocast, choose_device

Path = Callable[[Tensor], Tensor]
CALIBRATION = 1024
"""Number of calibration images for fp8."""


def images(source: Source, bundle: vitrail.Bundle, device: torch.device, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield normalised images on the device, and their labels."""
    for loaded in evaluation_batches(Evaluation(source, bundle.preprocess, batch)):
        yield bundle.preprocess.normalise(loaded.pixels.to(device)), loaded.labels


def paths(bundle: vitrail.Bundle, device: torch.device, calibration: Tensor) -> Iterator[tuple[str, Path]]:
    """Yield every inference path that supports this model."""
    model = bundle.model.to(device).eval()
    yield "float32", model

    def cast(x: Tensor) -> Tensor:
        with autocast(device, "bf16"):
            logits: Tensor = model(x)
        return logits

    yield "autocast", cast
    if unsupported_by_fused_encoder(model.config):
        print("skipped, not supported by the fast encoder: fp8, exact GELU")
        yield "bf16", vitrail.accelerate(model)
        return
    yield "bf16", FastModel(model, EncoderPrecision())
    yield "bf16, exact GELU", FastModel(model, EncoderPrecision(exact=True))
    try:
        if device.type == "cuda" and (why := why_not_fp8(model.config, hardware_of(device))):
            raise ConfigError(why)
        seen = calibrate(model, calibration, spared=0)
    except VitrailError as error:
        print(f"fp8: skipped, {error}")
    else:
        yield "fp8", FastModel(model, EncoderPrecision(inputs=seen))
        nearest = {name: calibration._replace(correlation=None) for name, calibration in seen.items()}
        yield "fp8, nearest", FastModel(model, EncoderPrecision(inputs=nearest))
        yield "fp8, all blocks", FastModel(model, EncoderPrecision(inputs=seen, spared=0))
        yield "fp8, both", FastModel(model, EncoderPrecision(inputs=nearest, spared=0))


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of faster inference paths.")
    parser.add_argument("model", help="anything that vitrail.load opens")
    parser.add_argument("data", help="labelled images: a folder, a manifest, shards, digits")
    parser.add_argument("--calibration", help="calibration images for fp8 (default: the same data)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=500)
    options = parser.parse_args()
    device, bundle = choose_device(options.device), vitrail.load(options.model)
    source = open_source(options.data)
    like = open_source(options.calibration) if options.calibration else source
    # Spread over all classes, which a folder lists in order.
    spread = Subset(like, np.linspace(0, len(like) - 1, min(CALIBRATION, len(like))).astype(np.int64))
    calibration, _ = next(images(spread, bundle, device, CALIBRATION))
    names = [source.classes.index(name) for name in bundle.classes or source.classes]
    exact = fast = None
    print(f"{'path':18} {'accuracy':>8} {'like float32':>12} {'like bf16':>10} {'error':>8}   ({len(source):,} images)")
    for name, path in paths(bundle, device, calibration):
        outputs, labels = [], []
        with torch.inference_mode():
            for batch, targets in images(source, bundle, device, options.batch):
                outputs.append(path(batch).float().cpu())
                labels.append(targets)
        logits, first = torch.cat(outputs), np.array(names)[torch.cat(outputs).argmax(dim=1)]
        exact = logits if name == "float32" else exact
        fast = first if name == "bf16" else fast
        error = float((logits - exact).norm() / exact.norm()) if exact is not None else 0.0
        same = np.array(names)[exact.argmax(dim=1)] == first if exact is not None else np.ones(1)
        alike = "-" if fast is None else f"{(fast == first).mean():.4f}"
        accuracy = (first == torch.cat(labels).numpy()).mean()
        print(f"{name:18} {accuracy:8.4f} {same.mean():12.4f} {alike:>10} {error:8.1e}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except VitrailError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
