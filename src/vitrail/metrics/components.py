"""Principal components of rows of numbers: the directions in which they differ most."""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import InputError

ROUNDING = 1e-10
"""Directions whose singular value is below this fraction of the first are rounding noise."""


class PrincipalComponents(NamedTuple):
    """The principal components of rows (N, D), by decreasing variance; float64, on the CPU."""

    mean: Tensor
    """(D,)."""
    directions: Tensor
    """(K, D), each of length 1; the sign makes its largest weight positive."""
    explained: Tensor
    """(K,), the fraction of the variance that each explains."""

    def project(self, rows: Tensor) -> Tensor:
        """Return the coordinates (…, K) of rows (…, D)."""
        return (rows.detach().double().cpu() - self.mean) @ self.directions.T


def principal_components(rows: Tensor, count: int) -> PrincipalComponents:
    """Return the first `count` principal components of rows (N, D); fewer if the rows span fewer dimensions."""
    if rows.ndim != 2 or 0 in rows.shape:
        raise InputError(f"expected rows (N, D), found a tensor of shape {tuple(rows.shape)}")
    if count < 1:
        raise InputError(f"count is {count}; it should be 1 or more")
    if not rows.isfinite().all():
        raise InputError("the rows contain NaN or infinity")
    rows = rows.detach().double().cpu()
    mean = rows.mean(dim=0)
    _, spread, directions = torch.linalg.svd(rows - mean, full_matrices=False)
    # Relative to the rows as well: the mean of equal rows may differ from them in the last bit.
    least = max(float(spread[0]) * ROUNDING, float(rows.abs().max()) * 1e-12)
    chosen = directions[: min(count, int((spread > least).sum()))]
    largest = chosen.gather(1, chosen.abs().argmax(dim=1, keepdim=True))
    explained = spread.square() / spread.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    return PrincipalComponents(mean, chosen * torch.where(largest < 0, -1.0, 1.0), explained[: len(chosen)])


def as_colours(coordinates: Tensor, *, quantile: float = 0.01) -> Tensor:
    """Map the first three coordinates of rows (…, K) to colours (…, 3) from 0 to 1.

    Each is scaled by its own quantiles, so that a few extreme rows do not make the others grey. A missing coordinate is
    0.5 everywhere.
    """
    values = coordinates[..., :3].double()
    missing = values.new_zeros((*values.shape[:-1], 3 - values.shape[-1]))
    values = torch.cat([values, missing], dim=-1)
    low, high = (values.flatten(0, -2).quantile(at, dim=0) for at in (quantile, 1 - quantile))
    tiny = torch.finfo(torch.float64).tiny
    return torch.where(high > low, ((values - low) / (high - low).clamp(min=tiny)).clamp(0, 1), 0.5)
