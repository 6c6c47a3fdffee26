"""Steps that overlap with the device: the next step is launched before the metrics of the previous one are read."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from vitrail.data.views import AnyBatch
from vitrail.errors import Diverged
from vitrail.runtime import autocast
from vitrail.training.context import Job
from vitrail.training.optimizers import learning_rate, set_weight_decay, weight_decay_at
from vitrail.training.run_folder import MetricsFile
from vitrail.training.state import State
from vitrail.training.step import PendingStep, Stepper, StepResult, forward_of, reset_compiled

RECENT = 5
"""Losses that the explanation of a diverged step lists."""


class LaunchedStep(NamedTuple):
    """A step whose metrics have not been read."""

    pending: PendingStep
    batch: AnyBatch
    lr: float
    waited: float


class FinishedStep(NamedTuple):
    """A step and its metrics."""

    step: int
    """Steps taken, including this one."""
    result: StepResult
    lr: float
    waited: float
    """Seconds that the device idled while waiting for data."""
    seconds: float
    """Seconds since the previous step finished, without `waited`."""


class PipelinedStepper:
    """Takes the steps of a run. Use it as a context, which ends by freeing what compiled models hold.

    On a GPU a step's metrics are read after the next step is launched, so that the device never idles; on a CPU every
    step is finished when `step` returns.
    """

    forward: nn.Module

    def __init__(self, job: Job, stepper: Stepper, state: State, folder: Path) -> None:
        """`folder`: the run folder, whose metrics explain why a step diverged."""
        self.plan, self.context = job.plan, job.context
        self.stepper, self.state, self.folder = stepper, state, folder
        self.launched: LaunchedStep | None = None
        self.waited = 0.0

    def __enter__(self) -> Self:
        self.forward = forward_of(self.state.model, self.context.execution, self.context.ranks)
        self._restart_timer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self.forward
        self.launched = None
        if self.plan.recipe.compile is True:
            self.state.optimizer.zero_grad(set_to_none=True)  # they live in the CUDA graph's memory
            reset_compiled(self.context.device)

    def timed(self, loader: Iterator[AnyBatch]) -> Iterator[AnyBatch]:
        """Yield the batches and time the waits for them; a wait does not count if the device was busy throughout."""
        while True:
            if self.paused:  # validating and saving are not a part of any step
                self._restart_timer()
            start, ranks = time.monotonic(), self.context.ranks
            ranks.doing("reading images", self.state.progress.step + 1)
            batch = next(loader, None)
            if batch is None:
                return
            ranks.doing("forward and backward pass, with the all-reduce of the gradients")
            seconds = time.monotonic() - start
            busy = self.launched is not None and self.launched.pending.is_busy()
            self.waited = 0.0 if busy else seconds
            self.idle += self.waited
            yield batch

    def step(self, batch: AnyBatch) -> list[FinishedStep]:
        """Launch a step; return the steps that are now finished: this one, or on a GPU the previous one."""
        recipe, step, steps = self.plan.recipe, self.state.progress.step, self.plan.steps
        lr = learning_rate(recipe.schedule, step, steps, self.plan.peak_lr)
        decay = weight_decay_at(recipe.schedule, step, steps, recipe.optimizer.weight_decay)
        set_weight_decay(self.state.optimizer, decay)
        try:
            pending = self.stepper.launch(self.state, self.forward, batch, lr)
        except Diverged as error:
            raise self._explained(error, batch) from None
        finished = self._read()  # only now, when the device has the next step to compute
        self.launched = LaunchedStep(pending, batch, lr, self.waited)
        return finished if pending.ready is not None else [*finished, *self._read()]

    def flush(self) -> list[FinishedStep]:
        """Wait for the launched step and return it; stop the timer until the next batch."""
        finished = self._read()
        self.paused = True
        return finished

    def _read(self) -> list[FinishedStep]:
        if self.launched is None:
            return []
        pending, batch, lr, waited = self.launched
        try:
            result = pending.read()
        except Diverged as error:
            raise self._explained(error, batch) from None
        seconds = max(time.monotonic() - self.since - self.idle, 0.0)
        self.launched = None
        self._restart_timer()
        return [FinishedStep(pending.number + 1, result, lr, waited, seconds)]

    def _restart_timer(self) -> None:
        self.since, self.idle, self.paused = time.monotonic(), 0.0, False

    def _explained(self, error: Diverged, batch: AnyBatch) -> Diverged:
        losses = [row["loss"] for row in MetricsFile.read(self.folder) if "loss" in row][-RECENT:]
        layer = first_not_finite(self.state.model, self.stepper, batch, self.state.progress.step)
        recent = ", ".join(f"{loss:.3g}" for loss in losses)
        explained = Diverged(
            f"{error}; previous losses: {recent or 'none'}; first module with a non-finite output: {layer}. Try a "
            f"smaller optimizer.lr, optimizer.max_grad_norm=1, a longer warm-up, or precision=float32; the last saved "
            f"training state is kept in {self.folder / 'state'}"
        )
        explained.everywhere = True
        return explained


@torch.no_grad()
def first_not_finite(model: nn.Module, stepper: Stepper, batch: AnyBatch, step: int) -> str:
    """Return the name of the first module whose output is not finite for the batch of a step."""
    names: list[str] = []

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def look(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all() and not names:
                names.append(name)

        return module.register_forward_hook(look)

    handles = [watch(name, module) for name, module in model.named_modules() if name]
    try:
        for index in range(stepper.recipe.gradient_accumulation):
            micro_batch = batch.micro(index, stepper.recipe.gradient_accumulation).to(stepper.device)
            inputs = stepper.inputs(micro_batch, stepper.first_position(batch, step, index))
            with autocast(stepper.device, stepper.precision):
                model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return names[0] if names else "none; all outputs were finite, so this step's gradient was not"
