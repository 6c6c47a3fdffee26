"""The learning rate as a pure function of the step: nothing to save, nothing to step forward.

rate
peak │    ╭───╮
     │   ╱     ╲
     │  ╱       ╲        warm-up: (step + 1) / warm-up of the peak, so that the first step is not wasted
 end │ ╱         ╲___    then from the peak towards the end, which step = total would reach
     └─────────────────
       warm-up    total
"""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vitrail.errors import ConfigError
from vitrail.schema import Frozen, Rate

Steps = Annotated[int, Field(ge=0, le=10**9)]
"""A number of optimiser steps."""


class Schedule(Frozen):
    """How the learning rate rises and falls over a run."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """The way down after the warm-up; `constant` stays at the peak."""
    warmup_steps: Steps | None = None
    """Steps of warm-up. None: what `warmup_share` says, or none."""
    warmup_share: Rate | None = None
    """Warm-up as a share of the run, instead of a number of steps."""
    end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What the rate falls to, as a share of the peak."""
    end_lr: Annotated[float, Field(ge=0)] | None = None
    """What the rate falls to, as a learning rate; instead of `end`. Google's linear schedule ends at 1e-5."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if self.warmup_steps is not None and self.warmup_share is not None:
            raise ConfigError(
                f"warmup_steps is {self.warmup_steps} and warmup_share is {self.warmup_share}; leave one of them out"
            )
        if self.end and self.end_lr is not None:
            raise ConfigError(f"end is {self.end} of the peak and end_lr is {self.end_lr}; leave one of them out")
        if self.kind == "constant" and (self.end or self.end_lr is not None):
            name, value = ("end", self.end) if self.end else ("end_lr", self.end_lr)
            raise ConfigError(f"{name} {value} means nothing with kind 'constant'; leave it out, or use kind 'linear'")
        return self


def warmup_of(schedule: Schedule, total: int) -> int:
    """Return the steps of warm-up in a run of `total` steps."""
    if total < 1:
        raise ConfigError(f"a run needs at least 1 step, not {total}")
    if schedule.warmup_share is not None:
        # However short the run is, one step of it stands at the peak.
        return min(round(schedule.warmup_share * total), total - 1)
    steps = schedule.warmup_steps or 0
    if steps >= total:
        raise ConfigError(
            f"a warm-up of {steps:,} steps does not fit into a run of {total:,} steps; shorten warmup_steps, give "
            f"warmup_share instead, or train longer"
        )
    return steps


def learning_rate(schedule: Schedule, step: int, total: int, peak: float) -> float:
    """Return the learning rate of step `step` (from 0) in a run of `total` steps that peaks at `peak`.

    >>> learning_rate(Schedule(kind="linear", warmup_steps=2), step=5, total=8, peak=1.0)
    0.5
    """
    warmup = warmup_of(schedule, total)
    end = _end_of(schedule, peak)
    if step < warmup:
        return peak * (step + 1) / warmup
    left = 1 - min((step - warmup) / (total - warmup), 1.0)
    match schedule.kind:
        case "cosine":
            return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * (1 - left)))
        case "linear":
            return end + (peak - end) * left
        case "constant":
            return peak


def _end_of(schedule: Schedule, peak: float) -> float:
    """Return the learning rate a run ends at."""
    if schedule.end_lr is None:
        return schedule.end * peak
    if schedule.end_lr > peak:
        raise ConfigError(f"end_lr {schedule.end_lr} lies above the peak {peak}; lower it, or raise the learning rate")
    return schedule.end_lr
