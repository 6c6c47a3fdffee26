"""Lanes: a batch cut into parts that are computed side by side, each by its share of the cores.

Where every layer is shared by all cores, they wait for each other a hundred times a batch, and the tokens of a batch do
not stay in their caches. Parts of a few pictures do, and wait for each other once.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor

MOST_LANES = 8
SMALLEST, LARGEST = 4, 8
"""Pictures in a part: fewer would leave the matrix units idle, more would not stay in the caches."""


class Lanes:
    """Threads that compute parts of batches, on the CPU."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None

    def __call__(self, answer: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
        """Return `answer(pixels)`, computed in parts where there are enough pictures and cores for it."""
        threads = torch.get_num_threads()
        lanes = min(threads, MOST_LANES)
        if lanes < 2 or len(pixels) < 2 * SMALLEST:
            return answer(pixels)
        if self.pool is None:
            self.pool = _started(lanes, threads)
        size = min(LARGEST, max(SMALLEST, -(-len(pixels) // lanes)))
        return torch.cat(list(self.pool.map(answer, pixels.split(size))))


def _started(lanes: int, threads: int) -> ThreadPoolExecutor:
    """Start the threads and give each its share of the cores."""
    all_are_there = Barrier(lanes + 1)

    def take_share() -> None:
        torch.get_num_threads()  # a thread's first look takes what was set last, so it has to come before
        torch.set_num_threads(threads // lanes)
        all_are_there.wait()

    pool = ThreadPoolExecutor(lanes, thread_name_prefix="lane")
    for _ in range(lanes):
        pool.submit(take_share)
    all_are_there.wait()
    # torch gives threads that are yet to come what was set last, whoever set it.
    torch.set_num_threads(threads)
    return pool
