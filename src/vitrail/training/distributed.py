"""The processes of one run: what they tell each other. A run of one process is a team of one, and nothing is sent."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitrail.errors import ConfigError, VitrailError
from vitrail.runtime import Precision, Processes

T = TypeVar("T")
LOST = ("gloo", "nccl", "connection", "peer", "socket", "timed out", "c10d", "tcpstore")
"""Words in what torch says when another process has gone."""


class Ranks(NamedTuple):
    """The processes that train together, as this one sees them."""

    processes: Processes
    device: torch.device

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.processes.size == 1

    @property
    def is_main(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.processes.is_main

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model as it is trained: with gradients averaged over all processes."""
        if self.alone:
            return model
        return DistributedDataParallel(model, device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def accumulating(self, forward: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Return a context for a part of a batch: gradients are exchanged with the last part only."""
        if self.alone or last:
            return nullcontext()
        held: AbstractContextManager[Any] = forward.no_sync()  # type: ignore[operator]
        return held

    def add_up(self, numbers: Tensor) -> None:
        """Make numbers on the device their sums over all processes; on a GPU nobody waits for them."""
        if not self.alone:
            dist.all_reduce(numbers)

    def largest(self, *numbers: int) -> list[int]:
        """Return the largest of each of the numbers that the processes have."""
        if self.alone:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [int(number) for number in found.tolist()]

    def gathered(self, value: T) -> list[T]:
        """Return what every process has, in their order."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.processes.size
        dist.all_gather_object(found, value)
        return found

    def from_main(self, value: T) -> T:
        """Return what the main process has."""
        if self.alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def tensors_from_main(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the main process's tensors; the others give None. They arrive on the CPU."""
        if self.alone:
            return dict(tensors or {})
        shapes = self.from_main([(name, t.shape, t.dtype) for name, t in (tensors or {}).items()])
        found: dict[str, Tensor] = {}
        for name, shape, dtype in shapes:
            if tensors is not None:
                sent = tensors[name].to(self.device)
            else:
                sent = torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(sent, 0)
            found[name] = sent.cpu()
        return found

    @torch.no_grad()
    def average_buffers(self, model: nn.Module) -> None:
        """Give every process the mean of what each has measured of its own images."""
        if self.alone:
            return
        for buffer in _measured(model):
            dist.all_reduce(buffer)
            buffer /= self.processes.size

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let what fails in one process fail in all of them, with the same error, and nobody wait for the other."""
        error: VitrailError | None = None
        try:
            yield
        except VitrailError as found:
            error = found
        errors = [found for found in self.gathered(error) if found is not None]
        if errors:
            errors[0].everywhere = True
            raise errors[0] from None

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Have the first process of every machine do what the others can then take from its cache."""
        if not self.alone and self.processes.local_rank:
            dist.barrier()
        try:
            yield
        finally:
            if not self.alone and not self.processes.local_rank:
                dist.barrier()

    @contextmanager
    def noticing_losses(self) -> Iterator[Self]:
        """Turn what torch raises when another process has gone into a sentence."""
        try:
            yield self
        except RuntimeError as error:
            if self.alone or not any(word in str(error).lower() for word in LOST):
                raise
            lost = ConfigError(
                "another process of the run has ended, or cannot be reached; its own message says why, and the same "
                "command goes on from the last saved state"
            )
            lost.everywhere = True
            raise lost from None


@dataclass(frozen=True)
class RunContext:
    """What a run computes on."""

    device: torch.device
    precision: Precision
    workers: int
    ranks: Ranks


def _measured(model: nn.Module) -> Iterable[Tensor]:
    """Return the buffers that training changes and a checkpoint keeps."""
    kept = model.state_dict(keep_vars=True)
    return (buffer for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point())
