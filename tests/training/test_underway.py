"""Which waits for images count."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training.plain_loop import batches

from vitrail.training.step import Taken
from vitrail.training.underway import Underway


def kept(done: bool | None) -> Underway:
    """Return a step under way on a GPU that says whether it is done; None: on a processor, where it always is."""
    end: Any = None if done is None else SimpleNamespace(query=lambda: done)
    underway = Underway()
    underway.put(Taken(0, torch.zeros(3), end, 1, left_out=False, done=end), batches(1)[0], 0.1, 0.0)
    return underway


@pytest.mark.parametrize(("done", "counted"), [(False, 0.0), (True, 5.0), (None, 5.0)])
def test_a_wait_counts_unless_the_device_was_busy_all_along(done: bool | None, counted: float) -> None:
    underway = kept(done)
    assert underway.waited(5.0) == counted
    assert underway.idle == counted


def test_the_first_wait_counts() -> None:
    assert Underway().waited(5.0) == 5.0
