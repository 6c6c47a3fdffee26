"""Diversity of features: the two kinds of collapse, and bounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitrail.errors import InputError
from vitrail.metrics.features import effective_rank, feature_diversity

SIZES = st.integers(1, 12)


def random(rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(rows=SIZES, width=SIZES, seed=st.integers(0, 1000))
@settings(deadline=None, derandomize=True)
def test_identical_features_are_collapsed(rows: int, width: int, seed: int) -> None:
    rank, spread = feature_diversity(random(1, width, seed).expand(rows, -1))
    assert rank == pytest.approx(1, abs=1e-6)
    assert spread == pytest.approx(0, abs=1e-12)


@given(rows=SIZES, extra=st.integers(0, 5), seed=st.integers(0, 1000))
@settings(deadline=None, derandomize=True)
def test_orthonormal_features_have_full_rank(rows: int, extra: int, seed: int) -> None:
    features = torch.linalg.qr(random(rows + extra, rows, seed)).Q.T
    assert feature_diversity(features).rank == pytest.approx(rows)


@given(rows=SIZES, width=SIZES, seed=st.integers(0, 1000))
@settings(deadline=None, derandomize=True)
def test_bounds_and_invariance(rows: int, width: int, seed: int) -> None:
    features = random(rows, width, seed)
    rank, spread = feature_diversity(features)
    assert 1 - 1e-9 <= rank <= min(rows, width) + 1e-9
    assert 0 <= spread <= width**-0.5 + 1e-9
    scaled = features * (1 + torch.arange(rows)[:, None])
    assert feature_diversity(scaled) == pytest.approx((rank, spread))
    rotated = features @ torch.linalg.qr(random(width, width, seed + 1)).Q
    assert feature_diversity(rotated).rank == pytest.approx(rank)


def test_few_directions_are_collapsed() -> None:
    """Features that differ, but on a line, keep their spread and lose their rank."""
    signs = torch.tensor([1.0, -1.0]).repeat(50)[:, None]
    rank, spread = feature_diversity(signs * torch.full((1, 16), 0.3))
    assert rank == pytest.approx(1, abs=1e-6)
    assert spread == pytest.approx(0.25)


def test_the_sphere_is_covered_evenly() -> None:
    rank, spread = feature_diversity(random(4000, 16, 0))
    assert spread == pytest.approx(16**-0.5, rel=0.01)
    assert rank == pytest.approx(16, rel=0.01)


def test_zero_features() -> None:
    assert feature_diversity(torch.zeros(3, 4)) == (0, 0)
    assert effective_rank(torch.diag(torch.tensor([3.0, 3.0, 0.0]))) == pytest.approx(2)


@pytest.mark.parametrize(
    ("features", "message"),
    [(torch.zeros(3), r"shape \(3,\)"), (torch.zeros(0, 4), "shape"), (torch.full((2, 2), torch.nan), "NaN")],
)
def test_refusals(features: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        feature_diversity(features)
