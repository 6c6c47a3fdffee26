"""Which of torch's kernels computes attention."""

import contextlib
from contextlib import AbstractContextManager

from torch.nn.attention import SDPBackend, sdpa_kernel

PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""The fastest first, for a few hundred tokens on Hopper GPUs."""
TRUSTED = PREFERRED[1:]
"""All of torch's kernels but cuDNN's."""


def preferred_attention(device_type: str) -> AbstractContextManager[None]:
    """Return a context in which attention takes the fastest kernel that can do it; on a CPU there is no choice."""
    return sdpa_kernel(PREFERRED, set_priority=True) if device_type == "cuda" else contextlib.nullcontext()


def for_training(queries: int, keys: int) -> list[SDPBackend]:
    """Return the kernels that may compute attention whose gradient is wanted.

    cuDNN's is the fastest, but its gradient is not a number on Hopper GPUs for some lengths: 64, 192, 320, … keys
    (pytorch issue 196678), and one query (cudnn-frontend issue 1072); where keys fill whole tiles, others are as fast.
    """
    return TRUSTED if queries == 1 or keys % 64 == 0 else PREFERRED
