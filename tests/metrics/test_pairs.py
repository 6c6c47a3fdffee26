"""Paired comparison, against SciPy's binomial test and by hand."""

import numpy as np
import pytest
from scipy.stats import binomtest

from vitrail.errors import InputError
from vitrail.metrics.intervals import exact_mcnemar, paired


@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1), (1, 7), (5, 5), (40, 61), (3000, 2800), (0, 5000)])
def test_p_value_is_that_of_the_binomial_test(a: int, b: int) -> None:
    expected = binomtest(a, a + b, 0.5).pvalue if a + b else 1.0
    assert exact_mcnemar(a, b) == pytest.approx(expected, rel=1e-8, abs=1e-300)


def test_counts_and_difference() -> None:
    first, second = np.array([1, 1, 1, 0, 0], bool), np.array([1, 0, 1, 1, 1], bool)
    result = paired(first, second)
    assert (result.both, result.only_first, result.only_second, result.neither) == (2, 1, 2, 0)
    assert result.difference == pytest.approx(0.2)
    assert result.interval.low <= 0.2 <= result.interval.high


def test_different_images_are_an_error() -> None:
    with pytest.raises(
        InputError, match=r"predictions of shape \(3,\) and \(4,\); pass one per image, for the same images"
    ):
        paired(np.zeros(3, bool), np.zeros(4, bool))


def test_identical_predictions_have_a_non_empty_interval() -> None:
    for images in (1, 5, 100, 2000):
        right = np.ones(images, bool)
        low, high = paired(right, right).interval
        assert -1 <= low < 0 < high <= 1
        assert high - low > 3 / (images + 2)
    with pytest.raises(InputError, match="no images to compare two classifiers on"):
        paired(np.zeros(0, bool), np.zeros(0, bool))


def test_the_interval_of_a_difference_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        first, second = rng.random(80) < 0.95, rng.random(80) < 0.9
        covered += paired(first, second).interval.low <= -0.05 <= paired(first, second).interval.high
    assert covered / 400 > 0.93
