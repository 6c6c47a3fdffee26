"""Fit a run into memory: how much it may use, `batch = "auto"`, and what to change when memory runs out."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed

from vitrail.errors import ConfigError
from vitrail.text import byte_size
from vitrail.training.context import Job
from vitrail.training.memory import Forecast, forecast, step_fits
from vitrail.training.plan import TrainingPlan, steps_per_epoch_text, with_batch
from vitrail.training.recipe_files import read_recipe
from vitrail.training.run_folder import RECIPE

ROOT = Path("/")
HOPELESS = 3
"""A run whose forecast exceeds the available memory by this factor is not started at all."""
FILLED = 0.85
"""Fraction of the memory that an automatic batch may fill; kernels, fragmentation and other programs need the rest."""


# ── available memory ──


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
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return
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


# ── batch size ──


def fit_batch_to_memory(job: Job, folder: Path, images: int, limit: MemoryLimit) -> Job:
    """Resolve a batch size of "auto" from the available memory.

    Any other job is returned unchanged. A resumed run keeps its batch size, however much memory is free now.
    """
    if job.plan.recipe.batch != "auto":
        return job
    if (recorded := _from_main(_recorded_batch(folder), job.device)) > 0:
        return job._replace(plan=with_batch(job.plan, recorded, images, "as when this run started"))
    limit = limit._replace(free=min_over_ranks(limit.free, job.device))
    unit = batch_unit(job.plan, job.processes, job.plan.recipe.gradient_accumulation)
    usual = batch = -(-job.plan.batch // unit) * unit
    needed = 0
    while True:
        candidate = job._replace(plan=with_batch(job.plan, batch, images, ""))
        estimate = forecast(candidate)
        needed = needed or estimate.total
        if estimate.total <= FILLED * limit.free and _fits_everywhere(candidate, estimate):
            break
        if batch == unit:
            raise ConfigError(
                f"{limit.place} has {byte_size(limit.free)} for this run, and even the smallest batch, {unit}, "
                "needs about "
                f"{byte_size(estimate.total)}; use {_other_remedies(job)}"
            )
        batch = _next_smaller(batch, unit)
        while (
            batch > unit and estimate.with_images(_micro_batch(job, batch), estimate.accumulation) > FILLED * limit.free
        ):
            batch = _next_smaller(batch, unit)
    why = f"{steps_per_epoch_text(images, batch)}, which fits in {byte_size(limit.free)}"
    if batch < usual:
        why = (
            f"{usual} would need about {byte_size(needed)}, and {limit.place} has {byte_size(limit.free)} for this run"
        )
    return job._replace(plan=with_batch(job.plan, batch, images, why))


@contextmanager
def within_memory(job: Job, folder: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Report the memory forecast of the training inside; if memory runs out, raise and suggest what would fit."""
    estimate = forecast(job)
    # The model, its average and the teacher are already allocated; only on a GPU can torch report them.
    limit = memory_limit(job.device, held=estimate.weights + estimate.average + estimate.teacher)
    note(forecast_line(estimate, limit))
    if estimate.total > HOPELESS * limit.free:
        raise ConfigError(_out_of_memory(job, estimate, limit))
    if estimate.total > limit.free:
        note(f"memory: this exceeds what is available; use {_remedies(job, estimate, limit)}")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        saved = "; the last saved training state is kept" if any((folder / "state").glob("[0-9]*")) else ""
        raise ConfigError(f"{_out_of_memory(job, estimate, limit)}{saved}") from None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out, on a GPU or on the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = r"can't allocate memory|not enough memory|out of memory"  # Linux, Windows, Apple GPUs
    return isinstance(error, RuntimeError) and re.search(words, str(error)) is not None


