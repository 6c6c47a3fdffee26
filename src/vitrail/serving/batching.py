"""Images that arrive together are computed together: a queue, one thread that computes, batches as they come.

While a batch is computed, the next one gathers. What is computed for one image at a time, and takes much longer
(explanations), waits in a line of its own: batches go first, so that a batch waits for one such image, and not for all
of them. Everything here happens in the event loop's thread, but for the computing itself, so nothing needs a lock.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, Protocol

from vitrail.data.sources.source import Pixels
from vitrail.serving.counters import Counters
from vitrail.serving.http_errors import HttpError


class WorkItem(Protocol):
    """What is asked of a model; equal questions may be answered as one batch."""

    @property
    def alone(self) -> bool:
        """Whether every image is computed by itself."""

    def __hash__(self) -> int: ...


KEPT = 4
"""One in so many seats is kept for requests of one image, whatever large requests wait for."""
ALONE = 4
"""One in so many seats is for images that are computed alone."""
BATCHES = 8
"""So many batches are computed while an image that is computed alone waits; then it has its turn."""
Compute = Callable[[Any, Sequence[Pixels]], Sequence[Any]]
"""Takes a question and some images, returns an answer for each; an exception is one image's own fault."""


def _nothing_more(work_item: Any, images: Sequence[Pixels]) -> Sequence[Any]:
    raise RuntimeError(f"{work_item} was asked of a model that is closed, about {len(images)} images")


class QueueSlot:
    """A place in a line; it is free again once its image is being computed, or will never be."""

    def __init__(self, line: "_Line") -> None:
        self._line: _Line | None = line

    def leave(self) -> None:
        """Free the place; again is no harm."""
        if self._line is not None:
            self._line.taken -= 1
            self._line = None


@dataclass(eq=False)
class _Job:
    work_item: WorkItem
    pixels: Pixels
    slot: QueueSlot
    answer: asyncio.Future[Any]
    arrived: float = field(default_factory=monotonic)


class _Line:
    """Images that wait for the same kind of computing."""

    def __init__(self, seats: int) -> None:
        self.seats, self.taken = seats, 0
        self.jobs: deque[_Job] = deque()

    def without_cancelled(self) -> deque[_Job]:
        """Forget those who have just left; return who is still there."""
        self.jobs = deque(job for job in self.jobs if not job.answer.done())
        return self.jobs


class Batcher:
    """The queue of one model, and the one thread that computes for it."""

    def __init__(self, name: str, compute: Compute, *, batch: int, wait: float, queue: int, counters: Counters) -> None:
        self.name, self.batch, self.wait, self.queue = name, batch, wait, queue
        self._compute, self._counters = compute, counters
        self._together, self._alone = _Line(queue), _Line(max(1, queue // ALONE))
        self._batches = 0
        """Computed since an image was computed alone."""
        self._arrived, self._enough = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"compute-{name}")
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def taken(self) -> int:
        """Seats in use."""
        return self._together.taken + self._alone.taken

    def start(self) -> None:
        """Begin to answer; to be called where the event loop runs."""
        self._task = asyncio.get_running_loop().create_task(self._answer_forever())

    async def close(self) -> None:
        """Answer what waits, then end."""
        self._closing = True
        self._arrived.set()
        self._enough.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown(wait=False)
        self._compute = _nothing_more  # so that the model, which holds this, is let go of at once

    def prepare(self, work: Callable[[], None]) -> None:
        """Do something in the thread that computes, and wait for it; not to be called where the event loop runs."""
        self._thread.submit(work).result()

    def reserve(self, images: int, *, alone: bool = False) -> list[QueueSlot]:
        """Take seats for all images of a request, or refuse it."""
        if images > self.queue:
            raise HttpError(
                413, f"{images} images in one request, and the queue holds {self.queue}; send fewer at a time"
            )
        self.check_room(images, alone=alone)
        line = self._alone if alone else self._together
        line.taken += images
        return [QueueSlot(line) for _ in range(images)]

    def waiting(self) -> float:
        """Return for how many seconds the oldest image of a batch has been waiting."""
        return monotonic() - min((job.arrived for job in self._together.jobs), default=monotonic())

    def check_room(self, images: int, *, alone: bool = False) -> None:
        """Refuse more images than there are seats left; requests of several leave some for others."""
        line = self._alone if alone else self._together
        kept = 0 if images == 1 or alone else line.seats // KEPT
        if line.taken and line.taken + images > line.seats - kept:
            what = "explanations" if alone else "images"
            raise HttpError(503, f"too many {what} are waiting already; try again soon", retry_after=1, reason="full")

    async def ask(self, work_item: WorkItem, pixels: Pixels, slot: QueueSlot) -> Any:
        """Return the answer for one image; whoever is cancelled meanwhile leaves the queue."""
        job = _Job(work_item, pixels, slot, asyncio.get_running_loop().create_future())
        line = self._alone if work_item.alone else self._together
        line.jobs.append(job)
        self._arrived.set()
        if len(self._together.jobs) >= self.batch:
            self._enough.set()
        try:
            return await job.answer
        finally:
            if not job.answer.done() or job.answer.cancelled():
                self._counters.cancelled.labels(self.name).inc()
                if job in line.jobs:
                    line.jobs.remove(job)
            slot.leave()

    async def _answer_forever(self) -> None:
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
                await self._answer(batch)

    async def _gather(self) -> None:
        """Let others join the oldest image for as long as it may wait."""
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
        """Take the oldest image and others about which the same is asked, in their order; or one that is alone."""
        together, alone = self._together.without_cancelled(), self._alone.without_cancelled()
        chosen: list[_Job] = []
        if alone and (not together or self._batches >= BATCHES):
            chosen.append(alone.popleft())
            self._batches = 0
        elif together:
            work_item = together[0].work_item
            others: deque[_Job] = deque()
            for job in together:
                (chosen if len(chosen) < self.batch and job.work_item == work_item else others).append(job)
            self._together.jobs = others
            self._batches = self._batches + 1 if alone else 0
        for job in chosen:
            job.slot.leave()
        return chosen

    async def _answer(self, batch: list[_Job]) -> None:
        work_item, started = batch[0].work_item, perf_counter()
        self._counters.batch_size.labels(self.name).observe(len(batch))
        loop = asyncio.get_running_loop()
        try:
            pixels = [job.pixels for job in batch]
            answers = await loop.run_in_executor(self._thread, self._compute, work_item, pixels)
        except Exception as error:  # whatever it is, those who asked have to hear of it, and the next batch is due
            for job in batch:
                if not job.answer.done():
                    job.answer.set_exception(error)
                    job.answer.exception()  # one that nobody awaits any more is no news
            return
        finally:
            self._counters.compute_seconds.labels(self.name).observe(perf_counter() - started)
        for job, answer in zip(batch, answers, strict=True):
            if job.answer.done():
                continue
            if isinstance(answer, Exception):
                job.answer.set_exception(answer)
                job.answer.exception()
            else:
                job.answer.set_result(answer)
