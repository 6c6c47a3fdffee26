"""How fast a model answers on this machine: every engine, precision and size of batch, in turns."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from vitrail.acceleration.engine import Engine, Kind, open_engine
from vitrail.acceleration.packages import quiet
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, VitrailError
from vitrail.models.vit import ViT
from vitrail.runtime import Precision

BATCHES = (1, 4, 16, 64)
ROUNDS = 10
"""A cell's time is spread over so many rounds, so that what disturbs the machine disturbs all cells alike."""
TOO_SLOW = 20.0
"""A cell is left out where one call is foreseen to take so many times as long as the whole cell should."""


class Cell(NamedTuple):
    """How fast one engine answers in one precision, for batches of one size."""

    engine: Kind
    precision: Precision
    batch: int
    images_per_second: float
    """Images answered in the time spent."""
    median: float
    """Milliseconds from a batch to its answer."""
    p95: float
    """Milliseconds within which 95 of 100 batches are answered."""
    calls: int
    change: float
    """By how much a probability differs from torch's in float32, at most, on random images."""


class LeftOut(NamedTuple):
    """What was not measured, and why."""

    engine: Kind
    precision: Precision | None
    """None: in no precision."""
    batch: int | None
    """None: no size of batch."""
    reason: str


class Bench(NamedTuple):
    """What was measured."""

    cells: list[Cell]
    left_out: list[LeftOut]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it."""
        return {
            "cells": [cell._asdict() for cell in self.cells],
            "left_out": [left._asdict() for left in self.left_out],
        }


@dataclass
class _Running:
    """A cell that is being measured."""

    engine: Engine
    pixels: Tensor
    change: float
    times: list[float] = field(default_factory=list)

    def spend(self, seconds: float) -> None:
        """Ask for so long, at least once."""
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


def measure(
    model: ViT,
    preprocess: Preprocess,
    *,
    device: torch.device,
    engines: Sequence[Kind] = get_args(Kind),
    precisions: Sequence[Precision] | None = None,
    batches: Sequence[int] = BATCHES,
    seconds: float = 2.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Bench:
    """Measure a model with random images; `seconds` is what each cell gets.

    What cannot be opened (a package that is not installed, a precision that a processor does not know) is listed with
    its reason. Without `precisions` float32 and bf16 are measured, and fp16 where there is a GPU.
    """
    _check(batches, seconds)
    usual: tuple[Precision, ...] = ("float32", "bf16", "fp16") if device.type == "cuda" else ("float32", "bf16")
    told = on_progress or _tell_nobody
    with quiet():  # bf16 on a processor without it warns at length
        opened, left_out = _open_all(model, preprocess, device, engines, precisions or usual)
        exact = open_engine(model, preprocess, device=device)
        running, not_run = _start_all(opened, exact, model, batches, seconds)
        for number in range(ROUNDS):
            for place, cell in enumerate(running):
                # A call may take longer than its share of a round; the cell then sits out until its time has come.
                if sum(cell.times) <= seconds * number / ROUNDS:
                    cell.spend(seconds / ROUNDS)
                told(number * len(running) + place + 1, ROUNDS * len(running))
    return Bench([cell.result() for cell in running], [*left_out, *not_run])


def _check(batches: Sequence[int], seconds: float) -> None:
    if not batches or min(batches) < 1:
        raise ConfigError(f"the sizes of batches are {', '.join(map(str, batches)) or 'none'}; give numbers from 1 on")
    if not 0 < seconds < 3600:
        raise ConfigError(f"a cell should take {seconds} seconds; choose more than 0 and less than 3600")


def _open_all(
    model: ViT,
    preprocess: Preprocess,
    device: torch.device,
    engines: Sequence[Kind],
    precisions: Sequence[Precision],
) -> tuple[list[Engine], list[LeftOut]]:
    opened: list[Engine] = []
    left_out: list[LeftOut] = []
    for kind in dict.fromkeys(engines):
        for precision in dict.fromkeys(precisions):
            try:
                opened.append(open_engine(model, preprocess, kind=kind, precision=precision, device=device))
            except VitrailError as error:
                left_out.append(LeftOut(kind, precision, None, str(error)))
    return opened, _joined(left_out)


def _joined(left_out: list[LeftOut]) -> list[LeftOut]:
    """Say only once why an engine cannot be opened in any precision."""
    told: dict[tuple[str, str], list[LeftOut]] = {}
    for left in left_out:
        told.setdefault((left.engine, left.reason), []).append(left)
    return [same[0] if len(same) == 1 else same[0]._replace(precision=None) for same in told.values()]


def _start_all(
    opened: list[Engine], exact: Engine, model: ViT, batches: Sequence[int], seconds: float
) -> tuple[list[_Running], list[LeftOut]]:
    """Call every cell twice, which prepares memory and kernels; leave out what would take too long, or answers nothing.

    A batch is made only when it is known to be worth it, since one that is too slow may be too large for memory, too.
    """
    few = _images(model, 4)
    wanted = exact(few).softmax(dim=-1)
    made: dict[int, Tensor] = {}
    running: list[_Running] = []
    not_run: list[LeftOut] = []
    for engine in opened:
        change = float((engine(few).softmax(dim=-1) - wanted).abs().max())
        if math.isnan(change):
            not_run.append(LeftOut(engine.kind, engine.precision, None, "its answers are not finite numbers"))
            continue
        for_one = _timed(engine, few) / len(few)
        for batch in sorted(set(batches)):
            if for_one * batch > TOO_SLOW * seconds:
                why = f"a batch of {batch:,} would take about {_said(for_one * batch)}; allow more with --seconds"
                not_run.append(LeftOut(engine.kind, engine.precision, batch, why))
                continue
            if batch not in made:
                made[batch] = _images(model, batch)
            pixels = made[batch]
            # The first call of a size may compile, or record a graph, and says nothing about larger ones.
            for_one = min(_timed(engine, pixels) for _ in range(2)) / batch
            running.append(_Running(engine, pixels, change))
    return running, not_run


def _said(seconds: float) -> str:
    return f"{seconds:,.0f} seconds" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _timed(engine: Engine, pixels: Tensor) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    engine(pixels)
    return time.perf_counter() - start


def _images(model: ViT, count: int) -> Tensor:
    """Return random images, laid out in memory as decoded ones are: channels last."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, *config.image_size, config.channels), dtype=torch.uint8, generator=generator)
    return pixels.permute(0, 3, 1, 2)


def _tell_nobody(done: int, total: int) -> None:
    del done, total
