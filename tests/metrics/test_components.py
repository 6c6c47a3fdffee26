"""Principal components: against NumPy's SVD, and as colours."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import InputError
from vitrail.metrics.components import as_colours, principal_components


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(1, 20), st.integers(1, 8), st.integers(0, 2**31))
def test_directions_and_variance_are_those_of_numpy(rows: int, width: int, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(3, 2, (rows, width))
    found = principal_components(torch.from_numpy(values), count)
    _, spread, directions = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
    kept = min(count, rows - 1, width)
    assert found.directions.shape == (kept, width)
    np.testing.assert_allclose(found.explained, (spread**2 / (spread**2).sum())[:kept], atol=1e-12)
    # A direction has no sign, and nearly equal ones mix: compare the lengths of their projections.
    np.testing.assert_allclose((found.directions.numpy() @ directions.T) ** 2 @ spread**2, spread[:kept] ** 2)
    np.testing.assert_allclose(found.directions @ found.directions.T, np.eye(kept), atol=1e-10)
    coordinates = found.project(torch.from_numpy(values))
    np.testing.assert_allclose(coordinates.mean(dim=0), 0, atol=1e-10)
    np.testing.assert_allclose(coordinates.norm(dim=0), spread[:kept])


def test_the_largest_weight_is_positive() -> None:
    rows = torch.tensor([[0.0, -2.0, 0.5], [0.0, 2.0, -0.5]])
    assert principal_components(rows, 1).directions[0, 1] > 0
    assert torch.equal(principal_components(-rows, 1).directions, principal_components(rows, 1).directions)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_equal_rows_have_no_components(value: float) -> None:
    found = principal_components(torch.full((7, 5), value), 3)
    assert found.directions.shape == (0, 5)
    assert found.explained.shape == (0,)
    assert torch.equal(as_colours(found.project(torch.full((7, 5), value))), torch.full((7, 3), 0.5).double())


def test_colours_span_the_range_and_ignore_extremes() -> None:
    rows = torch.cat([torch.linspace(-1, 1, 998), torch.tensor([50.0, -50.0])])[:, None].repeat(1, 2)
    colours = as_colours(rows)
    assert colours.shape == (1000, 3)
    assert (float(colours.min()), float(colours.max())) == (0, 1)
    assert colours[:998, 0].std() > 0.25  # not all near the middle
    assert torch.equal(colours[:, 2], torch.full((1000,), 0.5).double())  # there are two coordinates only


@pytest.mark.parametrize(
    ("rows", "count", "words"),
    [
        (torch.zeros(3), 1, r"expected rows \(N, D\)"),
        (torch.zeros(0, 3), 1, r"expected rows \(N, D\)"),
        (torch.zeros(3, 3), 0, "1 or more"),
        (torch.full((3, 3), torch.nan), 1, "NaN or infinity"),
    ],
)
def test_bad_input_is_named(rows: torch.Tensor, count: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        principal_components(rows, count)
