"""Token merging (ToMe, arXiv 2210.09461): each block merges a few patches into similar ones.

    tokens (B, T, D), their sizes in patches (B, T)  ->  tokens (B, T - r, D), their sizes (B, T - r)

Patches are assigned alternately to two sets. Each patch of the first set is matched to the most similar key in the
second; the `r` best matches are merged, as a mean weighted by size. Special tokens are never merged. The output differs
from the model's: evaluate what the speed costs in accuracy.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.models.checks import as_int
from vitrail.models.config import ViTConfig


@dataclass(frozen=True)
class Merging:
    """Token merging options."""

    tokens: int
    """How many tokens each block merges."""
    proportional: bool = True
    """Proportional attention: weight a token by its size, so that merging equal patches changes nothing. Models trained
    without merging need it."""


def read_merging(tokens: int, config: ViTConfig, merges: int) -> Merging | None:
    """Check how many tokens each of `merges` blocks should merge; None for 0."""
    number = as_int(tokens)
    if number is None or number < 0:
        raise ConfigError(f"merge is {tokens!r}; use the number of tokens to merge per block, 0 or more")
    if not number:
        return None
    if config.pool not in ("cls", "mean") or (config.pool == "mean" and config.distillation_token):
        raise ConfigError(
            "token merging needs a head that reads the class token, or the mean of all tokens; use merge=0"
        )
    limit = config.patches // (merges + 1)  # a block merges at most half of its patches, also the last one
    if number > limit:
        raise ConfigError(
            f"merge is {number}, too many for {config.patches} patches and {merges} blocks; choose up to {limit}"
        )
    return Merging(number)


def merge(
    x: Tensor, sizes: Tensor | None, keys: Tensor, count: int, *, before: int, after: int
) -> tuple[Tensor, Tensor]:
    """Merge `count` of the patches among tokens x (B, T, D), and return the tokens with their sizes (B, T - count).

    `keys` (B, T, heads, width) are attention's keys. `sizes` None means one patch each. `before` and `after` are the
    numbers of special tokens at either end.
    """
    T, wide = x.shape[1], torch.float64 if x.dtype == torch.float64 else torch.float32
    if sizes is None:
        sizes = x.new_ones(x.shape[:2], dtype=wide)
    target = _targets(keys[:, before : T - after].mean(dim=2, dtype=wide), count)
    targets = torch.arange(T, device=x.device).repeat(len(x), 1)
    targets[:, before : T - after] = before + target
    targets[:, T - after :] -= count
    merged = sizes.new_zeros(len(x), T - count).scatter_add_(1, targets, sizes)
    weight = (sizes / merged.gather(1, targets)).to(x.dtype)
    # As a matmul: each row of the matrix gives one new token. Scattered sums are not deterministic, which does
    # not matter for sizes, because they are integers.
    assigned = targets[:, None, :] == torch.arange(T - count, device=x.device)[None, :, None]
    return (assigned * weight[:, None, :]) @ x, merged


def log_sizes(sizes: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the bias of proportional attention, (B, 1, 1, T)."""
    return None if sizes is None else sizes.log().to(dtype)[:, None, None, :]


def weighted_mean(tokens: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean of tokens (B, T, D), weighted by size."""
    return (tokens * sizes[:, :, None]).sum(dim=1) / sizes.sum(dim=1, keepdim=True)


def _targets(keys: Tensor, count: int) -> Tensor:
    """Return for keys (B, P, width) the index of the new token that each patch becomes or joins: (B, P)."""
    keys = F.normalize(keys, dim=-1)
    first, second = keys[:, ::2], keys[:, 1::2]
    similarity, partner = (first @ second.transpose(1, 2)).max(dim=2)
    merged = similarity.topk(count, dim=1).indices
    is_merged = torch.zeros_like(partner, dtype=torch.bool).scatter_(
        1, merged, torch.ones_like(merged, dtype=torch.bool)
    )
    left = first.shape[1] - count  # the first set comes before the second
    target = keys.new_empty(keys.shape[:2], dtype=torch.long)
    target[:, ::2] = torch.where(is_merged, left + partner, (~is_merged).cumsum(dim=1) - 1)
    target[:, 1::2] = left + torch.arange(second.shape[1], device=keys.device)
    return target
