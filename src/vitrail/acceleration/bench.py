"""Benchmark a model on this machine: every engine, precision and batch size, interleaved."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from vitrail.acceleration.agreement import Compare, compare_outputs
from vitrail.acceleration.engine import Engine, Kind, open_engine
from vitrail.acceleration.export.graph import quiet
from vitrail.acceleration.planner import usual_precisions
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, VitrailError
from vitrail.models.vit import ViT
from vitrail.runtime import InferencePrecision

BATCHES = (1, 4, 16, 64)
ROUNDS = 10
"""A cell's time is spread over this many rounds, so that disturbances affect all cells alike."""
TOO_SLOW = 20.0
"""Skip a cell if one call is expected to take this many times the cell's time budget."""


class Cell(NamedTuple):
    """The speed of one engine in one precision at one batch size."""

    engine: Kind
    precision: InferencePrecision
    batch: int
    images_per_second: float
    """Throughput."""
    median: float
    """Median latency of a batch in milliseconds."""
    p95: float
    """95th percentile of the latency in milliseconds."""
    calls: int
    change: float
    """Largest change from torch in float32, on random images, of what `Bench.compared` names."""


class Skipped(NamedTuple):
    """What was skipped, and why."""

    engine: Kind
    precision: InferencePrecision | None
    """None: every precision."""
    batch: int | None
    """None: every batch size."""
    reason: str


class Bench(NamedTuple):
    """The results of a benchmark."""

    cells: list[Cell]
    skipped: list[Skipped]
    compared: str = "outputs"
    """What the changes are of: probabilities, or outputs relative to the largest one."""

    def as_dict(self) -> dict[str, Any]:
        """Return the results as JSON-compatible values."""
        return {
            "cells": [cell._asdict() for cell in self.cells],
            "skipped": [left._asdict() for left in self.skipped],
        }


@dataclass
class _Running:
    """A cell being timed."""

    engine: Engine
    pixels: Tensor
    change: float
    times: list[float] = field(default_factory=list)

    def run_for(self, seconds: float) -> None:
        """Call the engine for this long, at least once."""
        end = time.perf_counter() + seconds
        while True:
            self.times.append(_timed(self.engine, self.pixels))
            if time.perf_counter() >= end:
                return

    def result(self) -> Cell:
        milliseconds = 1000 * np.array(self.times)
        batch = len(self.pixels)
        return Cell(
            engine=self.engine.kind,
            precision=self.engine.precision,
            batch=batch,
            images_per_second=batch * len(self.times) / sum(self.times),
            median=float(np.median(milliseconds)),
            p95=float(np.percentile(milliseconds, 95)),
            calls=len(self.times),
            change=self.change,
        )


