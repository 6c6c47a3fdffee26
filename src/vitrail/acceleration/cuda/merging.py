"""Token merging (ToMe, arXiv 2210.09461): in every block a few patches become part of the ones that they resemble.

    tokens (B, T, D), how many patches each stands for (B, T)  ->  tokens (B, T - r, D), and the same for them

Patches are dealt out alternately to two sides. Each of the first side looks for the one of the second side whose key
points most nearly the same way; the `r` that found the nearest go into it, as a mean weighted by how many patches each
stands for. The class token and other special tokens neither move nor merge. The answer is another one than the
model's: fewer tokens are fewer sums, and what they cost in accuracy is for the model to say.
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
    """How tokens are merged."""

    tokens: int
    """How many tokens fewer leave each block."""
    proportional: bool = True
    """Let attention look at a token as often as there are patches in it, so that equal patches may be merged without
    changing anything. A model that has not been trained with merging needs it."""


def read_merging(tokens: int, config: ViTConfig, merges: int) -> Merging | None:
    """Read how many tokens each of `merges` blocks is to merge; None for 0, and an error for what cannot be."""
    number = as_int(tokens)
    if number is None or number < 0:
        raise ConfigError(f"merge is {tokens!r}; give the number of tokens that each block merges, 0 or more")
    if not number:
        return None
    if config.pool not in ("cls", "mean") or (config.pool == "mean" and config.distillation_token):
        raise ConfigError(
            "tokens are merged only where the head reads the class token, or the mean of all; leave merge out"
        )
    most = config.patches // (merges + 1)  # a block merges at most half of its patches, also the last one
    if number > most:
        raise ConfigError(
            f"merge is {number}, which {config.patches} patches are too few for in {merges} blocks; choose up to {most}"
        )
    return Merging(number)


def merge(
    x: Tensor, sizes: Tensor | None, keys: Tensor, count: int, *, before: int, after: int
) -> tuple[Tensor, Tensor]:
    """Merge `count` of the patches among tokens x (B, T, D), and return the tokens with their sizes (B, T - count).

    `keys` (B, T, heads, width) are what attention compared them by. `sizes` None means one patch each. `before` and
    `after` say how many special tokens stand at either end.
    """
    T, wide = x.shape[1], torch.float64 if x.dtype == torch.float64 else torch.float32
    if sizes is None:
        sizes = x.new_ones(x.shape[:2], dtype=wide)
    target = _targets(keys[:, before : T - after].mean(dim=2, dtype=wide), count)
    places = torch.arange(T, device=x.device).repeat(len(x), 1)
    places[:, before : T - after] = before + target
    places[:, T - after :] -= count
    merged = sizes.new_zeros(len(x), T - count).scatter_add_(1, places, sizes)
    share = (sizes / merged.gather(1, places)).to(x.dtype)
    # As a product: each row of the matrix makes one new token. Scattered sums would come in another order every time,
    # which does no harm to sizes, being whole numbers.
    goes = places[:, None, :] == torch.arange(T - count, device=x.device)[None, :, None]
    return (goes * share[:, None, :]) @ x, merged


def log_sizes(sizes: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what proportional attention adds to the likeness of query and key, (B, 1, 1, T)."""
    return None if sizes is None else sizes.log().to(dtype)[:, None, None, :]


def weighted_mean(tokens: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean of tokens (B, T, D), each counted as often as there are patches in it."""
    return (tokens * sizes[:, :, None]).sum(dim=1) / sizes.sum(dim=1, keepdim=True)


def _targets(keys: Tensor, count: int) -> Tensor:
    """Return for keys (B, P, width) which of P - count tokens each becomes, or becomes part of: (B, P)."""
    keys = F.normalize(keys, dim=-1)
    first, second = keys[:, ::2], keys[:, 1::2]
    likeness, partner = (first @ second.transpose(1, 2)).max(dim=2)
    going = likeness.topk(count, dim=1).indices
    goes = torch.zeros_like(partner, dtype=torch.bool).scatter_(1, going, torch.ones_like(going, dtype=torch.bool))
    left = first.shape[1] - count  # of the first side, which come before the second one
    target = keys.new_empty(keys.shape[:2], dtype=torch.long)
    target[:, ::2] = torch.where(goes, left + partner, (~goes).cumsum(dim=1) - 1)
    target[:, 1::2] = left + torch.arange(second.shape[1], device=keys.device)
    return target
