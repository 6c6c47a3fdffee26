"""Dynamic batching: a queue per model and one compute thread.

While a batch runs, the next one gathers. Explanations run one image at a time and take much longer, so they have a
separate queue: batches go first, and a batch waits for at most one explanation. Everything except the computation
runs in the event loop's thread, so no locks are needed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, Protocol

from vitrail.data.sources.source import Pixels
from vitrail.serving.http_errors import HttpError
from vitrail.serving.lifecycle import Counters

SINGLE_RESERVE = 4
"""1/4 of the slots is reserved for single-image requests."""
ALONE_FRACTION = 4
"""1/4 as many slots for images that run alone."""
BATCHES = 8
"""Batches that may run before a waiting explanation gets its turn."""
Compute = Callable[[Any, Sequence[Pixels]], Sequence[Any]]
"""Takes an operation and images, returns one result per image; an exception is the error of that image only."""


class Batchable(Protocol):
    """An operation; equal ones may share a batch."""

    @property
    def alone(self) -> bool:
        """Whether images run one at a time."""

    def __hash__(self) -> int: ...


def _closed(operation: Any, images: Sequence[Pixels]) -> Sequence[Any]:
    raise RuntimeError(f"{operation} on {len(images)} images of a closed model")


class QueueSlot:
    """A queue slot, released once its image starts computing or is dropped."""

    def __init__(self, queue: "_Queue") -> None:
        self._queue: _Queue | None = queue

    def leave(self) -> None:
        """Release the slot; idempotent."""
        if self._queue is not None:
            self._queue.taken -= 1
            self._queue = None


@dataclass(eq=False)
class _Job:
    operation: Batchable
    pixels: Pixels
    slot: QueueSlot
    result: asyncio.Future[Any]
    arrived: float = field(default_factory=monotonic)


class _Queue:
    """Images waiting for the same kind of computation."""

    def __init__(self, slots: int) -> None:
        self.slots, self.taken = slots, 0
        self.jobs: deque[_Job] = deque()

    def without_cancelled(self) -> deque[_Job]:
        """Drop cancelled jobs and return the rest."""
        self.jobs = deque(job for job in self.jobs if not job.result.done())
        return self.jobs


class Batcher:
    """The queues and the compute thread of one model."""

    def __init__(self, name: str, compute: Compute, *, batch: int, wait: float, queue: int, counters: Counters) -> None:
        self.name, self.batch, self.wait, self.queue = name, batch, wait, queue
        self._compute, self._counters = compute, counters
        self._together, self._alone = _Queue(queue), _Queue(max(1, queue // ALONE_FRACTION))
        self._batches = 0
        """Batches run since the last image that ran alone."""
        self._arrived, self._enough = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"compute-{name}")
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def taken(self) -> int:
        """Slots in use."""
        return self._together.taken + self._alone.taken

    def start(self) -> None:
        """Start the batching task; call it in the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run_forever())

    async def close(self) -> None:
        """Finish the queued images, then stop."""
        self._closing = True
        self._arrived.set()
        self._enough.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown(wait=False)
        self._compute = _closed  # break the reference cycle, so that the model is freed at once

    def prepare(self, work: Callable[[], None]) -> None:
        """Run `work` in the compute thread and wait for it; do not call it in the event loop."""
        self._thread.submit(work).result()

    def reserve(self, images: int, *, alone: bool = False) -> list[QueueSlot]:
        """Reserve slots for all images of a request, or raise."""
        if images > self.queue:
            raise HttpError(
                413, f"{images} images in one request, but the queue holds {self.queue}; send fewer per request"
            )
        self.check_capacity(images, alone=alone)
        queue = self._alone if alone else self._together
        queue.taken += images
        return [QueueSlot(queue) for _ in range(images)]

    def waiting(self) -> float:
        """Return how many seconds the oldest queued image has waited, explanations aside."""
        return monotonic() - min((job.arrived for job in self._together.jobs), default=monotonic())

    def check_capacity(self, images: int, *, alone: bool = False) -> None:
        """Raise 503 if there are not enough free slots; larger requests leave some for single images."""
        queue = self._alone if alone else self._together
        reserved = 0 if images == 1 or alone else queue.slots // SINGLE_RESERVE
        if queue.taken and queue.taken + images > queue.slots - reserved:
            what = "explanations" if alone else "images"
            raise HttpError(503, f"too many {what} in the queue; try again soon", retry_after=1, reason="full")

    async def submit(self, operation: Batchable, pixels: Pixels, slot: QueueSlot) -> Any:
        """Queue one image and return its result; cancelling removes it from the queue."""
        job = _Job(operation, pixels, slot, asyncio.get_running_loop().create_future())
        queue = self._alone if operation.alone else self._together
        queue.jobs.append(job)
        self._arrived.set()
        if len(self._together.jobs) >= self.batch:
            self._enough.set()
        try:
            return await job.result
        finally:
            if not job.result.done() or job.result.cancelled():
                self._counters.cancelled.labels(self.name).inc()
                if job in queue.jobs:
                    queue.jobs.remove(job)
            slot.leave()

    async def _run_forever(self) -> None:
        while True:
            if not self._together.jobs and not self._alone.jobs:
                if self._closing:
                    return
                self._arrived.clear()
                await self._arrived.wait()
                continue
            await self._gather()
            batch = self._next_batch()
            if batch:
                await self._run(batch)

    async def _gather(self) -> None:
        """Let other images join the batch for as long as the oldest may wait."""
        jobs = self._together.jobs
        if not jobs or self._closing or len(jobs) >= self.batch:
            return
        left = jobs[0].arrived + self.wait - monotonic()
        if left <= 0:
            return
        self._enough.clear()
        try:
            await asyncio.wait_for(self._enough.wait(), left)
        except TimeoutError:
            return

    def _next_batch(self) -> list[_Job]:
        """Take the oldest image and others with the same operation, in order; or one that runs alone."""
        together, alone = self._together.without_cancelled(), self._alone.without_cancelled()
        chosen: list[_Job] = []
        if alone and (not together or self._batches >= BATCHES):
            chosen.append(alone.popleft())
            self._batches = 0
        elif together:
            operation = together[0].operation
            others: deque[_Job] = deque()
            for job in together:
                (chosen if len(chosen) < self.batch and job.operation == operation else others).append(job)
            self._together.jobs = others
            self._batches = self._batches + 1 if alone else 0
        for job in chosen:
            job.slot.leave()
        return chosen

    async def _run(self, batch: list[_Job]) -> None:
        operation, started = batch[0].operation, perf_counter()
        self._counters.batch_size.labels(self.name).observe(len(batch))
        loop = asyncio.get_running_loop()
        try:
            pixels = [job.pixels for job in batch]
            results = await loop.run_in_executor(self._thread, self._compute, operation, pixels)
        except Exception as error:  # report any error to the clients, then continue with the next batch
            for job in batch:
                if not job.result.done():
                    job.result.set_exception(error)
                    job.result.exception()  # mark as retrieved, in case nobody awaits it
            return
        finally:
            self._counters.compute_seconds.labels(self.name).observe(perf_counter() - started)
        for job, result in zip(batch, results, strict=True):
            if job.result.done():
                continue
            if isinstance(result, Exception):
                job.result.set_exception(result)
                job.result.exception()
            else:
                job.result.set_result(result)
