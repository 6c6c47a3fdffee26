"""Schedules against their definitions, and properties of all of them."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.training.optimizers import Schedule, learning_rate, warmup_of, weight_decay_at

KINDS = ("cosine", "linear", "constant")


def rates(schedule: Schedule, total: int, peak: float) -> list[float]:
    return [learning_rate(schedule, step, total, peak) for step in range(total)]


def test_cosine_matches_the_definition() -> None:
    """The plain baseline: 10,000 warm-up steps, then half a cosine to 0."""
    schedule, total = Schedule(kind="cosine", warmup_steps=10_000), 112_603
    for step in (0, 1, 4_999, 9_999, 10_000, 10_001, 61_301, 112_602):
        if step < 10_000:
            expected = 1e-3 * (step + 1) / 10_000
        else:
            expected = 1e-3 * 0.5 * (1 + math.cos(math.pi * (step - 10_000) / (total - 10_000)))
        assert learning_rate(schedule, step, total, 1e-3) == pytest.approx(expected, rel=1e-12)


def test_linear_ends_at_googles_1e_5() -> None:
    schedule, total, peak = Schedule(kind="linear", warmup_steps=10_000, end_lr=1e-5), 100_000, 8e-4
    for step in (10_000, 10_001, 55_000, 99_999, 100_000):
        progress = (step - 10_000) / (total - 10_000)
        expected = 1e-5 + (peak - 1e-5) * (1 - progress)
        assert learning_rate(schedule, step, total, peak) == pytest.approx(expected, rel=1e-12)
    assert learning_rate(schedule, total, total, peak) == 1e-5


def test_constant_stays_at_the_peak() -> None:
    assert rates(Schedule(kind="constant", warmup_steps=2), 6, 0.5) == [0.25, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_the_end_as_a_fraction_of_the_peak() -> None:
    for kind in ("cosine", "linear"):
        assert learning_rate(Schedule(kind=kind, end=0.1), 10, 10, 2.0) == pytest.approx(0.2)
        assert learning_rate(Schedule(kind=kind, end=1.0), 7, 10, 2.0) == pytest.approx(2.0)


def test_without_warmup_the_first_step_is_at_the_peak() -> None:
    for kind in KINDS:
        assert learning_rate(Schedule(kind=kind), 0, 10, 0.3) == 0.3


@given(
    kind=st.sampled_from(KINDS),
    total=st.integers(1, 300),
    fraction=st.floats(0, 0.999),
    end=st.floats(0, 1),
    peak=st.floats(1e-6, 10),
)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_rises_to_the_peak_then_falls(kind: str, total: int, fraction: float, end: float, peak: float) -> None:
    schedule = Schedule(kind=kind, warmup_fraction=fraction, end=0.0 if kind == "constant" else end)
    warmup, result = warmup_of(schedule, total), rates(schedule, total, peak)
    assert 0 <= warmup < total
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in result)
    assert result[warmup] == pytest.approx(peak, rel=1e-12)
    assert all(before < after for before, after in pairwise(result[:warmup]))
    assert all(before >= after * (1 - 1e-12) for before, after in pairwise(result[warmup:]))
    # No jumps: warm-up steps are peak / warm-up, decay steps at most π / 2 times those of a linear decay.
    rise, fall = peak / max(warmup, 1), peak * math.pi / 2 / (total - warmup)
    assert all(-fall * (1 + 1e-9) <= after - before <= rise * (1 + 1e-9) for before, after in pairwise(result))


@given(step=st.integers(0, 10**6))
@settings(derandomize=True, deadline=None, max_examples=30)
def test_after_the_end_the_learning_rate_is_constant(step: int) -> None:
    assert learning_rate(Schedule(end=0.01), 50 + step, 50, 1.0) == pytest.approx(0.01)


def test_weight_decay_is_constant_or_a_cosine_without_warmup() -> None:
    assert [weight_decay_at(Schedule(), step, 4, 0.05) for step in range(4)] == [0.05] * 4
    schedule, total = Schedule(kind="linear", warmup_steps=2, end_weight_decay=0.4), 100
    for step in (0, 1, 25, 50, 99, 100, 200):
        # The schedule in the authors' code of DINO.
        progress = min(step, total) / total
        expected = 0.4 + 0.5 * (0.04 - 0.4) * (1 + math.cos(math.pi * progress))
        assert weight_decay_at(schedule, step, total, 0.04) == pytest.approx(expected, rel=1e-12)


def test_warmup_fraction_and_steps_agree() -> None:
    assert rates(Schedule(warmup_fraction=0.1), 50, 1.0) == rates(Schedule(warmup_steps=5), 50, 1.0)


@pytest.mark.parametrize(
    ("fraction", "total", "warmup"),
    [(0.1, 14, 1), (0.1, 16, 2), (0.1, 4, 0), (0.99, 10, 9), (0.5, 1, 0), (0.9, 2, 1)],
)
def test_a_fraction_is_rounded_to_steps_and_leaves_one_at_the_peak(fraction: float, total: int, warmup: int) -> None:
    assert warmup_of(Schedule(warmup_fraction=fraction), total) == warmup
    result = rates(Schedule(warmup_fraction=fraction), total, 1.0)
    assert result[warmup] == 1.0
    assert all(rate == pytest.approx((step + 1) / warmup) for step, rate in enumerate(result[:warmup]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"warmup_steps": 5, "warmup_fraction": 0.1}, "warmup_steps is 5 and warmup_fraction is 0.1"),
        ({"end": 0.1, "end_lr": 1e-5}, "end is 0.1 of the peak and end_lr is 1e-05"),
        ({"kind": "constant", "end_lr": 1e-5}, "end_lr 1e-05 has no effect"),
        ({"kind": "constant", "end": 0.5}, "end 0.5 has no effect"),
        ({"kind": "cosin"}, "did you mean 'cosine'"),
        ({"warmup": 5}, "did you mean 'warmup_s"),
        ({"warmup_fraction": 1.0}, "warmup_fraction is 1.0"),
        ({"end_weight_decay": -0.1}, "end_weight_decay is -0.1"),
    ],
)
def test_contradictions_raise(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Schedule(**fields)


def test_a_run_too_short_for_its_warmup_names_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"10,000 steps does not fit into a run of 500 steps"):
        learning_rate(Schedule(warmup_steps=10_000), 0, 500, 1.0)
    with pytest.raises(ConfigError, match="at least 1 step, not 0"):
        learning_rate(Schedule(), 0, 0, 1.0)
    with pytest.raises(ConfigError, match=r"end_lr 1e-05 is above the peak 1e-06"):
        learning_rate(Schedule(end_lr=1e-5), 0, 5, 1e-6)
