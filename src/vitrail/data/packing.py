"""`PackedArrays`: many small arrays in one block of memory, sent to another process or device in one transfer."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

ALIGNED = 16
"""Every array begins at a multiple of so many bytes."""


class Slot(NamedTuple):
    """Where in a parcel's memory a tensor lies."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor that lies here, without copying it, on whatever device the memory is."""
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        return memory[self.start : end].view(self.dtype).view(self.shape)


class PackedArrays:
    """Takes arrays one after the other; `memory` then holds them all."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, NDArray[Any]]] = []
        self._size = 0

    def put(self, array: NDArray[Any]) -> Slot:
        """Take an array, and return where its copy will be found."""
        start = self._size
        self._arrays.append((start, array))
        self._size += -(-array.nbytes // ALIGNED) * ALIGNED
        return Slot(start, torch.from_numpy(np.empty(0, array.dtype)).dtype, array.shape)

    def memory(self) -> Tensor:
        """Return all arrays, as bytes; a worker writes them into memory that the caller sees too."""
        memory = torch.empty(self._size, dtype=torch.uint8)
        if get_worker_info() is not None:
            memory.share_memory_()
        room = memory.numpy()
        for start, array in self._arrays:
            room[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return memory
