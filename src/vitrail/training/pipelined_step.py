"""The step that a device may still be busy with, and the clock of the steps."""

import time

from vitrail.data.batches import Batch
from vitrail.training.step import PendingStep


class PipelinedStep:
    """Keeps a step until its numbers are asked for."""

    def __init__(self) -> None:
        self.taken: PendingStep | None = None
        self.batch: Batch | None = None
        self.rate = self.waited_for = 0.0
        self.begin()

    def begin(self) -> None:
        """Start the clock."""
        self.since, self.idle = time.monotonic(), 0.0

    def waited(self, seconds: float) -> float:
        """Return how much of a wait for images counts: nothing, if the device was busy all along."""
        idle = 0.0 if self.taken is not None and self.taken.is_busy() else seconds
        self.idle += idle
        return idle

    def put(self, taken: PendingStep, batch: Batch, rate: float, waited: float) -> None:
        """Keep a step, with what it was made of."""
        self.taken, self.batch, self.rate, self.waited_for = taken, batch, rate, waited

    def done(self) -> float:
        """Return the seconds since the step before was done, without the waits for images that count."""
        took = time.monotonic() - self.since - self.idle
        self.taken = self.batch = None
        self.begin()
        return max(took, 0.0)
