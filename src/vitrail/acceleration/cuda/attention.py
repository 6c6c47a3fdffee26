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
"""The fastest first, for a few hundred tokens on Hopper GPUs. For answering only: of cuDNN's, gradients that are not
numbers are reported (`training/step.py`)."""


def preferred_attention(device_type: str) -> AbstractContextManager[None]:
    """Return a context in which attention takes the fastest kernel that can do it; on a CPU there is no choice."""
    return sdpa_kernel(PREFERRED, set_priority=True) if device_type == "cuda" else contextlib.nullcontext()
