"""The memory a run may use: on a GPU, or on this machine within its container and process limits."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path("/")


class MemoryLimit(NamedTuple):
    """Available memory."""

    free: int
    """Bytes that this process can still allocate, including its own tensors."""
    place: str
    """"the GPU", "this machine"."""


def memory_limit(device: torch.device, held: int = 0) -> MemoryLimit:
    """Return the memory that a run may use on a device; `held` bytes of tensors are already allocated."""
    if device.type == "cuda":
        # Torch's caching allocator keeps freed memory reserved for this process.
        return MemoryLimit(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device), "the GPU")
    if device.type == "mps":
        return MemoryLimit(torch.mps.recommended_max_memory(), "the GPU")
    siblings = os.environ.get("LOCAL_WORLD_SIZE", "1")  # ranks started by torchrun share the machine
    return MemoryLimit(machine_memory() // (int(siblings) if siblings.isdecimal() else 1) + held, "this machine")


def machine_memory(root: Path = ROOT) -> int:
    """Return how many bytes this process can still allocate on this machine: the tightest of all limits.

    `root` holds /proc and /sys.
    """
    limits = [*_whole_machine(root), *_control_groups(root), *_process_limits(root)]
    return max(0, min(limits, default=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


def _whole_machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _process_limits(root: Path) -> Iterator[int]:
    """Yield what `ulimit -v` and `ulimit -d` leave."""
    used = {line.split(":")[0]: line.split()[1] for line in _lines(root / "proc/self/status") if line.startswith("Vm")}
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        allowed = resource.getrlimit(limit)[0]
        if allowed != resource.RLIM_INFINITY and name in used:
            yield allowed - int(used[name]) * 1024


def _control_groups(root: Path) -> Iterator[int]:
    """Yield what cgroups (v2 or v1) leave, from this process's group up to the root."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield from _cgroup_free(folder, *names)
            if folder == top:
                break


def _cgroup_free(group: Path, limit: str, usage: str, inactive: str) -> Iterator[int]:
    """Yield what a cgroup leaves: its limit minus its usage, not counting inactive page cache."""
    allowed, used = _lines(group / limit), _lines(group / usage)
    if not allowed or not used or not allowed[0].isdecimal():  # "max": no limit
        return
    cached = [line.split()[1] for line in _lines(group / "memory.stat") if line.startswith(f"{inactive} ")]
    yield int(allowed[0]) - int(used[0]) + sum(map(int, cached))


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, or none if it does not exist."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
