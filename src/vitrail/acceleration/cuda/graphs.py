"""CUDA graphs for inference: the CPU launches one captured graph instead of every kernel.

`CudaGraphs` is the only recorder of models. Training steps are captured by torch.compile ("reduce-overhead", if the
plan says so), and `data/resident.py`, which knows no models, captures the augmentation of a batch.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes that small batches are padded to, so that few graphs serve all of them. Padding larger batches would cost
more, and of models from S/16 on, they compute for longer than their kernels take to launch."""
SHAPES = 8
"""How many shapes are captured without padding; further shapes run without a graph, since every graph keeps memory."""
WARM_UPS = 3
"""Calls before a capture, in which kernels are compiled and libraries allocate memory."""
_capturing = threading.Lock()
"""Held during a capture: a capture starts with a device synchronisation, which would abort another one."""


class _Key(NamedTuple):
    """What a captured graph is valid for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool


class CudaGraphs:
    """A function of a tensor on a CUDA device, captured as a CUDA graph for each input shape.

    The function must treat every row independently, and must not synchronise. With `sizes`, batches are padded to the
    next of these sizes (the padding rows are arbitrary), and larger batches run without a graph; otherwise the first
    few shapes are captured. Outputs are copies, so the next call does not overwrite them. Inputs may be on the CPU; on
    a CPU device, and while the caller captures a graph of its own, the function is called directly. It is thread-safe:
    calls are serialised. `keep_alive` are tensors that the graphs read, such as weights.
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
        self.most = max(SHAPES, 2 * len(sizes))  # each size in two memory formats
        """How many graphs are captured at most."""
        # If a parameter moves, the graph still reads its old memory.
        self._keep_alive = [tensor.detach() for tensor in keep_alive]
        self._lock = threading.Lock()
        self._pool: Any = None  # its type is private in torch
        self._stream: torch.cuda.Stream | None = None
        """The capture stream. cuBLAS keeps a workspace per stream for the lifetime of the process, and captured matmuls
        write to it: one stream for all graphs of this object, which never run concurrently."""
        self._done: torch.cuda.Event | None = None
        """Set when the device has finished the last call: all graphs share their memory."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's output, in memory owned by the caller."""
        rows = self._rows(len(x))
        if self.device.type != "cuda" or rows is None or torch.cuda.is_current_stream_capturing():
            return self._run(x)
        last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        key = _Key((rows, *x.shape[1:]), x.dtype, last)
        with self._lock, torch.cuda.device(self.device):
            graph = self.captured.get(key)
            if graph is None:
                if len(self.captured) >= self.most:
                    return self._run(x)
                try:
                    graph = self.captured[key] = self._capture(key, x)
                except torch.cuda.OutOfMemoryError:  # a graph keeps its memory; without one, the batch may fit
                    self.most = len(self.captured)
                    return self._run(x)
            return self._replay(graph, x)

    def _run(self, x: Tensor) -> Tensor:
        """Call the function without a graph."""
        return self.function(x.to(self.device, non_blocking=True))

    def _rows(self, count: int) -> int | None:
        """Return the padded number of rows; None if no graph is used."""
        if not self.sizes:
            return count or None
        return next((size for size in self.sizes if size >= count), None) if count else None

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
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may allocate during the capture, such as a DataLoader's pin-memory thread.
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.output = function(inputs)
