"""The choice of torch's attention kernel on a CUDA device, for inference and for training."""

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
"""All of torch's kernels except cuDNN's, for which NaN gradients in bf16 are reported on Hopper GPUs with 64, 192, …
tokens (pytorch issue 196678). Runs with 64 tokens diverged this way, and torch selects that kernel there by default; it
is the likely cause, not a proven one. `FusedTraining` selects its own kernels with `for_training`."""
REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Kernels with a deterministic backward pass."""


def preferred_attention(device_type: str) -> AbstractContextManager[None]:
    """Return a context in which attention uses the fastest available kernel; on a CPU it does nothing."""
    return sdpa_kernel(PREFERRED, set_priority=True) if device_type == "cuda" else contextlib.nullcontext()


def for_training(queries: int, keys: int) -> list[SDPBackend]:
    """Return the kernels allowed for attention with gradients.

    cuDNN's is the fastest, but its gradient is reported to be NaN on Hopper GPUs for some lengths: 64, 192, 320, … keys
    with a mask (pytorch issue 196678; our runs with 64 keys and no mask failed too), and one query (cudnn-frontend
    issue 1072). So it is excluded for every multiple of 64, which costs a model with 64 tokens 10% of the step time,
    and for one query. Another report (kyutai-labs/pocket-tts 264) names no length; a run detects NaN and stops.
    """
    return TRUSTED if queries == 1 or keys % 64 == 0 else PREFERRED
