"""Calls recorded once and replayed: the processor then launches one graph instead of every kernel."""

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of images that small batches are filled up to, so that few recordings serve all of them. For more images
than that the device computes for longer than the processor launches, so there is nothing to gain."""
SHAPES = 8
"""How many shapes are recorded where batches are not filled up; every further one is computed without a graph."""
WARM_UPS = 3
"""Calls before a recording, in which kernels are compiled and libraries take their memory."""
_recording = threading.Lock()
"""Held while anything is recorded: a recording begins by waiting for the whole device, which would end another one."""


class _Key(NamedTuple):
    """What a recording is good for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool


class CudaGraphs:
    """A function of a tensor on a CUDA device, recorded for each shape that it is given.

    The function has to treat every row by itself, and must not wait for the device. With `sizes` fewer rows are filled
    up to the next of these sizes, with whatever rows lie there, and more rows are computed without a graph; without,
    every shape is recorded as it comes. What is given may lie on the CPU; on a CPU device the function is just called.
    Several threads may ask: one waits for the other. `kept` are tensors that the recordings read, such as weights.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        device: torch.device,
        *,
        sizes: tuple[int, ...] = (),
        kept: Iterable[Tensor] = (),
    ) -> None:
        self.function, self.device, self.sizes = function, device, sizes
        self.recorded: dict[_Key, _Recording] = {}
        # A parameter that moves elsewhere leaves its memory, which a graph goes on reading.
        self._kept = [tensor.detach() for tensor in kept]
        self._lock = threading.Lock()
        self._pool: Any = None  # torch has a type for it, under a private name
        self._aside: torch.cuda.Stream | None = None
        """Where all is recorded. Matrix products keep memory to work with for each stream, as long as the process
        lives, and their recordings write to it: one stream for all that is replayed by turns, and for nobody else."""
        self._free: torch.cuda.Event | None = None
        """When the device has done with what was asked last: all recordings share their memory."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the function returns; the answer is the caller's own."""
        rows = self._rows(len(x))
        if self.device.type != "cuda" or rows is None:
            return self.function(x.to(self.device, non_blocking=True))
        last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        key = _Key((rows, *x.shape[1:]), x.dtype, last)
        with self._lock, torch.cuda.device(self.device):
            recording = self.recorded.get(key)
            if recording is None:
                if not self.sizes and len(self.recorded) == SHAPES:
                    return self.function(x.to(self.device, non_blocking=True))
                recording = self.recorded[key] = self._record(key, x)
            return self._replay(recording, x)

    def _rows(self, count: int) -> int | None:
        """Return how many rows are computed where so many are given; None where no graph is."""
        if not self.sizes:
            return count or None
        return next((size for size in self.sizes if size >= count), None) if count else None

    def _record(self, key: _Key, x: Tensor) -> "_Recording":
        if self._pool is None or self._aside is None:
            self._pool, self._aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        form = torch.channels_last if key.channels_last else torch.contiguous_format
        given = torch.zeros(key.shape, dtype=key.dtype, device=self.device).to(memory_format=form)
        given[: len(x)].copy_(x)
        with _recording:
            return _Recording(self.function, given, self._pool, self._aside)

    def _replay(self, recording: "_Recording", x: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        if self._free is None:
            self._free = torch.cuda.Event()
        else:
            here.wait_event(self._free)
        recording.given[: len(x)].copy_(x, non_blocking=True)
        recording.graph.replay()
        answer = recording.answer[: len(x)].clone()
        self._free.record(here)
        return answer


class _Recording:
    """One graph, with the memory that it reads and writes."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], given: Tensor, pool: Any, aside: torch.cuda.Stream
    ) -> None:
        self.given = given
        here = torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                function(given)
        here.wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may go on allocating meanwhile, such as the one that pins memory for a DataLoader.
        with torch.cuda.graph(self.graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
            self.answer = function(given)