def run_benchmark(
    model: ViT,
    preprocess: Preprocess,
    *,
    device: torch.device,
    engines: Sequence[Kind] = get_args(Kind),
    precisions: Sequence[InferencePrecision] | None = None,
    batches: Sequence[int] = BATCHES,
    seconds: float = 2.0,
    compare: Compare = compare_outputs,
    open_int8: Callable[[], Engine] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Bench:
    """Time a model on random images; `seconds` is the time per cell, `compare` compares outputs for the model's task.

    Engines that cannot be opened (a missing package, an unsupported precision) are listed with the reason. By default,
    `precisions` are float32 and bf16, and fp16 on a GPU. int8 needs `open_int8`, which quantises the model.
    """
    _check(batches, seconds)
    report = on_progress or _ignore_progress
    with quiet():  # bf16 on a CPU without support prints long warnings
        opened, skipped = _open_all(
            model, preprocess, device, engines, precisions or usual_precisions(device), open_int8
        )
        exact = open_engine(model, preprocess, device=device)
        running, not_run, compared = _start_all(opened, exact, model, batches, seconds, compare)
        for number in range(ROUNDS):
            for index, cell in enumerate(running):
                # A call may take longer than its slice of a round; the cell then skips rounds to make up for it.
                if sum(cell.times) <= seconds * number / ROUNDS:
                    cell.run_for(seconds / ROUNDS)
                report(number * len(running) + index + 1, ROUNDS * len(running))
    return Bench([cell.result() for cell in running], [*skipped, *not_run], compared)


def _check(batches: Sequence[int], seconds: float) -> None:
    if not batches or min(batches) < 1:
        raise ConfigError(f"the batch sizes are {', '.join(map(str, batches)) or 'none'}; use numbers from 1")
    if not 0 < seconds < 3600:
        raise ConfigError(f"seconds is {seconds}; choose more than 0 and less than 3600")


def _open_all(
    model: ViT,
    preprocess: Preprocess,
    device: torch.device,
    engines: Sequence[Kind],
    precisions: Sequence[InferencePrecision],
    open_int8: Callable[[], Engine] | None,
) -> tuple[list[Engine], list[Skipped]]:
    opened: list[Engine] = []
    skipped: list[Skipped] = []
    for kind in dict.fromkeys(engines):
        for precision in dict.fromkeys(precisions):
            try:
                if precision != "int8":
                    opened.append(open_engine(model, preprocess, kind=kind, precision=precision, device=device))
                elif kind == "openvino" and open_int8 is not None:
                    opened.append(open_int8())
                else:
                    skipped.append(Skipped(kind, precision, None, "int8 runs in OpenVINO"))
            except VitrailError as error:
                skipped.append(Skipped(kind, precision, None, str(error)))
    return opened, _merged(skipped)


def _merged(skipped: list[Skipped]) -> list[Skipped]:
    """Merge the entries of an engine that fails for the same reason in several precisions."""
    groups: dict[tuple[str, str], list[Skipped]] = {}
    for left in skipped:
        groups.setdefault((left.engine, left.reason), []).append(left)
    return [same[0] if len(same) == 1 else same[0]._replace(precision=None) for same in groups.values()]


def _start_all(
    opened: list[Engine], exact: Engine, model: ViT, batches: Sequence[int], seconds: float, compare: Compare
) -> tuple[list[_Running], list[Skipped], str]:
    """Warm up every cell with two calls; skip those that would take too long, or whose output is not finite.

    A batch is created only when needed, since one that is too slow may also be too large for memory.
    """
    few = _images(model, 4)
    expected = exact(few)
    batch_of: dict[int, Tensor] = {}
    running: list[_Running] = []
    not_run: list[Skipped] = []
    for engine in opened:
        change = compare(expected, engine(few)).change
        if math.isnan(change):
            not_run.append(Skipped(engine.kind, engine.precision, None, "its output is not finite"))
            continue
        per_image = _timed(engine, few) / len(few)
        for batch in sorted(set(batches)):
            if per_image * batch > TOO_SLOW * seconds:
                why = f"a batch of {batch:,} would take about {_duration(per_image * batch)}; allow more with --seconds"
                not_run.append(Skipped(engine.kind, engine.precision, batch, why))
                continue
            if batch not in batch_of:
                batch_of[batch] = _images(model, batch)
            pixels = batch_of[batch]
            # The first call of a size may compile or capture a CUDA graph, so its time does not count.
            per_image = min(_timed(engine, pixels) for _ in range(2)) / batch
            running.append(_Running(engine, pixels, change))
    return running, not_run, compare(expected, expected).values


def _duration(seconds: float) -> str:
    return f"{seconds:,.0f} seconds" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _timed(engine: Engine, pixels: Tensor) -> float:
    """Return the duration of one call in seconds."""
    start = time.perf_counter()
    engine(pixels)
    return time.perf_counter() - start


def _images(model: ViT, count: int) -> Tensor:
    """Return random images in channels-last memory format, like decoded ones."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, *config.image_size, config.channels), dtype=torch.uint8, generator=generator)
    return pixels.permute(0, 3, 1, 2)


def _ignore_progress(done: int, total: int) -> None:
    del done, total
