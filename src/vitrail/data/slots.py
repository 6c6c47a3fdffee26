"""Slots: shared memory, allocated once, through which worker processes hand over their batches.

Without it, torch makes a file in shared memory for each tensor of a batch. Its pages are zeroed and mapped in both
processes, and for its descriptor the caller connects to a thread of the worker, which needs the GIL several times: on
busy cores the caller waited longer for that than for the pixels. Here a worker writes the pixels into a slot, and sends
everything else as one message. The caller copies the pixels, so a slot is free when its batch has been received.

    key -> (slot, key) -> worker: data[key], pixels in the slot -> message -> caller: the batch in its own memory
"""

import io
import mmap
import multiprocessing
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from vitrail.errors import DataError
from vitrail.text import byte_size, first_line, plural

PER_WORKER = 3
"""Slots of each worker: two batches are prefetched, and one is being copied by the caller."""
PAGE, ALIGNMENT = 4096, 64


class Message(NamedTuple):
    """A batch as a worker sends it: pickled, without the pixels."""

    content: bytes


class _InSlot(NamedTuple):
    """Where a tensor's bytes are."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Slots:
    """Shared memory for the batches of some workers."""

    memory: Tensor
    """(slots, bytes), uint8."""

    @classmethod
    def of(cls, workers: int, size: int, method: str | None = None) -> "Slots":
        """Allocate slots of `size` bytes for some workers, which start by this method, or by the default one."""
        length = (1 + -(-size // PAGE)) * PAGE  # one page more, for the alignment of several buffers
        count = PER_WORKER * workers
        try:
            if (method or multiprocessing.get_start_method()) == "fork":
                # Taken page by page when a worker first writes to it, and without the limit of /dev/shm.
                memory = torch.frombuffer(mmap.mmap(-1, count * length), dtype=torch.uint8)
            else:
                memory = torch.empty(count * length, dtype=torch.uint8).share_memory_()
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"the batches of {plural(workers, 'data loading worker')} need {byte_size(count * length)} of shared "
                f"memory, which cannot be allocated ({getattr(error, 'strerror', None) or first_line(error)}); use "
                f"fewer workers or a smaller batch"
            ) from None
        return cls(memory.view(count, length))

    def numbered(self, keys: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Give each key a slot. Workers take turns, so each always gets the same slots, which it has mapped already."""
        return zip(cycle(range(len(self.memory))), keys, strict=False)

    def receive(self, message: Message, *, pin: bool) -> Any:
        """Return the batch of a message, with the pixels copied from the slot; `pin`: to pinned memory."""
        return _Reader(message, self.memory.view(-1), pin).load()


@dataclass(frozen=True)
class InSlots(Dataset[Any]):
    """A dataset whose items are made in a worker's slot, and sent as messages."""

    data: Dataset[Any]
    slots: Slots

    def __getitem__(self, numbered: tuple[int, Any]) -> Message:
        """Make an item; `empty_buffer` takes its memory from the slot."""
        slot, key = numbered
        _current.give(self.slots.memory[slot])
        try:
            made = self.data[key]
        finally:
            _current.give(None)
        file = io.BytesIO()
        _Writer(file, self.slots.memory).dump(made)
        return Message(file.getvalue())


class _CurrentSlot:
    """What is left of the slot that this worker is writing to."""

    def __init__(self) -> None:
        self.rest: Tensor | None = None

    def give(self, memory: Tensor | None) -> None:
        self.rest = memory

    def take(self, size: int) -> Tensor | None:
        """Return memory of the slot; None without a slot, or if it is full."""
        if self.rest is None or len(self.rest) < size:
            return None
        taken, self.rest = self.rest[:size], self.rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return taken


_current = _CurrentSlot()


def empty_buffer(*shape: int) -> Tensor:
    """Return an empty buffer for pixels of any shape; in a worker it is shared memory."""
    taken = _current.take(int(np.prod(shape)))
    if taken is not None:
        return taken.view(shape)
    pixels = torch.empty(shape, dtype=torch.uint8)
    return pixels.share_memory_() if get_worker_info() is not None else pixels


class _Writer(pickle.Pickler):
    """Pickles a batch: tensors in the slots as their place, others as their numbers."""

    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.first, self.size = memory.data_ptr(), memory.numel()

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        start = value.data_ptr() - self.first
        if 0 <= start < self.size and _is_dense(value):
            return _InSlot(start, tuple(value.shape), value.stride())
        return value.numpy()


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements, in some order, are all there is between the first and the last one."""
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.dtype == torch.uint8 and tensor.numel() == last + 1


class _Reader(pickle.Unpickler):
    """Reads what `_Writer` has written."""

    def __init__(self, message: Message, memory: Tensor, pin: bool) -> None:
        super().__init__(io.BytesIO(message.content))
        self.memory, self.pin = memory, pin

    def persistent_load(self, value: Any) -> Tensor:
        if not isinstance(value, _InSlot):
            made = torch.from_numpy(value)
            return made.pin_memory() if self.pin else made
        # Copied by this thread with NumPy: torch would wait for one thread per core, on cores that are decoding. NumPy
        # also asks for huge pages; without them, the kernel takes longer to provide the memory than the copy takes.
        size = int(np.prod(value.shape))
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True) if self.pin else None
        copy = torch.from_numpy(np.empty(size, np.uint8)) if pinned is None else pinned
        np.copyto(copy.numpy(), self.memory[value.start : value.start + size].numpy())
        return copy.as_strided(value.shape, value.stride)
