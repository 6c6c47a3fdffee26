"""Few-shot least squares against the normal equations."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vitrail.inference.protocols import draw_examples, fit_least_squares

Array = NDArray[np.float64]


def reference_scores(x: Array, labels: NDArray[Any], test: Array, classes: int) -> Array:
    """Solve (XᵀX + l2 I) W = XᵀY directly."""
    mean, scale = x.mean(axis=0), x.std(axis=0) + 1e-5
    design = np.hstack([(x - mean) / scale, np.full((len(x), 1), 100.0)])
    targets = 2.0 * np.eye(classes)[labels] - 1.0
    weights = np.linalg.solve(design.T @ design + 2**10 * np.eye(design.shape[1]), design.T @ targets)
    scores: Array = np.hstack([(test - mean) / scale, np.full((len(test), 1), 100.0)]) @ weights
    return scores


@pytest.mark.parametrize(("examples", "width"), [(20, 64), (63, 64), (64, 64), (65, 64), (200, 64), (5, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_closed_form(examples: int, width: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(examples)
    offset, spread = random.normal(size=width), random.uniform(0.01, 30, width)
    x, test = (torch.tensor(offset + spread * random.normal(size=(n, width)), dtype=dtype) for n in (examples, 50))
    x[:, 3] = 0.25  # a constant feature
    labels = np.arange(examples) % 5
    actual = fit_least_squares(x, torch.tensor(labels), 5).scores(test)
    expected = reference_scores(x.double().numpy(), labels, test.double().numpy(), 5)
    assert actual.dtype == torch.float64
    assert np.abs(expected[:, :]).max() > 0.1
    # The constant feature is divided by 1e-5, so a test image where it differs could have arbitrarily large scores.
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_one_example_per_class_is_enough() -> None:
    x = torch.randn(4, 30)
    fitted = fit_least_squares(x, torch.arange(4), 4)
    assert fitted.scores(x).argmax(dim=1).tolist() == [0, 1, 2, 3]


def test_examples_are_drawn_per_class_and_deterministically() -> None:
    labels = np.random.default_rng(0).integers(0, 7, 500)
    for seed in range(3):
        five, ten = draw_examples(labels, 5, seed), draw_examples(labels, 10, seed)
        assert np.bincount(labels[five]).tolist() == [5] * 7
        assert set(five) <= set(ten)
        assert len(set(ten)) == 70
        np.testing.assert_array_equal(ten, draw_examples(labels, 10, seed))
    assert set(draw_examples(labels, 5, 0)) != set(draw_examples(labels, 5, 1))
