"""Data parallelism on the CPU: a batch is split into chunks, each computed by one thread with its own cores.

When all cores share every layer, they synchronise about a hundred times per batch, and the tokens of a batch do not fit
their caches. Chunks of a few images fit, and synchronise once.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

In = TypeVar("In")
Out = TypeVar("Out")

MAX_THREADS = 8
SMALLEST, LARGEST = 4, 8
"""Images per chunk: fewer would leave the matrix units idle, more would not fit the caches."""


class CpuThreads:
    """A thread pool that computes chunks of batches on the CPU."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None

    @property
    def one_core_each(self) -> bool:
        """Whether there are several threads with one core each, so that running in the pool keeps all cores busy."""
        return 2 <= torch.get_num_threads() <= MAX_THREADS

    def __call__(self, function: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
        """Return `function(pixels)`, computed in chunks if there are enough images and cores."""
        cpu_threads = min(torch.get_num_threads(), MAX_THREADS)
        if cpu_threads < 2 or len(pixels) < 2 * SMALLEST:  # also inside a pool thread, which has one core
            return function(pixels)
        size = min(LARGEST, max(SMALLEST, -(-len(pixels) // cpu_threads)))
        return torch.cat(list(self._pool().map(function, pixels.split(size))))

    def each(self, work: Callable[[In], Out], items: Iterable[In]) -> Generator[Out, None, None]:
        """Yield `work(item)` for each item, in order, using all threads; items are consumed only slightly ahead."""
        cpu_threads = min(torch.get_num_threads(), MAX_THREADS)
        waiting: deque[Future[Out]] = deque()
        try:
            for item in items:
                waiting.append(self._pool().submit(work, item))
                if len(waiting) > 2 * cpu_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _pool(self) -> ThreadPoolExecutor:
        if self.pool is None:
            threads = torch.get_num_threads()
            count = min(threads, MAX_THREADS)
            self.pool = start_pool(count, threads // count)
        return self.pool


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the operations of this thread in one thread: other processes keep the cores busy, and would be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def start_pool(count: int, each: int, name: str = "compute") -> ThreadPoolExecutor:
    """Start threads whose operations run in `each` threads, whatever the calling thread uses."""
    threads = torch.get_num_threads()
    barrier = Barrier(count + 1)

    def set_threads() -> None:
        # The first call in a thread initialises it from the last global value, so it has to come before setting.
        torch.get_num_threads()
        torch.set_num_threads(each)
        barrier.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    for _ in range(count):
        pool.submit(set_threads)
    barrier.wait()
    # New threads inherit the value set last, in any thread, so restore it.
    torch.set_num_threads(threads)
    return pool
