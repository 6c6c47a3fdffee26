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

    cuDNN's is the fastest, but its gradient is reported not to be a number on Hopper GPUs for some lengths: 64, 192,
    320, … keys with a mask (pytorch issue 196678; runs of ours with 64 and no mask ended so, too), and one query
    (cudnn-frontend issue 1072). So it is left out for every multiple of 64, which costs a model of 64 tokens a tenth
    of a step, and for one query. Another report (kyutai-labs/pocket-tts 264) names no length; a run notices, and stops.
    """
    return TRUSTED if queries == 1 or keys % 64 == 0 else PREFERRED
