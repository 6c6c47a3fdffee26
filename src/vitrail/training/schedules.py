"""The learning rate as a pure function of the step: nothing to save, nothing to advance.

lr
peak │    ╭───╮
     │   ╱     ╲
     │  ╱       ╲        warm-up: peak × (step + 1) / warm-up steps, so the first step is not wasted
 end │ ╱         ╲___    then from the peak to the end value, which step = total would reach
     └─────────────────
       warm-up    total
"""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vitrail.errors import ConfigError
from vitrail.schema import Frozen, Rate

Steps = Annotated[int, Field(ge=0, le=10**9)]
"""A number of optimizer steps."""


class Schedule(Frozen):
    """The learning rate schedule."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """The decay after the warm-up; `constant` stays at the peak."""
    warmup_steps: Steps | None = None
    """Warm-up steps. None: from `warmup_fraction`, or no warm-up."""
    warmup_fraction: Rate | None = None
    """Warm-up as a fraction of the run, instead of a number of steps."""
    end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate as a fraction of the peak."""
    end_lr: Annotated[float, Field(ge=0)] | None = None
    """Final learning rate as a value, instead of `end`. Google's linear schedule ends at 1e-5."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise ConfigError(
                f"warmup_steps is {self.warmup_steps} and warmup_fraction is {self.warmup_fraction}; leave one of them "
                f"out"
            )
        if self.end and self.end_lr is not None:
            raise ConfigError(f"end is {self.end} of the peak and end_lr is {self.end_lr}; leave one of them out")
        if self.kind == "constant" and (self.end or self.end_lr is not None):
            name, value = ("end", self.end) if self.end else ("end_lr", self.end_lr)
            raise ConfigError(f"{name} {value} has no effect with kind 'constant'; leave it out, or use kind 'linear'")
        return self


def warmup_of(schedule: Schedule, total: int) -> int:
    """Return the number of warm-up steps in a run of `total` steps."""
    if total < 1:
        raise ConfigError(f"a run needs at least 1 step, not {total}")
    if schedule.warmup_fraction is not None:
        # Even the shortest run has one step at the peak.
        return min(round(schedule.warmup_fraction * total), total - 1)
    steps = schedule.warmup_steps or 0
    if steps >= total:
        raise ConfigError(
            f"a warm-up of {steps:,} steps does not fit into a run of {total:,} steps; reduce warmup_steps, set "
            f"warmup_fraction instead, or train longer"
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
    """Return the final learning rate."""
    if schedule.end_lr is None:
        return schedule.end * peak
    if schedule.end_lr > peak:
        raise ConfigError(f"end_lr {schedule.end_lr} is above the peak {peak}; lower it, or raise the learning rate")
    return schedule.end_lr
