"""The step that the device may still be computing, and the step timer."""

import time

from vitrail.data.batches import Batch
from vitrail.training.step import PendingStep


class PipelinedStep:
    """Holds a launched step until its metrics are read."""

    def __init__(self) -> None:
        self.pending: PendingStep | None = None
        self.batch: Batch | None = None
        self.lr = self.waited_for = 0.0
        self.restart()

    def restart(self) -> None:
        """Start the timer."""
        self.since, self.idle = time.monotonic(), 0.0

    def waited(self, seconds: float) -> float:
        """Return how much of a wait for data counts: nothing if the device was busy throughout."""
        idle = 0.0 if self.pending is not None and self.pending.is_busy() else seconds
        self.idle += idle
        return idle

    def put(self, pending: PendingStep, batch: Batch, lr: float, waited: float) -> None:
        """Store a launched step with its batch and learning rate."""
        self.pending, self.batch, self.lr, self.waited_for = pending, batch, lr, waited

    def done(self) -> float:
        """Return the seconds since the previous step finished, without the counted waits for data."""
        took = time.monotonic() - self.since - self.idle
        self.pending = self.batch = None
        self.restart()
        return max(took, 0.0)
