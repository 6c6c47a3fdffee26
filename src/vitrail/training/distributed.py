"""The ranks of a run, which communicate. With a world size of 1, nothing is sent."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from vitrail.errors import ConfigError, VitrailError
from vitrail.runtime import Processes, shared_store
from vitrail.schema import Frozen
from vitrail.training.watchdog import Watchdog

T = TypeVar("T")
LOST_RANK = ("gloo", "nccl", "connection", "peer", "socket", "timed out", "c10d", "tcpstore")
"""Words in torch's error messages when another rank has died."""


def _as_shard(value: Any) -> Any:
    """Validate the whole field at once, so that an error is one sentence and not one per member of the union."""
    if isinstance(value, bool) or value == "auto":
        return value
    raise PydanticCustomError("shard", "it should be true, false or 'auto'")


class Distributed(Frozen):
    """How several ranks train one model. The result does not depend on it, so a resumed run may change it."""

    shard: Annotated[bool | Literal["auto"], BeforeValidator(_as_shard)] = "auto"
    """Whether each rank holds only a slice of the model (FSDP2) or all of it (DDP). `auto`: a slice if weights,
    gradients and optimizer state do not fit on one device."""
    timeout_minutes: Annotated[float, Field(gt=0, le=1e4)] = 60.0
    """How long a rank may be stuck, or wait for another; then the run ends and names the rank that hangs."""


class Ranks(NamedTuple):
    """The ranks of a distributed run, as seen from this one."""

    processes: Processes
    device: torch.device
    watchdog: Watchdog | None = None
    """Names a rank that hangs; None before a run has started, and with one rank."""

    @contextmanager
    def watched(self) -> Iterator["Ranks"]:
        """Name a rank that hangs, and report one that is lost, inside a `with` block."""
        if self.alone:
            yield self
            return
        seconds = 60 * Distributed().timeout_minutes
        with (
            Watchdog(shared_store("watchdog"), self.processes.rank, self.processes.size, seconds) as watchdog,
            _reporting_lost_ranks(),
        ):
            yield self._replace(watchdog=watchdog)

    def wait_at_most(self, minutes: float) -> None:
        """Set how long a rank may be stuck before the watchdog ends the run."""
        if self.watchdog is not None:
            self.watchdog.seconds = 60 * minutes

    def doing(self, what: str, step: int | None = None) -> None:
        """Tell the watchdog what this rank does from now on."""
        if self.watchdog is not None:
            self.watchdog.now(what, step)

    def _calling(self, collective: str) -> AbstractContextManager[None]:
        return nullcontext() if self.watchdog is None else self.watchdog.during(collective)

    @property
    def alone(self) -> bool:
        """Whether the world size is 1."""
        return self.processes.size == 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.processes.is_main

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DistributedDataParallel, unless there is only one rank."""
        return model if self.alone else self.replicate(model)

    def replicate(self, model: nn.Module, *, views: bool = False) -> DistributedDataParallel:
        """Wrap the model in DistributedDataParallel; `views`: gradients are views of its buckets, so one copy less."""
        devices = [self.device.index] if self.device.type == "cuda" else None
        # Gradients of 1×1 convolutions may have other strides than the buckets, which costs a copy.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=views)

    def accumulating(self, forward: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Return a context for a micro-batch: gradients are all-reduced with the last one only."""
        # Sharded gradients are reduced with every micro-batch: holding them whole would take the memory that is saved.
        if self.alone or last or isinstance(forward, FSDPModule):
            return nullcontext()
        context: AbstractContextManager[Any] = forward.no_sync()  # type: ignore[operator]
        return context

    def all_reduce_sum(self, numbers: Tensor) -> None:
        """All-reduce numbers to their sums, in place; on a GPU without a synchronisation."""
        if not self.alone:
            with self._calling("all_reduce of the metrics"):
                dist.all_reduce(numbers)

    def all_reduce_max(self, *numbers: int) -> list[int]:
        """Return the element-wise maximum over all ranks."""
        if self.alone:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        with self._calling("all_reduce of the signals to stop and to save"):
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [int(number) for number in tensor.tolist()]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.alone:
            return [value]
        gathered: list[Any] = [None] * self.processes.size
        with self._calling("all_gather"):
            dist.all_gather_object(gathered, value)
        return gathered

    def from_main(self, value: T) -> T:
        """Broadcast the value of the main process."""
        if self.alone:
            return value
        values = [value]
        with self._calling("all ranks receive from rank 0"):
            dist.broadcast_object_list(values, device=self.device)
        return values[0]

    def tensors_from_main(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Broadcast the main process's tensors; the other ranks pass None. The result is on the CPU."""
        if self.alone:
            return dict(tensors or {})
        shapes = self.from_main([(name, t.shape, t.dtype) for name, t in (tensors or {}).items()])
        received: dict[str, Tensor] = {}
        for name, shape, dtype in shapes:
            if tensors is not None:
                sent = tensors[name].to(self.device)
            else:
                sent = torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(sent, 0)
            received[name] = sent.cpu()
        return received

    @torch.no_grad()
    def average_buffers(self, model: nn.Module) -> None:
        """Average BatchNorm statistics over all ranks."""
        if self.alone:
            return
        for buffer in _running_statistics(model):
            dist.all_reduce(buffer)
            buffer /= self.processes.size

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of one rank on all ranks, so that none of them hangs."""
        error: VitrailError | None = None
        try:
            yield
        except VitrailError as raised:
            error = raised
        errors = [raised for raised in self.all_gather(error) if raised is not None]
        if errors:
            errors[0].everywhere = True
            raise errors[0] from None

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let the first rank of each machine run the block first, so that the others can use its cache."""
        if not self.alone and self.processes.local_rank:
            dist.barrier()
        try:
            yield
        finally:
            if not self.alone and not self.processes.local_rank:
                dist.barrier()


@contextmanager
def _reporting_lost_ranks() -> Iterator[None]:
    """Turn torch's error for a lost rank into a readable `ConfigError`."""
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in LOST_RANK):
            raise
        lost = ConfigError(
            "another rank has exited or cannot be reached; see its own error message, then rerun the same command to "
            "resume from the last saved training state"
        )
        lost.everywhere = True
        raise lost from None


def _running_statistics(model: nn.Module) -> Iterable[Tensor]:
    """Return the floating-point buffers in the state dict, such as BatchNorm's running statistics."""
    kept = model.state_dict(keep_vars=True)
    return (buffer for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point())
