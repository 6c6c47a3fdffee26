"""Random draws for pretraining on the device: a pure function of the seed and the position in the stream.

A hash of seed, position and number, so that no generator state exists: any step can be computed on its own, on any
number of ranks, and a CPU and a GPU draw the same bits.
"""

import torch
from torch import Tensor

from vitrail.runtime import derive_seed

BITS = 24
"""Random bits of a draw: as many as float32 can hold."""
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""The constants of SplitMix64, as signed integers."""


def uniform(seed: int, purpose: str, first: int, images: int, count: int, device: torch.device) -> Tensor:
    """Return draws (images, count), uniform in [0, 1), for the images at stream positions from `first` on."""
    positions = torch.arange(first, first + images, dtype=torch.int64, device=device)
    numbers = torch.arange(count, dtype=torch.int64, device=device)
    key = _mixed(positions ^ derive_seed(seed, purpose))
    drawn = _shifted(_mixed(key[:, None] ^ _mixed(numbers)), 64 - BITS)
    return drawn.float().div(2**BITS)


def _mixed(x: Tensor) -> Tensor:
    """Hash 64-bit integers as SplitMix64 does; products wrap around."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shifted(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shifted(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