def forecast_line(estimate: Forecast, limit: MemoryLimit) -> str:
    """Format a forecast as one line."""
    unit = 1e9 if estimate.total >= 1e9 else 1e6
    components = {
        "weights": estimate.weights,
        "gradients": estimate.gradients,
        "optimizer": estimate.optimizer,
        "average": estimate.average,
        "teacher": estimate.teacher,
        "images on the device": estimate.resident,
        "activations": estimate.in_flight,
    }
    listed = ", ".join(f"{name} {size / unit:.1f}" for name, size in components.items() if size >= 0.05 * unit)
    return f"memory: about {byte_size(estimate.total)} of {byte_size(limit.free)} ({listed})"


def _out_of_memory(job: Job, estimate: Forecast, limit: MemoryLimit) -> str:
    needs = f"about {byte_size(estimate.total)}" if estimate.total > limit.free else "more"
    return (
        f"out of memory: {limit.place} has {byte_size(limit.free)} for this run, and a batch of {job.plan.batch} needs "
        f"{needs}; use {_remedies(job, estimate, limit)}"
    )


def _remedies(job: Job, estimate: Forecast, limit: MemoryLimit) -> str:
    """Suggest what would fit: a smaller batch, more gradient accumulation, or a smaller model."""
    # If memory ran out although the forecast fits, scale the budget down by how far the forecast was off.
    budget = FILLED * limit.free / max(1.0, limit.free / estimate.total)
    batch, accumulation, options = job.plan.batch, estimate.accumulation, []
    unit = batch_unit(job.plan, job.processes, accumulation)
    smaller = batch
    while smaller > unit and estimate.with_images(_micro_batch(job, smaller), accumulation) > budget:
        smaller = _next_smaller(smaller, unit)
    if smaller < batch and estimate.with_images(_micro_batch(job, smaller), accumulation) <= budget:
        options.append(f"--set batch={smaller}")
    more = 2 * accumulation
    while batch % batch_unit(job.plan, job.processes, more) == 0:
        if estimate.with_images(batch // (job.processes * more), more) <= budget:
            options.append(f"keep the batch size with --set gradient_accumulation={more}")
            break
        more *= 2
    return ", or ".join([*options, _other_remedies(job)])


def _other_remedies(job: Job) -> str:
    checkpointing = "" if job.plan.recipe.gradient_checkpointing else "--set gradient_checkpointing=true, or "
    return f"{checkpointing}a smaller model or image"


def batch_unit(plan: TrainingPlan, processes: int, accumulation: int) -> int:
    """Return what the batch size must be a multiple of, so that every micro-batch holds whole pairs of images."""
    return 2 * processes * accumulation * plan.recipe.data.repeats


def _next_smaller(batch: int, unit: int) -> int:
    return max(unit, batch // 2 // unit * unit)


def _micro_batch(job: Job, batch: int) -> int:
    return max(1, batch // (job.processes * job.plan.recipe.gradient_accumulation))


def _recorded_batch(folder: Path) -> int:
    """Return the batch size of the run in a folder, or 0 without a run."""
    if not (folder / RECIPE).exists():
        return 0
    batch = read_recipe(folder / RECIPE).batch
    return batch if isinstance(batch, int) else 0


def _fits_everywhere(job: Job, estimate: Forecast) -> bool:
    """Run a real step on every rank's device where that is quick (CUDA)."""
    return min_over_ranks(int(job.device.type != "cuda" or step_fits(job, estimate)), job.device) == 1


def min_over_ranks(value: int, device: torch.device) -> int:
    """Return the minimum over all ranks."""
    if not torch.distributed.is_initialized():
        return value
    reduced = torch.tensor(value, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(reduced, torch.distributed.ReduceOp.MIN)
    return int(reduced)


def _from_main(value: int, device: torch.device) -> int:
    """Return the value of the main process, the only one that may see the folder."""
    if not torch.distributed.is_initialized():
        return value
    reduced = torch.tensor(value, dtype=torch.int64, device=device)
    torch.distributed.broadcast(reduced, src=0)
    return int(reduced)
