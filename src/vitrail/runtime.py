"""Where and how computation runs: device, precision, seeds, process group."""

import contextlib
import datetime
import functools
import hashlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed
from torch import nn
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from vitrail.errors import ConfigError, suggest

Precision = Literal["float32", "bf16", "fp16"]
InferencePrecision = Precision | Literal["int8"]
"""`int8` is for inference on a CPU, with calibration images."""
PrecisionChoice = Precision | Literal["auto"]
"""`auto`: bf16 if it is faster on the device and gives the same results, else float32."""
OnProgress = Callable[[str, int, int | None], None]
"""Called with what is being done, such as "listing", how many are done, and the total if it is known."""
OnPlan = Callable[[str], None]
"""Called with the execution plan as one line, before the first image."""
TIMEOUT = datetime.timedelta(days=7)
"""How long collectives wait: longer than any watchdog, which can say which rank hangs."""
GRACE = 600.0
"""Seconds that a process has to save its state after its launcher died."""
BUSY = 1.5
"""Load average per CPU above which a machine counts as busy."""
BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""An environment variable that only torchrun sets."""
_group_count = itertools.count()
_destroyed_groups: list[object] = []
"""Destroyed process groups, kept alive. After an error the traceback still references the DistributedDataParallel
module and its group. If that were the last reference, torch would join the group's threads while holding the GIL, and
deadlock if one of them needs it."""
_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str = "auto") -> torch.device:
    """Return the device called `name`: "cpu", "cuda", "cuda:1", "mps"; "auto" picks the fastest available.

    Under torchrun, "cuda" is the GPU of this process's local rank.
    """
    usable = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in usable.items() if there)
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        kind, colon, number = name.partition(":") if isinstance(name, str) else ("", "", "")
        if kind.lower() in ("gpu", "nvidia"):
            meant = "mps" if usable["mps"] else f"cuda{colon}{number}"
            raise ConfigError(f"no device is called {name!r}; did you mean {meant!r}?") from None
        raise ConfigError(f"no device is called {name!r}{suggest(name, usable)}") from None
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", _number("LOCAL_RANK"))
    if not usable.get(device.type, False) or (
        device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    ):
        there = ", ".join(kind for kind, there in usable.items() if there)
        raise ConfigError(f"device {name!r} is not available on this machine; available: {there} (or use 'auto')")
    return device


def autocast(device: torch.device, precision: Precision, *, cache: bool = True) -> AbstractContextManager[object]:
    """Return an autocast context for `precision`; float32 changes nothing. `cache` keeps cast weights until its end."""
    if precision == "float32":
        return contextlib.nullcontext()
    if precision not in _DTYPES:
        raise ConfigError(f"no precision is called {precision!r}; choose float32, bf16 or fp16")
    return torch.autocast(device.type, dtype=_DTYPES[precision], cache_enabled=cache)


def faster_in_bf16(device: torch.device) -> bool:
    """Return whether matmuls are much faster in bf16 than in float32: GPUs since Ampere, CPUs with AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # Torch has only a private function for this; if it is gone, assume float32.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return device.type == "cpu" and has_amx is not None and bool(has_amx())


def available_cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cpu_note(device: torch.device) -> str | None:
    """Return a note if other programs keep the CPU busy and torch's threads would busy-wait for each other."""
    waits = "OMP_WAIT_POLICY" not in os.environ and torch.get_num_threads() > 1
    if device.type != "cpu" or not waits or not hasattr(os, "getloadavg"):
        return None
    try:
        load = os.getloadavg()[0]
    except OSError:  # not known on this system
        return None
    cpus = os.cpu_count() or 1  # all of them, as the load is that of the whole machine
    if load <= BUSY * cpus:
        return None
    return (
        f"note: this machine is busy (load {load:.1f} on {cpus} CPUs), so training may be slow; "
        f"OMP_WAIT_POLICY=passive often helps (see Busy CPUs in docs/guides/train.md)"
    )


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch a model to eval mode; on exit, every submodule gets its previous mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def repeatable(enabled: bool) -> Iterator[None]:
    """Use deterministic algorithms on CUDA, at some cost in speed; the CPU is always deterministic."""
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it on first use
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        if before[1] is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def seed_torch(seed: int) -> None:
    """Seed torch's generators on every device."""
    torch.manual_seed(seed)


