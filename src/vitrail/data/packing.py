"""`PackedArrays`: many small arrays in one block of memory, sent to another process or device in one transfer."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

ALIGNED = 16
"""Every array starts at a multiple of this many bytes."""


class Slot(NamedTuple):
    """Where a tensor is in packed memory."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor as a view of the memory, on its device."""
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        return memory[self.start : end].view(self.dtype).view(self.shape)


class PackedArrays:
    """Collects arrays; `memory` then returns them in one block."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, NDArray[Any]]] = []
        self._size = 0

    def put(self, array: NDArray[Any]) -> Slot:
        """Add an array, and return where its copy will be."""
        start = self._size
        self._arrays.append((start, array))
        self._size += -(-array.nbytes // ALIGNED) * ALIGNED
        return Slot(start, torch.from_numpy(np.empty(0, array.dtype)).dtype, array.shape)

    def memory(self) -> Tensor:
        """Return all arrays as bytes; in a worker, in shared memory."""
        memory = torch.empty(self._size, dtype=torch.uint8)
        if get_worker_info() is not None:
            memory.share_memory_()
        buffer = memory.numpy()
        for start, array in self._arrays:
            buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return memory
