"""`bench`: the throughput and latency of a model on this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import torch

from vitrail.acceleration.bench import BATCHES, Cell, Skipped, run_benchmark
from vitrail.acceleration.engine import Engine, Kind
from vitrail.acceleration.planner import plan_of, usual_precisions
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.data.decoder_choice import check_decode, choose_for_source
from vitrail.data.sources.given import Data
from vitrail.data.sources.selection import choose_images
from vitrail.errors import ConfigError, suggest
from vitrail.inference.decoding_speed import DecodingSpeed, decoding_speeds
from vitrail.quantisation import check_calibration, open_int8
from vitrail.runtime import InferencePrecision, OnPlan, OnProgress, Precision, choose_device, on_stage
from vitrail.tasks.lookup import compare_for

Word = TypeVar("Word", bound=str)
PRECISIONS: tuple[InferencePrecision, ...] = (*get_args(Precision), "int8")


class Benchmark(NamedTuple):
    """The speed of a model in every engine, precision and batch size that was measured."""

    device: str
    """The name of the GPU, or "cpu"."""
    threads: int
    """Number of CPU threads that torch uses."""
    torch: str
    """The version of torch."""
    seconds: float
    """Seconds measured per cell."""
    cells: list[Cell]
    skipped: list[Skipped]
    """What was not measured, and why."""
    compared: str = "probabilities"
    """What the changes in `cells` are of: probabilities, or outputs relative to the largest one."""
    decoding: tuple[DecodingSpeed, ...] = ()
    """How fast the given images are decoded."""

    def as_dict(self) -> dict[str, Any]:
        """Return the results as JSON-compatible values."""
        return {
            **self._asdict(),
            "cells": [cell._asdict() for cell in self.cells],
            "skipped": [left._asdict() for left in self.skipped],
            "decoding": [one._asdict() for one in self.decoding],
        }


def bench(
    model: Bundle | str | Path,
    *,
    engines: Sequence[str] | None = None,
    precisions: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    seconds: float = 2.0,
    device: str = "auto",
    images: Data | None = None,
    decode: str = "auto",
    calibrate: Data | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    on_progress: OnProgress | None = None,
    on_plan: OnPlan | None = None,
) -> Benchmark:
    """Measure the throughput and latency of a model on random images, per engine, precision and batch size.

    By default `engines` are torch, onnx and openvino, `precisions` all that a device usually supports, and `batches` 1,
    4, 16 and 64. What cannot run is listed in `skipped`. `seconds` is the time per cell. `on_plan` is called once per
    precision of torch, and for int8, which has to be asked for; its calibration images are `calibrate`, by default
    those of the model's run.

    With `images`, it also measures how fast these are read, decoded and resized for the model: on the CPU and, on a
    CUDA device, with nvImageCodec, or only what `decode` ("cpu" or "gpu") says.
    """
    kinds = _selected(engines, get_args(Kind), "engine")
    place = choose_device(device)
    chosen = _selected(precisions, PRECISIONS, "precision") if precisions else usual_precisions(place)
    if "int8" not in chosen:
        check_calibration("float32", "torch", calibrate)
    check_decode(decode)
    if images is None and decode != "auto":
        raise ConfigError(f"decode is {decode}, and no images are decoded; name some with --images (images='photos/')")
    opened = ready_bundle(model, overrides=overrides, keys=keys)
    opened.announce()
    source = None
    if images is not None:
        source = choose_images(images, "all", on_progress=on_stage(on_progress, "listing")).source
        if decode == "gpu":  # where that is impossible, nothing is measured
            choose_for_source(decode, place, opened.preprocess, source)
    if on_plan is not None and "torch" in kinds:
        for precision in chosen:
            if precision != "int8":
                on_plan(str(plan_of(opened.model.to(place), precision)))

    def open_quantised() -> Engine:
        engine = open_int8(opened, calibrate, device=place, on_progress=on_progress)
        if on_plan is not None:
            on_plan(str(engine.plan))
        return engine

    result = run_benchmark(
        opened.model,
        opened.preprocess,
        device=place,
        engines=kinds,
        precisions=chosen,
        batches=BATCHES if batches is None else batches,
        seconds=seconds,
        compare=compare_for(opened),
        open_int8=open_quantised,
        on_progress=on_stage(on_progress, "measuring"),
    )
    decoding = () if source is None else decoding_speeds(source, opened.preprocess, place, decode, seconds)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else str(place)
    return Benchmark(name, torch.get_num_threads(), torch.__version__, seconds, *result, decoding)


def _selected(words: Sequence[str] | None, valid: tuple[Word, ...], what: str) -> list[Word]:
    """Return the requested values, or all of them; raise on an unknown one."""
    if isinstance(words, str):
        raise ConfigError(f"{what}s is {words!r}; pass a list: [{words!r}]")
    for word in words or ():
        if word not in valid:
            raise ConfigError(f"no {what} is called {word!r}; there are {', '.join(valid)}{suggest(word, valid)}")
    return [word for word in valid if not words or word in words]
