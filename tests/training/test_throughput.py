"""Throughput: all images over all the time, so that the remaining time is right."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.training.display import COMPILED_STEPS, FEWEST_STEPS, WINDOW, Status, Throughput

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)
SECONDS = st.floats(1e-4, 5.0)


def row(step: int, steps: int, seconds: float, waited: float) -> dict[str, Any]:
    plain = {"step": step, "steps": steps, "epoch": 1.0, "loss": 1.0, "accuracy": 0.5, "images": 512}
    return {**plain, "seconds": seconds, "waited": waited}


def seconds_left(status: Status) -> float:
    parts = [int(part) for part in status.left.split(":")]
    return float(sum(part * 60**place for place, part in enumerate(reversed(parts))))


@PROPERTY
@given(st.lists(st.tuples(SECONDS, st.floats(0, 1.0)), min_size=1, max_size=7), st.integers(1, 60))
def test_alternating_steps_give_the_true_throughput_and_time_left(cycle: list[tuple[float, float]], turns: int) -> None:
    """One kind of step, or several alternating, after a slow first one, as with bursts of data."""
    shown, taken = Status(), len(cycle) * turns
    steps = 3 * taken + 1
    shown.update(row(1, steps, 900.0, 0.0))
    for step in range(taken):
        shown.update(row(step + 2, steps, *cycle[step % len(cycle)]))
    turn = sum(seconds + waited for seconds, waited in cycle)
    true_rate, true_left = 512 * len(cycle) / turn, 2 * turns * turn
    # A window that starts within a cycle is off by at most a fraction of it.
    off = 1e-6 if taken <= FEWEST_STEPS else len(cycle) * max(map(sum, cycle)) / shown.throughput.seconds
    assert shown.throughput.images_per_second == pytest.approx(true_rate, rel=off / (1 - min(off, 0.9)))
    assert seconds_left(shown) == pytest.approx(true_left, rel=off / (1 - min(off, 0.9)), abs=1)


def test_averaging_images_per_second_would_overestimate() -> None:
    shown = Status()
    for step in range(1, 402):
        seconds, waited = (0.02, 0.0) if step % 2 else (0.1, 0.1)
        shown.update(row(step, 801, seconds, waited))
    assert shown.throughput.images_per_second == pytest.approx(
        512 * 2 / 0.22
    )  # 4,655; the mean of 25,600 and 2,560 is 14,080
    assert "4,655 images/s" in str(shown)
    assert seconds_left(shown) == pytest.approx(400 * 0.11, abs=1)
    assert shown.waiting_fraction == pytest.approx(0.1 / 0.22, abs=0.01)


def test_throughput_covers_the_recent_past() -> None:
    throughput = Throughput()
    for seconds in [1.0] * 300 + [0.1] * 1000:
        throughput.add(images=10, seconds=seconds, waited=0.0)
    assert throughput.images_per_second == pytest.approx(100)
    assert FEWEST_STEPS < len(throughput.recent) <= math.ceil(WINDOW / 0.1) + 1
    assert throughput.all_seconds == pytest.approx(300 + 100 - 1)


def test_compilation_steps_do_not_count() -> None:
    for compiled, first in ((False, 1), (True, COMPILED_STEPS)):
        throughput = Throughput(compiled=compiled)
        for _ in range(first):
            throughput.add(images=10, seconds=100.0, waited=5.0)
            assert throughput.images_per_second is None
        throughput.add(images=10, seconds=0.5, waited=0.5)
        assert (throughput.images_per_second, throughput.waiting_fraction, throughput.total_waiting_fraction) == (
            10.0,
            0.5,
            0.5,
        )


@PROPERTY
@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), max_size=300))
def test_fractions_are_between_0_and_1(times: list[tuple[float, float]]) -> None:
    throughput = Throughput()
    for seconds, waited in times:
        throughput.add(images=8, seconds=seconds, waited=waited)
        assert 0 <= throughput.waiting_fraction <= 1
        assert 0 <= throughput.total_waiting_fraction <= 1
        assert throughput.images_per_second is None or throughput.images_per_second > 0
