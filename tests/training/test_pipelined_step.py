"""Which waits for data count, and when a step is finished."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.memory_jobs import job
from tests.support.plain_loss import plain_loss
from tests.support.reference_training import batches, begin, tiny

from vitrail.data.batches import Batch
from vitrail.training import pipeline
from vitrail.training.optimizers import weight_decay_at
from vitrail.training.pipeline import LaunchedStep, PipelinedStepper
from vitrail.training.step import PendingStep, Stepper


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pipeline, "time", clock)
    return clock


@pytest.fixture
def stepper(tmp_path: Path, clock: Clock) -> Iterator[PipelinedStepper]:
    """A tiny model on the CPU; time passes only as the test says."""
    planned = job(batch=8, optimizer={"lr": 0.01})
    recipe, context = planned.plan.recipe, planned.context
    step = Stepper(recipe, planned.plan.preprocess, context.device, "float32", plain_loss(recipe), context.ranks)
    with PipelinedStepper(planned, step, begin(tiny(), recipe), tmp_path) as stepper:
        yield stepper


def arriving(count: int, clock: Clock, seconds: float) -> Iterator[Batch]:
    """Yield batches, each after some seconds."""
    for batch in batches(count):
        clock.now += seconds
        yield batch


def launched(done: bool | None) -> LaunchedStep:
    """Return a launched GPU step that is `done` or not; None: a step on a CPU, which is always done."""
    end: Any = None if done is None else SimpleNamespace(query=lambda: done)
    return LaunchedStep(PendingStep(0, torch.zeros(3), end, 1, may_skip=False, done=end), batches(1)[0], 0.1, 0.0)


@pytest.mark.parametrize(("done", "counted"), [(False, 0.0), (True, 5.0), (None, 5.0)])
def test_a_wait_counts_unless_the_device_was_busy_throughout(
    done: bool | None, counted: float, stepper: PipelinedStepper, clock: Clock
) -> None:
    stepper.launched = launched(done)
    next(stepper.timed(arriving(1, clock, 5.0)))
    assert (stepper.waited, stepper.idle) == (counted, counted)


def test_a_step_on_the_cpu_is_finished_at_once_and_timed_without_its_wait(
    stepper: PipelinedStepper, clock: Clock
) -> None:
    finished = []
    for batch in stepper.timed(arriving(3, clock, 5.0)):
        clock.now += 2.0
        finished += stepper.step(batch)
    assert [(step.step, step.waited, step.seconds) for step in finished] == [(n, 5.0, 2.0) for n in (1, 2, 3)]
    assert stepper.flush() == []


def test_what_comes_after_a_flush_is_not_a_part_of_the_next_step(stepper: PipelinedStepper, clock: Clock) -> None:
    finished = []
    for batch in stepper.timed(arriving(2, clock, 5.0)):
        clock.now += 2.0
        finished += [*stepper.step(batch), *stepper.flush()]
        clock.now += 60.0  # validation
    assert [(step.waited, step.seconds) for step in finished] == [(5.0, 2.0), (5.0, 2.0)]


def test_each_step_has_its_weight_decay_on_kernels_only(tmp_path: Path) -> None:
    planned = job(batch=8, optimizer={"lr": 0.01, "weight_decay": 0.04}, schedule={"end_weight_decay": 0.4})
    recipe, context = planned.plan.recipe, planned.context
    step = Stepper(recipe, planned.plan.preprocess, context.device, "float32", plain_loss(recipe), context.ranks)
    with PipelinedStepper(planned, step, begin(tiny(), recipe), tmp_path) as stepper:
        for number, batch in enumerate(batches(2)):
            stepper.step(batch)
            expected = weight_decay_at(recipe.schedule, number, planned.plan.steps, 0.04)
            groups = {group["name"]: group["weight_decay"] for group in stepper.state.optimizer.param_groups}
            assert groups == {"decay": expected, "no_decay": 0.0}
    assert expected > 0.04
