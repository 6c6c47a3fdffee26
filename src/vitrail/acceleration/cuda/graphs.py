"""CUDA graphs for inference: the CPU launches one captured graph instead of every kernel.

`CudaGraphs` is the only recorder of models. Training steps are captured by torch.compile ("reduce-overhead", if the
plan says so), and `data/resident.py`, which knows no models, captures the augmentation of a batch.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes that small batches are padded to, so that few graphs serve all of them. Larger batches are not padded:
that would cost more than launching the kernels one by one."""
LARGE_SIZES = 4
"""How many larger batch sizes are captured, each when it is used for the second time: the batches of a job have one
size, except for the last one."""
SHAPES = 8
"""How many shapes are captured without `sizes`; further shapes run without a graph, since every graph keeps memory."""
WARM_UPS = 3
"""Calls before a capture, in which kernels are compiled and libraries allocate memory."""
_capturing = threading.Lock()
"""Held during a capture: a capture starts with a device synchronisation, which would abort another one."""
_log = logging.getLogger("vitrail")


class _Key(NamedTuple):
    """What a captured graph is valid for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool


class CudaGraphs:
    """A function of a tensor on a CUDA device, captured as a CUDA graph for each input shape.

    The function must treat every row independently, and must not synchronise. With `sizes`, batches are padded to the
    next of these sizes (the padding rows are arbitrary), and the first few larger sizes that are used twice are
    captured as they are; without, the first few shapes are captured. Outputs are copies, so the next call does not
    overwrite them. Inputs may be on the CPU; on a CPU device, and while the caller captures a graph of its own, the
    function is called directly. It is thread-safe: calls are serialised. `keep_alive` are tensors that the graphs read,
    such as weights.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        device: torch.device,
        *,
        sizes: tuple[int, ...] = (),
        keep_alive: Iterable[Tensor] = (),
    ) -> None:
        self.function, self.device, self.sizes = function, device, sizes
        self.captured: dict[_Key, _CapturedGraph] = {}
        self.most = 2 * (len(sizes) + LARGE_SIZES) if sizes else SHAPES  # each size in two memory formats
        """How many graphs are captured at most."""
        self._seen: set[int] = set()
        """Batch sizes above `sizes` that were used once."""
        self._large: set[int] = set()
        """Those of them that are captured, because they were used again."""
        # If a parameter moves, the graph still reads its old memory.
        self._keep_alive = [tensor.detach() for tensor in keep_alive]
        self._lock = threading.Lock()
        self._pool: Any = None  # its type is private in torch
        self._stream: torch.cuda.Stream | None = None
        """The capture stream. cuBLAS keeps a workspace per stream, and captured matmuls write to it: one stream for all
        graphs of this object, which never run concurrently."""
        self._done: torch.cuda.Event | None = None
        """Set when the device has finished the last call: all graphs share their memory."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's output, in memory owned by the caller."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return self._run(x)
        with self._lock, torch.cuda.device(self.device):
            rows = self._rows(len(x))
            graph = None if rows is None else self._graph(rows, x)
            return self._run(x) if graph is None else self._replay(graph, x)

    def _graph(self, rows: int, x: Tensor) -> "_CapturedGraph | None":
        """Return the graph for a batch padded to `rows`; None if there is no memory for it, or too many graphs."""
        last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        key = _Key((rows, *x.shape[1:]), x.dtype, last)
        if key in self.captured or len(self.captured) >= self.most:
            return self.captured.get(key)
        try:
            self.captured[key] = self._capture(key, x)
        except torch.OutOfMemoryError:  # a graph keeps its memory; without one, the batch may fit
            self.most = len(self.captured)
        if key not in self.captured:
            # Outside of `except`, where the traceback would keep the tensors of the failed capture alive.
            _log.warning("no GPU memory for a CUDA graph of %d images; they run without one", rows)
            torch.cuda.empty_cache()
        return self.captured.get(key)

    def _run(self, x: Tensor) -> Tensor:
        """Call the function without a graph."""
        return self.function(x.to(self.device, non_blocking=True))

    def _rows(self, count: int) -> int | None:
        """Return the padded number of rows; None if no graph is used."""
        if not count or not self.sizes:
            return count or None
        if count <= self.sizes[-1]:
            return next(size for size in self.sizes if size >= count)
        if count in self._seen and len(self._large) < LARGE_SIZES:
            self._large.add(count)
        self._seen.add(count)
        return count if count in self._large else None

    def _capture(self, key: _Key, x: Tensor) -> "_CapturedGraph":
        if self._pool is None or self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        memory_format = torch.channels_last if key.channels_last else torch.contiguous_format
        inputs = torch.zeros(key.shape, dtype=key.dtype, device=self.device).to(memory_format=memory_format)
        inputs[: len(x)].copy_(x)
        with _capturing:
            return _CapturedGraph(self.function, inputs, self._pool, self._stream)

    def _replay(self, graph: "_CapturedGraph", x: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        if self._done is None:
            self._done = torch.cuda.Event()
        else:
            here.wait_event(self._done)
        graph.inputs[: len(x)].copy_(x, non_blocking=True)
        graph.graph.replay()
        output = graph.output[: len(x)].clone()
        self._done.record(here)
        return output


class _CapturedGraph:
    """One captured graph, with its input and output memory."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], inputs: Tensor, pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self.inputs = inputs
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function(inputs)
        here.wait_stream(stream)
        # The capture allocates a new one, in the memory of the graphs. Otherwise the graph would write to that of
        # the warm-up, which torch.compile frees when it captures a training step.
        torch._C._cuda_clearCublasWorkspaces()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may allocate during the capture, such as a DataLoader's pin-memory thread.
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.output = function(inputs)
