"""The random numbers of a position: always the same, and independent of all others."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitrail.data.augmentation.draws import _AUGMENTATION, LAST_POSITION, LAST_SEED, below, between, draws
from vitrail.errors import InputError

# Fixed seeds, a hundred or so such tests: a sound sample fails one of them with a probability of about a tenth, once.
CHANCE = 0.001
# Philox is integer arithmetic: these numbers are the same on every CPU.
KNOWN = {
    (0, 0, _AUGMENTATION): (18_398_473_809_109_078_885, 2_979_651_883_497_314_615),
    (0, 1, _AUGMENTATION): (8_762_852_250_763_100_532, 585_092_396_059_269_990),
    (1, 0, _AUGMENTATION): (2_557_303_023_138_943_212, 12_306_382_420_242_391_525),
    (0, 0, "mixing"): (11_180_202_682_633_680_642, 1_443_405_598_972_368_407),
    (LAST_SEED, LAST_POSITION, _AUGMENTATION): (538_856_883_629_443_019, 12_791_201_271_545_909_185),
}


def raw(seed: int, position: int, purpose: str = _AUGMENTATION, count: int = 2) -> tuple[int, ...]:
    return tuple(int(number) for number in draws(seed, position, purpose).bit_generator.random_raw(count))


@pytest.mark.parametrize("place", KNOWN, ids=str)
def test_known_numbers(place: tuple[int, int, str]) -> None:
    assert raw(*place) == KNOWN[place]


@settings(derandomize=True, deadline=None)
@given(st.integers(0, LAST_SEED), st.integers(0, LAST_POSITION), st.text(max_size=40))
def test_the_key_is_seed_and_position(seed: int, position: int, purpose: str) -> None:
    generator = draws(seed, position, purpose)
    state = generator.bit_generator.state["state"]
    assert [int(word) for word in state["key"]] == [seed, position]
    assert [int(word) for word in state["counter"]][:2] == [0, 0]
    plain = np.random.Generator(np.random.Philox(key=state["key"], counter=state["counter"]))
    assert np.array_equal(generator.random(8), plain.random(8))


def test_earlier_draws_do_not_matter() -> None:
    expected = draws(5, 7).random(4)
    other = draws(5, 6)
    other.random(1000)
    np.random.default_rng(0).random(10)
    draws(5, 7).random(3)
    assert np.array_equal(draws(5, 7).random(4), expected)


def test_positions_do_not_overlap() -> None:
    numbers = {raw(seed, position, purpose, 1) for seed in range(10) for position in range(100) for purpose in "abc"}
    assert len(numbers) == 3000


def test_first_draws_are_uniform_over_positions() -> None:
    firsts = np.array([draws(3, position).random(8) for position in range(20_000)])
    for column in firsts.T:
        assert stats.kstest(column, "uniform").pvalue > CHANCE
    assert abs(np.corrcoef(firsts[:-1, 0], firsts[1:, 0])[0, 1]) < 0.03
    assert abs(np.corrcoef(firsts.T) - np.eye(8)).max() < 0.03


def test_the_hash_seed_does_not_matter() -> None:
    code = "from vitrail.data.augmentation.draws import draws; print(draws(1, 2, 'x').bit_generator.random_raw())"
    runs = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("1", "2")
    ]
    assert {run.stdout.decode().strip() for run in runs} == {str(raw(1, 2, "x", 1)[0])}


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (LAST_SEED + 1, 0), (0, -1), (0, LAST_POSITION + 1)])
def test_out_of_range(seed: int, position: int) -> None:
    with pytest.raises(InputError, match=f"seed {seed} and position {position}"):
        draws(seed, position)


def test_draws_are_uniform() -> None:
    generator = draws(0, 0, "test")
    whole = np.bincount([below(generator, 7) for _ in range(20_000)], minlength=7)
    assert len(whole) == 7
    assert stats.chisquare(whole).pvalue > CHANCE
    numbers = [between(generator, -2.0, 5.0) for _ in range(20_000)]
    assert stats.kstest(numbers, stats.uniform(-2, 7).cdf).pvalue > CHANCE


def test_below_excludes_the_end() -> None:
    class Largest:
        def random(self) -> float:
            return float(np.nextafter(1.0, 0.0))

    for end in (1, 2, 3, 7, 1000, 2**20 + 1, 2**53, 2**53 - 1):
        assert below(Largest(), end) == end - 1
