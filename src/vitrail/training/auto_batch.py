"""Making a run fit into memory: the batch that `batch = "auto"` finds, and what to do where memory runs out."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed

from vitrail.errors import ConfigError
from vitrail.training.defaults import TrainingPlan, steps_said, with_batch
from vitrail.training.memory import Forecast, Job, fits_really, forecast
from vitrail.training.memory_limits import MemoryLimit, memory_limit
from vitrail.training.recipe import read_recipe
from vitrail.training.run_folder import RECIPE

HOPELESS = 3
"""How many times the memory there is a forecast must be for a run not to be begun at all."""
FILLED = 0.85
"""How much of the memory a batch that is chosen may fill: kernels, pieces and other programs need some, too."""


def fit_batch_to_memory(job: Job, folder: Path, images: int, there: MemoryLimit) -> TrainingPlan:
    """Settle a batch that is "auto" by the memory there is, for a run of so many images in this folder.

    Any other plan stays as it is. A run that goes on keeps the batch it began with, however much memory there is now.
    """
    if job.plan.recipe.batch != "auto":
        return job.plan
    if (began_with := _of_the_main_process(_recorded(folder), job.device)) > 0:
        return with_batch(job.plan, began_with, images, "as this run began")
    there = there._replace(free=_least(there.free, job.device))
    unit = _unit(job.plan, job.processes, job.plan.recipe.gradient_accumulation)
    usual = batch = -(-job.plan.batch // unit) * unit
    needed = 0
    while True:
        tried = job._replace(plan=with_batch(job.plan, batch, images, ""))
        known = forecast(tried)
        needed = needed or known.total
        if known.total <= FILLED * there.free and _fits_everywhere(tried, known):
            break
        if batch == unit:
            raise ConfigError(
                f"{there.place} has {_size(there.free)} for this run, and even the smallest batch, {unit}, needs about "
                f"{_size(known.total)}; use {_other_remedies(job)}"
            )
        batch = _next_smaller(batch, unit)
        while batch > unit and known.with_images(_at_once(job, batch), known.parts) > FILLED * there.free:
            batch = _next_smaller(batch, unit)
    why = f"{steps_said(images, batch)}, which fits into {_size(there.free)}"
    if batch < usual:
        why = f"{usual} would need about {_size(needed)}, and {there.place} has {_size(there.free)} for this run"
    return with_batch(job.plan, batch, images, why)


@contextmanager
def within_memory(job: Job, folder: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Say what the training inside will take, and, where memory runs out all the same, what would fit."""
    known = forecast(job)
    # The model and its average exist by now; only on a GPU does torch itself know what is held.
    there = memory_limit(job.device, held=known.weights + known.average)
    note(shown(known, there))
    if known.total > HOPELESS * there.free:
        raise ConfigError(_out_of_memory(job, known, there))
    if known.total > there.free:
        note(f"memory: that is more than there is; use {_remedies(job, known, there)}")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_lack_of_memory(error):
            raise
        saved = "; the last saved state is kept" if any((folder / "state").glob("[0-9]*")) else ""
        raise ConfigError(f"{_out_of_memory(job, known, there)}{saved}") from None


def _out_of_memory(job: Job, known: Forecast, there: MemoryLimit) -> str:
    needs = f"about {_size(known.total)}" if known.total > there.free else "more"
    return (
        f"out of memory: {there.place} has {_size(there.free)} for this run, and a batch of {job.plan.batch} needs "
        f"{needs}; use {_remedies(job, known, there)}"
    )


def is_lack_of_memory(error: Exception) -> bool:
    """Tell whether an error means that memory ran out, on a GPU or on the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = r"can't allocate memory|not enough memory|out of memory"  # Linux, Windows, Apple's GPUs
    return isinstance(error, RuntimeError) and re.search(words, str(error)) is not None


def shown(known: Forecast, there: MemoryLimit) -> str:
    """Return a forecast as one line."""
    unit = 1e9 if known.total >= 1e9 else 1e6
    parts = {
        "weights": known.weights,
        "gradients": known.gradients,
        "optimiser": known.optimizer,
        "average": known.average,
        "images that stay there": known.resident,
        "images in flight": known.in_flight,
    }
    listed = ", ".join(f"{name} {size / unit:.1f}" for name, size in parts.items() if size >= 0.05 * unit)
    return f"memory: about {_size(known.total)} of {_size(there.free)} ({listed})"


def _remedies(job: Job, known: Forecast, there: MemoryLimit) -> str:
    """Say what would fit: a smaller batch, more parts, or less of everything."""
    # Where memory ran out although the forecast fits, everything takes so much more than it says.
    limit = FILLED * there.free / max(1.0, there.free / known.total)
    batch, parts, found = job.plan.batch, known.parts, []
    unit = _unit(job.plan, job.processes, parts)
    smaller = batch
    while smaller > unit and known.with_images(_at_once(job, smaller), parts) > limit:
        smaller = _next_smaller(smaller, unit)
    if smaller < batch and known.with_images(_at_once(job, smaller), parts) <= limit:
        found.append(f"--set batch={smaller}")
    more = 2 * parts
    while batch % _unit(job.plan, job.processes, more) == 0:
        if known.with_images(batch // (job.processes * more), more) <= limit:
            found.append(f"keep the batch and cut it with --set gradient_accumulation={more}")
            break
        more *= 2
    return ", or ".join([*found, _other_remedies(job)])


def _other_remedies(job: Job) -> str:
    checkpointing = "" if job.plan.recipe.gradient_checkpointing else "--set gradient_checkpointing=true, or "
    return f"{checkpointing}a smaller model or image"


def _unit(plan: TrainingPlan, processes: int, parts: int) -> int:
    """Return what a batch must be a multiple of, so that every part of it is whole pairs of images."""
    return 2 * processes * parts * plan.recipe.data.repeats


def _next_smaller(batch: int, unit: int) -> int:
    return max(unit, batch // 2 // unit * unit)


def _at_once(job: Job, batch: int) -> int:
    return max(1, batch // (job.processes * job.plan.recipe.gradient_accumulation))


def _recorded(folder: Path) -> int:
    """Return the batch of the run that lies in a folder, 0 where there is none."""
    if not (folder / RECIPE).exists():
        return 0
    batch = read_recipe(folder / RECIPE).batch
    return batch if isinstance(batch, int) else 0


def _fits_everywhere(job: Job, known: Forecast) -> bool:
    """Try a step for real where that is quick, on every process's own device."""
    return _least(int(job.device.type != "cuda" or fits_really(job, known)), job.device) == 1


def _least(value: int, device: torch.device) -> int:
    """Return the least that any of the processes has found."""
    if not torch.distributed.is_initialized():
        return value
    shared = torch.tensor(value, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN)
    return int(shared)


def _of_the_main_process(value: int, device: torch.device) -> int:
    """Return what the main process has found, which alone may see the folder."""
    if not torch.distributed.is_initialized():
        return value
    shared = torch.tensor(value, dtype=torch.int64, device=device)
    torch.distributed.broadcast(shared, src=0)
    return int(shared)


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
