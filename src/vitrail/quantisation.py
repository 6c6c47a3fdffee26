"""int8 for a bundle: choose calibration images, quantise, compare with float32 on held-out images, cache the result.

    bundle + images  ->  256 calibration images, 512 held-out images  ->  quantised graph, `Int8Check`  ->  engine

The cache holds the graph and its check under a digest of the weights and of the pixels, so that a second command with
the same images opens it at once.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.acceleration.agreement import Compare
from vitrail.acceleration.cpu.threads import CpuThreads
from vitrail.acceleration.export.graph import Graph, output_name, trace
from vitrail.acceleration.export.onnx import OPSET, onnx_program, write_quantised
from vitrail.acceleration.int8.check import Int8Check, compare_directions, compare_predictions
from vitrail.acceleration.int8.engine import Int8Engine
from vitrail.acceleration.int8.quantise import quantise, require_packages, versions
from vitrail.acceleration.planner import ExecutionPlan, Purpose, hardware_of, plan_inference
from vitrail.checkpoints.bundle import Bundle, digest_model
from vitrail.data.batches import Evaluation, evaluation_batches
from vitrail.data.sources.given import Data
from vitrail.data.sources.index_files import cache_folder
from vitrail.data.sources.selection import choose_images, recorded_split
from vitrail.data.sources.source import Source
from vitrail.data.sources.splits import split_of
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.io import ContentError, file_digest, lock_file, read_json
from vitrail.models.vit import ViT
from vitrail.runtime import OnProgress, StageProgress, on_stage
from vitrail.tasks.lookup import compare_for

CALIBRATION, HELD_OUT = 256, 512
"""The most images that determine the scales, and the most that int8 is compared with float32 on."""
LEAST, LEAST_HELD_OUT = 32, 64
"""The fewest of them: with 64, none may change."""
BATCH = 64
FORMAT = 1
"""Of the cache."""
MODEL, RECORD = "model.onnx", "record.json"
NO_INT8_ON_RAY = "Ray does not support int8; use another precision, or omit --ray (ray)"
HINT = "name some with --calibrate (calibrate='photos/')"


def check_calibration(precision: str, engine: str, calibrate: object) -> None:
    """Raise for int8 in an engine without it, or for calibration images in another precision."""
    if precision != "int8" and calibrate is not None:
        raise ConfigError("calibration images are for int8; add --precision int8 (precision='int8'), or omit them")
    if precision == "int8" and engine == "onnx":
        raise ConfigError("int8 runs in OpenVINO, not in ONNX Runtime; omit the engine")


# ── images ──


class CalibrationImages(NamedTuple):
    """The images of a quantisation, as uint8 pixels (B, C, H, W)."""

    calibration: Tensor
    held_out: Tensor


def calibration_images(
    bundle: Bundle, data: Data | None = None, on_progress: OnProgress | None = None
) -> CalibrationImages:
    """Read images drawn from `data`, by default from the training and validation split of the bundle's run."""
    listing, reading = on_stage(on_progress, "listing"), on_stage(on_progress, "reading calibration images")
    if data is None:
        train, val = _images_of_run(bundle, listing)
        first, second = _drawn(train, CALIBRATION), _drawn(val, HELD_OUT)
    else:
        source = choose_images(data, "all", on_progress=listing).source
        count = min(len(source), CALIBRATION + HELD_OUT)
        order = _drawn(source, count)
        part = min(CALIBRATION, count // 3)
        first, second = split_of(order, np.arange(part)), split_of(order, np.arange(part, count))
    held_out, calibration = _pixels(second, bundle, reading), _pixels(first, bundle, reading)
    if len(calibration) < LEAST or len(held_out) < LEAST_HELD_OUT:
        raise DataError(
            f"int8 needs {LEAST} images for calibration and {LEAST_HELD_OUT} to compare with float32, and found "
            f"{len(calibration)} and {len(held_out)} that can be read; {HINT}"
        )
    return CalibrationImages(calibration, held_out)


def _images_of_run(bundle: Bundle, on_progress: StageProgress | None) -> tuple[Source, Source]:
    """Return the training and validation split of the run that the bundle is in."""
    missing = f"int8 needs calibration images, and the model is not in the folder of a run; {HINT}"
    record = recorded_split(bundle.origin)
    if bundle.origin is None or record is None:
        raise ConfigError(missing)
    try:
        data = read_json(bundle.origin.absolute().parent / "origin.json")["data"]
    except (OSError, ContentError, KeyError, TypeError):
        raise ConfigError(missing) from None
    try:
        train, val = (choose_images(data, split, record=record, on_progress=on_progress) for split in ("train", "val"))
    except VitrailError as error:
        raise ConfigError(f"the images of the model's run cannot be read ({error}); {HINT}") from None
    return train.source, val.source


def _drawn(source: Source, count: int) -> Source:
    """Return images drawn at random, the same every time."""
    order = np.random.default_rng(0).permutation(len(source))[:count]
    return split_of(source, order)


def _pixels(source: Source, bundle: Bundle, on_progress: StageProgress | None) -> Tensor:
    """Return the readable images of a source."""
    batches = []
    data = Evaluation(source, bundle.preprocess, BATCH, bad_files="skip")
    for batch in evaluation_batches(data, workers=0):
        batches.append(batch.pixels)
        if on_progress is not None:
            on_progress(sum(map(len, batches)), len(source))
    return torch.cat(batches) if batches else torch.empty(0)


# ── quantisation ──


def quantised_graph(graph: Graph, bundle: Bundle, pixels: Tensor, opset: int = OPSET, output: str | None = None) -> Any:
    """Return the quantised ONNX model of a graph; `pixels` are the calibration images."""
    program = onnx_program(trace(graph), output or output_name(graph.model), opset, extra="int8")
    return quantise(program, [graph.inputs(image, bundle.preprocess).numpy() for image in pixels.split(1)])


def check_int8(
    graph: Graph,
    bundle: Bundle,
    exported: Callable[[Tensor], Tensor],
    images: CalibrationImages,
    compare: Compare | None,
    on_progress: OnProgress | None = None,
) -> Int8Check:
    """Compare the outputs of a quantised graph on held-out images; without `compare`, as features."""
    report, threads = on_stage(on_progress, "comparing int8 with float32"), CpuThreads()
    exact, quick = [], []

    def in_float32(inputs: Tensor) -> Tensor:
        with torch.inference_mode():
            outputs: Tensor = graph(inputs)
        return outputs.float()

    for pixels in images.held_out.split(BATCH):
        inputs = graph.inputs(pixels, bundle.preprocess)
        exact.append(threads(in_float32, inputs))
        quick.append(exported(inputs))
        if report is not None:
            report(sum(map(len, quick)), len(images.held_out))
    outputs, calibrated_on = (torch.cat(exact), torch.cat(quick)), len(images.calibration)
    if compare is None:
        return compare_directions(*outputs, calibrated_on)
    return compare_predictions(*outputs, compare, calibrated_on)


class Int8Features(NamedTuple):
    """The features to compute in int8, instead of the model's output."""

    compute: Callable[[ViT, Tensor], Tensor]
    """Maps the model and normalised images to features."""
    name: str
    """What distinguishes them from other features."""


def open_int8(
    bundle: Bundle,
    data: Data | None = None,
    *,
    device: torch.device,
    features: Int8Features | None = None,
    on_progress: OnProgress | None = None,
) -> Int8Engine:
    """Quantise a bundle's model, or open its quantised graph from the cache; raise if int8 changes too much.

    The agreement with float32 is that of the model's task, or with `features` their cosine similarity.
    """
    engine = open_unchecked(bundle, data, device=device, features=features, on_progress=on_progress)
    engine.check.require()
    return engine


def open_unchecked(
    bundle: Bundle,
    data: Data | None = None,
    *,
    device: torch.device,
    features: Int8Features | None = None,
    on_progress: OnProgress | None = None,
) -> Int8Engine:
    """Do the same also if int8 changes too much; the engine has the check."""
    purpose: Purpose = "predict" if features is None else "features"
    plan = plan_inference(bundle.model.config, hardware_of(device), "int8", purpose)
    if plan.precision != "int8":
        raise ConfigError(f"{plan.reason}; use --device cpu, or another precision")
    require_packages()
    images = calibration_images(bundle, data, on_progress)
    digest = _digest(bundle, images, "" if features is None else features.name)

    def build(folder: Path) -> Int8Engine:
        return _build(bundle, images, features, folder, plan, digest, on_progress)

    try:
        place = cache_folder() / "int8"
        place.mkdir(parents=True, exist_ok=True)
        with lock_file(place / f"{digest}.lock", wait=True):  # another process may be building it
            engine = _cached(place / digest, plan, digest)
            if engine is None:
                engine = build(place / digest)
    except OSError:  # no cache, such as a full disk: this only costs time
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            engine = build(Path(folder) / digest)
    return engine


def _build(
    bundle: Bundle,
    images: CalibrationImages,
    features: Int8Features | None,
    folder: Path,
    plan: ExecutionPlan,
    digest: str,
    on_progress: OnProgress | None,
) -> Int8Engine:
    """Quantise, check and write a folder of the cache; the record is written last."""
    if on_progress is not None:
        on_progress("quantising to int8", 0, None)
    compute = None if features is None else features.compute
    graph = Graph(bundle.model, bundle.preprocess, compute=compute)
    model = quantised_graph(graph, bundle, images.calibration, output=None if features is None else "features")
    folder.mkdir(exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    write_quantised(model, folder / MODEL)
    untried = Int8Check(len(images.calibration), 0, "prediction", 0.0, 1.0, "")
    compare = compare_for(bundle) if features is None else None
    check = check_int8(graph, bundle, Int8Engine(folder / MODEL, plan, untried, digest), images, compare, on_progress)
    record = {"format": FORMAT, "model": file_digest(folder / MODEL), "check": check.as_dict()}
    temporary = folder / f"{RECORD}.part"
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / RECORD)
    return Int8Engine(folder / MODEL, plan, check, digest)


def _cached(folder: Path, plan: ExecutionPlan, digest: str) -> Int8Engine | None:
    """Open a folder of the cache; None if it is missing or corrupt."""
    with suppress(OSError, ContentError, KeyError, TypeError):
        record = read_json(folder / RECORD)
        if record["format"] == FORMAT and record["model"] == file_digest(folder / MODEL):
            return Int8Engine(folder / MODEL, plan, Int8Check(**record["check"]), digest)
    return None


def _digest(bundle: Bundle, images: CalibrationImages, features: str) -> str:
    """Return the key of the cache: what the quantised graph and its check depend on."""
    words = (str(FORMAT), digest_model(bundle), features, versions())
    digest = hashlib.sha256("\0".join(words).encode())
    for pixels in images:
        digest.update(f"\0{tuple(pixels.shape)}\0".encode())
        digest.update(pixels.contiguous().numpy().data)
    return digest.hexdigest()[:32]