def derive_seed(seed: int, *place: int | str) -> int:
    """Derive a seed for one use in a run: a pure function, the same on every machine, so no random state is saved.

    >>> derive_seed(0, "dropout", 7) == derive_seed(0, "dropout", 7) != derive_seed(0, "dropout", 8)
    True
    """
    words = "\x1f".join(f"{type(item).__name__}:{item}" for item in (seed, *place))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1


class Processes(NamedTuple):
    """The rank of this process and the world size."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[Processes]:
    """Join the process group of torchrun, and destroy it at the end; do nothing in a single process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    there = [name for name in names if name in os.environ]
    if not there:
        yield Processes()
        return
    if len(there) < len(names):
        raise ConfigError(
            f"the environment sets {', '.join(there)} but not {', '.join(sorted(set(names) - set(there)))}; "
            f"start several processes with torchrun, or unset them"
        )
    processes = Processes(*(_number(name) for name in names))
    if BY_TORCHRUN in os.environ:
        exit_with_launcher(os.getppid())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store = shared_store("group")
        backend = _backend(device, store, processes)
        torch.distributed.init_process_group(
            backend,
            store=store,
            rank=processes.rank,
            world_size=processes.size,
            timeout=TIMEOUT,
            device_id=device if backend == "nccl" else None,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the process group could not be initialised ({error}); start the processes with torchrun"
        ) from None
    _destroyed_groups.append(torch.distributed.group.WORLD)
    try:
        yield processes
    finally:
        torch.distributed.destroy_process_group()


@functools.cache
def exit_with_launcher(launcher: int) -> None:
    """Start a thread, once per process, that ends this process if only its launcher was killed."""
    threading.Thread(target=_watch_launcher, args=(launcher,), daemon=True, name="launcher").start()


def _watch_launcher(launcher: int) -> None:
    """Send SIGTERM to this process once the launcher is gone, so that a run saves its state."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)  # it is stuck waiting for other ranks or for the disk


def _backend(device: torch.device, store: Store, processes: Processes) -> str:
    """Return "nccl" for GPUs, unless two ranks share one, which NCCL refuses; else "gloo"."""
    if device.type != "cuda":
        return "gloo"
    store.set(f"device-{processes.rank}", f"{socket.gethostname()} {device}")
    devices = [store.get(f"device-{rank}") for rank in range(processes.size)]
    return "nccl" if len(set(devices)) == len(devices) else "gloo"


def shared_store(name: str) -> Store:
    """Return a key-value store that all ranks share. They have to ask for the same stores in the same order.

    Each has its own prefix: neither another group of this process nor ranks that torchrun has replaced can be read.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"vitrail-{name}-{restart}-{next(_group_count)}", _rendezvous_store())


@functools.cache
def _rendezvous_store() -> Store:
    """Return the rendezvous store from torchrun's environment variables."""
    store: Store = next(rendezvous("env://"))[0]
    return store


def _number(name: str) -> int:
    """Read an integer from the environment."""
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(f"{name} should be an integer, found {os.environ[name]!r}") from None


# ── progress ──


class StageProgress(Protocol):
    """Called with how many are done in one stage, and the total if it is known."""

    def __call__(self, done: int, total: int | None = None) -> None:
        """Report progress."""


def on_stage(on_progress: OnProgress | None, stage: str) -> StageProgress | None:
    """Return the callback of one stage."""
    if on_progress is None:
        return None

    def report(done: int, total: int | None = None) -> None:
        on_progress(stage, done, total)

    return report
