"""How fast a run goes: images by the time they took, over the recent steps."""

from collections import deque
from typing import NamedTuple

WINDOW = 60.0
"""Seconds of training that the pace is taken over, if they hold enough steps."""
FEWEST_STEPS = 100
"""The pace is taken over at least so many steps: waits for data come in bursts, every so many batches."""
COMPILED_STEPS = 3
"""Steps that a compiled model needs until it is compiled for good: CUDA graphs warm up, then record, then replay."""


class Timed(NamedTuple):
    """A step and its time."""

    images: int
    seconds: float
    """In all, the wait for data included."""
    waited: float


class Throughput:
    """Counts images and seconds. A mean of each step's rate would let the shortest steps count as much as the longest.

    >>> pace = Pace()
    >>> for seconds in (9.0, 0.1, 0.3):
    ...     pace.add(images=10, seconds=seconds, waited=0.0)
    >>> pace.rate  # without the first step: 20 images in 0.4 seconds
    50.0
    """

    def __init__(self, *, compiled: bool = False) -> None:
        self.left_out = COMPILED_STEPS if compiled else 1
        """So many first steps count for nothing: libraries are opened and kernels compiled in them."""
        self.recent: deque[Timed] = deque()
        self.images, self.seconds, self.waited = 0, 0.0, 0.0
        """Of the recent steps."""
        self.all_seconds, self.all_waited = 0.0, 0.0

    def add(self, *, images: int, seconds: float, waited: float) -> None:
        """Take in a step that computed for `seconds` after it had `waited` for data."""
        if self.left_out:
            self.left_out -= 1
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
    def rate(self) -> float | None:
        """Images a second, waits for data included; None before a step counts."""
        return self.images / max(self.seconds, 1e-9) if self.recent else None

    @property
    def waiting_share(self) -> float:
        """The share of the recent time that was spent waiting for data."""
        return min(1.0, max(0.0, self.waited / self.seconds)) if self.seconds > 0 else 0.0

    @property
    def whole_waiting_share(self) -> float:
        """The same of all the time since the first steps."""
        return self.all_waited / self.all_seconds if self.all_seconds else 0.0
