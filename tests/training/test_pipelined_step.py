"""Which waits for data count."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.reference_training import batches

from vitrail.training.step import PendingStep, PipelinedStep


def kept(done: bool | None) -> PipelinedStep:
    """Return a pending GPU step that is `done` or not; None: a step on a CPU, which is always done."""
    end: Any = None if done is None else SimpleNamespace(query=lambda: done)
    pipelined = PipelinedStep()
    pipelined.put(PendingStep(0, torch.zeros(3), end, 1, may_skip=False, done=end), batches(1)[0], 0.1, 0.0)
    return pipelined


@pytest.mark.parametrize(("done", "counted"), [(False, 0.0), (True, 5.0), (None, 5.0)])
def test_a_wait_counts_unless_the_device_was_busy_throughout(done: bool | None, counted: float) -> None:
    pipelined = kept(done)
    assert pipelined.waited(5.0) == counted
    assert pipelined.idle == counted


def test_the_first_wait_counts() -> None:
    assert PipelinedStep().waited(5.0) == 5.0
