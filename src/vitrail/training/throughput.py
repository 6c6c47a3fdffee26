"""Throughput of a run: images/s over the recent steps."""

from collections import deque
from typing import NamedTuple

WINDOW = 60.0
"""Seconds of training to average over, if they hold enough steps."""
FEWEST_STEPS = 100
"""Average over at least this many steps: waits for data come in bursts."""
COMPILED_STEPS = 3
"""Slow first steps of a compiled model: compilation, CUDA graph warm-up and capture."""


class Timed(NamedTuple):
    """Images and time of a step."""

    images: int
    seconds: float
    """Total, including the wait for data."""
    waited: float


class Throughput:
    """Counts images and seconds. Averaging each step's images/s would give short steps too much weight.

    >>> throughput = Throughput()
    >>> for seconds in (9.0, 0.1, 0.3):
    ...     throughput.add(images=10, seconds=seconds, waited=0.0)
    >>> throughput.images_per_second  # without the first step: 20 images in 0.4 seconds
    50.0
    """

    def __init__(self, *, compiled: bool = False) -> None:
        self.warmup_steps = COMPILED_STEPS if compiled else 1
        """First steps to ignore: they load libraries and compile kernels."""
        self.recent: deque[Timed] = deque()
        self.images, self.seconds, self.waited = 0, 0.0, 0.0
        """Totals of the recent steps."""
        self.all_seconds, self.all_waited = 0.0, 0.0

    def add(self, *, images: int, seconds: float, waited: float) -> None:
        """Add a step that computed for `seconds` after it `waited` for data."""
        if self.warmup_steps:
            self.warmup_steps -= 1
            return
        self._count(Timed(images, seconds + waited, waited), 1)
        self.all_seconds += seconds + waited
        self.all_waited += waited
        while len(self.recent) > FEWEST_STEPS and self.seconds - self.recent[0].seconds >= WINDOW:
            self._count(self.recent[0], -1)

    def _count(self, step: Timed, times: int) -> None:
        if times > 0:
            self.recent.append(step)
        else:
            self.recent.popleft()
        self.images += times * step.images
        self.seconds += times * step.seconds
        self.waited += times * step.waited

    @property
    def images_per_second(self) -> float | None:
        """Images/s including waits for data; None before the first counted step."""
        return self.images / max(self.seconds, 1e-9) if self.recent else None

    @property
    def waiting_fraction(self) -> float:
        """Fraction of the recent time spent waiting for data."""
        return min(1.0, max(0.0, self.waited / self.seconds)) if self.seconds > 0 else 0.0

    @property
    def total_waiting_fraction(self) -> float:
        """Fraction of all time since the first steps spent waiting for data."""
        return self.all_waited / self.all_seconds if self.all_seconds else 0.0
