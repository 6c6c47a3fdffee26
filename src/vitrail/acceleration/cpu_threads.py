"""Lanes: a batch cut into parts that are computed side by side, each by its share of the cores.

Where every layer is shared by all cores, they wait for each other a hundred times a batch, and the tokens of a batch do
not stay in their caches. Parts of a few images do, and wait for each other once.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

Given = TypeVar("Given")
Made = TypeVar("Made")

MOST_LANES = 8
SMALLEST, LARGEST = 4, 8
"""Images in a part: fewer would leave the matrix units idle, more would not stay in the caches."""


class CpuThreads:
    """Threads that compute parts of batches, on the CPU."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None

    @property
    def one_core_each(self) -> bool:
        """Whether a lane is one core, and there are several: then whatever is done in lanes keeps all cores busy."""
        return 2 <= torch.get_num_threads() <= MOST_LANES

    def __call__(self, answer: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
        """Return `answer(pixels)`, computed in parts where there are enough images and cores for it."""
        cpu_threads = min(torch.get_num_threads(), MOST_LANES)
        if cpu_threads < 2 or len(pixels) < 2 * SMALLEST:  # also within a lane, which has but one core
            return answer(pixels)
        size = min(LARGEST, max(SMALLEST, -(-len(pixels) // cpu_threads)))
        return torch.cat(list(self._pool().map(answer, pixels.split(size))))

    def each(self, work: Callable[[Given], Made], given: Iterable[Given]) -> Generator[Made, None, None]:
        """Give `work(x)` for each x, in order, done in all lanes at once; little more is taken than is being done."""
        cpu_threads = min(torch.get_num_threads(), MOST_LANES)
        waiting: deque[Future[Made]] = deque()
        try:
            for some in given:
                waiting.append(self._pool().submit(work, some))
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
            self.pool = _started(min(threads, MOST_LANES), threads)
        return self.pool


def _started(cpu_threads: int, threads: int) -> ThreadPoolExecutor:
    """Start the threads and give each its share of the cores."""
    all_are_there = Barrier(cpu_threads + 1)

    def take_share() -> None:
        torch.get_num_threads()  # a thread's first look takes what was set last, so it has to come before
        torch.set_num_threads(threads // cpu_threads)
        all_are_there.wait()

    pool = ThreadPoolExecutor(cpu_threads, thread_name_prefix="lane")
    for _ in range(cpu_threads):
        pool.submit(take_share)
    all_are_there.wait()
    # torch gives threads that are yet to come what was set last, whoever set it.
    torch.set_num_threads(threads)
    return pool
