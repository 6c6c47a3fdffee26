"""The colour map, background and ink shared by all figures."""

import numpy as np
from numpy.typing import NDArray

PAPER, INK, PALE, LINE = "#ffffff", "#22211f", "#6d6a63", "#d9d6cf"
# Monotonic in lightness, so that it also works in greyscale.
_RAMP = np.array(
    [(36, 22, 76), (44, 62, 130), (34, 106, 143), (28, 147, 136), (83, 186, 108), (171, 214, 70), (250, 232, 64)],
    np.float64,
)


def coloured(numbers: NDArray[np.floating], low: float, high: float) -> NDArray[np.uint8]:
    """Map numbers to colours, dark at `low` and bright at `high`: (…) becomes (…, 3)."""
    place = np.clip((np.asarray(numbers, np.float64) - low) / (high - low), 0, 1)
    steps = np.linspace(0, 1, len(_RAMP))
    return np.stack([np.interp(place, steps, _RAMP[:, c]) for c in range(3)], axis=-1).round().astype(np.uint8)
