"""Where and how computation runs: device, precision, seeds, process group."""

import contextlib
import datetime
import functools
import hashlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import torch
import torch.distributed
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from vitrail.errors import ConfigError, suggest

Precision = Literal["float32", "bf16", "fp16"]
PATIENCE = datetime.timedelta(hours=1)
"""How long processes wait for one of them, which may be decoding a data set, or fetching a model."""
GRACE = 600.0
"""Seconds that a process may take to save what it has after its launcher has gone."""
BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""What torchrun, and nobody else, puts into the environment of the processes it starts."""
_meetings = itertools.count()
_left: list[object] = []
"""Process groups that were left. Torch ends a group without Python's lock only where Python lets go of it last. After
an error a traceback still holds the DistributedDataParallel that was trained, and with it the group; let go of there,
it waits for its threads with the lock in hand, and where one of those wants the lock, for ever."""
_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str = "auto") -> torch.device:
    """Return the device called `name`: "cpu", "cuda", "cuda:1", "mps"; "auto" takes the fastest there is.

    Among the processes of torchrun, "cuda" is the GPU that belongs to this one.
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
        raise ConfigError(f"device {name!r} is not on this machine; there is {there} (or use 'auto')")
    return device


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Return a context in which matrix products run in `precision`; float32 changes nothing."""
    if precision == "float32":
        return contextlib.nullcontext()
    if precision not in _DTYPES:
        raise ConfigError(f"no precision is called {precision!r}; choose float32, bf16 or fp16")
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def faster_in_bf16(device: torch.device) -> bool:
    """Say whether matrix products in bf16 are well faster than in float32 there: GPUs since Ampere, CPUs with AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # torch says so only under a private name; one that is gone means that nothing is known, so float32.
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return device.type == "cpu" and has_tiles is not None and bool(has_tiles())


@contextlib.contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Have CUDA give the same bits every time, at some cost of speed; on a CPU it does so anyway."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        if before[1] is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def seed_torch(seed: int) -> None:
    """Start torch's generators, on every device, from `seed`."""
    torch.manual_seed(seed)


def derive_seed(seed: int, *place: int | str) -> int:
    """Return a seed for one place in a run, the same on every machine: a pure function, so nothing need be saved.

    >>> derive_seed(0, "dropout", 7) == derive_seed(0, "dropout", 7) != derive_seed(0, "dropout", 8)
    True
    """
    words = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *place))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1


class Processes(NamedTuple):
    """Which of the cooperating processes this one is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints and writes."""
        return self.rank == 0


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[Processes]:
    """Join the other processes that torchrun started, and leave them at the end; alone, do nothing."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    there = [name for name in names if name in os.environ]
    if not there:
        yield Processes()
        return
    if len(there) < len(names):
        raise ConfigError(
            f"the environment has {', '.join(there)} but not {', '.join(sorted(set(names) - set(there)))}; "
            f"start several processes with torchrun, or unset them"
        )
    processes = Processes(*(_number(name) for name in names))
    if BY_TORCHRUN in os.environ:
        _end_with_launcher()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        # Every meeting has names of its own, so that a second one in the same program does not read the first one's.
        store = PrefixStore(f"vitrail-{next(_meetings)}", _meeting_place())
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=processes.rank,
            world_size=processes.size,
            timeout=PATIENCE,
            device_id=device if device.type == "cuda" else None,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the processes could not meet ({error}); start them with torchrun") from None
    _left.append(torch.distributed.group.WORLD)
    try:
        yield processes
    finally:
        torch.distributed.destroy_process_group()


@functools.cache
def _end_with_launcher() -> None:
    """See to it, once in a process, that it does not run on for ever where torchrun alone was killed."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="launcher").start()


def _watch(launcher: int) -> None:
    """Once the launcher is gone, ask this process to stop, as the launcher would have: a run then saves its state."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)  # it waits for others that are gone, or saves to a disk that does not answer


@functools.cache
def _meeting_place() -> Store:
    """Return where processes find each other: what torchrun tells them by the environment."""
    store: Store = next(rendezvous("env://"))[0]
    return store


def _number(name: str) -> int:
    """Read a whole number from the environment."""
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(f"{name} should be a whole number, found {os.environ[name]!r}") from None
