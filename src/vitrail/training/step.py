"""One step of training: forward, backward, clip, update; what a run consists of."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.data.augmentation.mixing import mix_pixels
from vitrail.data.batches import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.errors import Diverged
from vitrail.runtime import Precision, autocast, derive_seed, seed_torch
from vitrail.training import objectives
from vitrail.training.distributed import Ranks
from vitrail.training.optimizers import can_leave_out, clip_gradients, set_learning_rate, step_unless
from vitrail.training.recipe import Recipe
from vitrail.training.state import State

TRUSTED_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All of torch's kernels but cuDNN's, of which NaN gradients in bf16 are reported on Hopper GPUs for 64, 192, … tokens
(pytorch issue 196678). Runs with 64 tokens ended so, and torch takes that kernel there by itself; that it was the cause
is likely, not shown. `FusedTraining` chooses by itself."""
REPEATABLE_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Those whose backward pass adds up in the same order every time, where that is asked for."""


class StepResult(NamedTuple):
    """What a step came to."""

    loss: float
    correct: int
    """How many images were answered rightly; with mixing, by the larger share."""
    gradient_norm: float


class PendingStep(NamedTuple):
    """A step that the device may still be busy with: its numbers are there once they are asked for."""

    number: int
    numbers: Tensor
    """The losses of its parts, their numbers of right answers, both added up over all processes, and the norm of the
    gradient. Of a GPU's this is a copy that is on its way to here."""
    ready: torch.cuda.Event | None
    """When that copy is here; None where there is nothing to wait for. To ask the device for a number instead would be
    to wait until it is done with all it has, which is the step after this one, too."""
    processes: int
    left_out: bool
    """Whether a step that does not count has changed nothing: fp16's too large gradients, which are no accident."""
    done: torch.cuda.Event | None = None
    """When the device is at the end of the step, the update included; None where it was there at once."""

    def is_busy(self) -> bool:
        """Say whether the device has not come to the end of this step."""
        return self.done is not None and not self.done.query()

    def read(self) -> StepResult:
        """Wait for this step, and say what it came to; no other process is asked."""
        if self.ready is not None:
            self.ready.synchronize()
        *parts, norm = self.numbers.tolist()
        micros = len(parts) // 2
        loss, correct = sum(parts[:micros]) / micros / self.processes, round(sum(parts[micros:]))
        if not (math.isfinite(loss) and (math.isfinite(norm) or self.left_out)):
            raise Diverged(f"step {self.number}: the loss is {loss}, the norm of the gradient {norm}")
        return StepResult(loss, correct, norm)


class Stepper(NamedTuple):
    """What every step of a run needs."""

    recipe: Recipe
    preprocess: Preprocess
    device: torch.device
    precision: Precision
    weights: Tensor | None
    """How much each class counts."""
    ranks: Ranks

    def step(self, state: State, forward: nn.Module, batch: Batch, rate: float) -> StepResult:
        """Change the state by one batch, and wait for it. `forward` is the model, or what wraps it."""
        return self.take(state, forward, batch, rate).read()

    def take(self, state: State, forward: nn.Module, batch: Batch, rate: float) -> PendingStep:
        """Change the state by one batch, as far as the device has come; a step that diverged changes no weight.

        On a GPU nothing here waits for it, so that the next step can be on its way before this one is done. Where that
        is not possible, a step that diverged is known here.
        """
        number = state.progress.step
        numbers = self._gradients(state, forward, batch)
        set_learning_rate(state.optimizer, rate)
        if self.runs_ahead and can_leave_out(state.optimizer) and not state.scaler.is_enabled():
            # Sent before the update, so that it is here as soon as it is known.
            taken = PendingStep(number, *_on_its_way(numbers), self.ranks.processes.size, left_out=False)
            step_unless(~numbers.isfinite().all(), state.optimizer)
        else:
            # In fp16 a too large gradient is no accident: the step is left out, and the next one scaled by less.
            left_out = state.scaler.is_enabled() and state.scaler.get_scale() > 1
            taken = PendingStep(number, numbers.cpu(), None, self.ranks.processes.size, left_out)
            taken.read()
            state.scaler.step(state.optimizer)
            state.scaler.update()
        self.ranks.average_buffers(state.model)
        state.progress.step += 1
        if state.average is not None:
            state.average.update(state.model, state.progress.step)
        return taken if taken.ready is None else taken._replace(done=_now(self.device))

    def _gradients(self, state: State, forward: nn.Module, batch: Batch) -> Tensor:
        """Compute the gradients of a batch, part by part, and clip them; return what `Taken.numbers` says."""
        number, micros = state.progress.step, self.recipe.gradient_accumulation
        state.optimizer.zero_grad(set_to_none=True)
        attention = REPEATABLE_ATTENTION if self.recipe.deterministic else TRUSTED_ATTENTION
        losses: list[Tensor] = []
        corrects: list[Tensor] = []
        for micro in range(micros):
            # Dropout is drawn from the place in the run, so nothing random has to be saved.
            seed_torch(derive_seed(self.recipe.seed, "dropout", number, micro, self.ranks.processes.rank))
            part = batch.micro(micro, micros).to(self.device)
            # Around the backward pass, too: gradient checkpointing computes attention again there.
            with self.ranks.accumulating(forward, last=micro == micros - 1), sdpa_kernel(attention):
                loss, correct = self._forward(forward, part)
                state.scaler.scale(loss / micros).backward()
            losses.append(loss.detach())
            corrects.append(correct)
        if state.scaler.is_enabled():
            state.scaler.unscale_(state.optimizer)
        trained = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
        norm = clip_gradients(trained, self.recipe.optimizer.clip)
        wide = torch.promote_types(norm.dtype, torch.float32)
        numbers = torch.stack([number.to(wide) for number in (*losses, *corrects, norm)])
        self.ranks.add_up(numbers[:-1])  # the norm is that of all processes already
        return numbers

    @property
    def runs_ahead(self) -> bool:
        """Whether this process may go on while the device is still busy."""
        return self.device.type == "cuda"

    @property
    def mixed(self) -> bool:
        """Whether images are mixed with their neighbours."""
        return self.recipe.mixing is not None and self.recipe.mixing.on  # no longer None once a run is planned

    def pixels(self, part: Batch) -> Tensor:
        """Return images as the model gets them: normalised, and mixed."""
        pixels = self.preprocess.normalise(part.pixels)
        return mix_pixels(pixels, part.lam, part.box) if self.mixed else pixels

    def _forward(self, forward: nn.Module, part: Batch) -> tuple[Tensor, Tensor]:
        objective = self.recipe.objective
        pixels = self.pixels(part)
        with autocast(self.device, self.precision):
            logits: Tensor = forward(pixels)
        targets = objectives.targets(part.labels, logits.shape[-1], objective, part.lam if self.mixed else None)
        loss = objectives.loss(logits, targets, objective, self.weights)
        return loss, (logits.argmax(dim=-1) == targets.argmax(dim=-1)).sum()


def _on_its_way(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Begin to copy numbers from a GPU, and say when they are here."""
    copy = numbers.to("cpu", non_blocking=True)  # into pinned memory
    return copy, _now(numbers.device)


def _now(device: torch.device) -> torch.cuda.Event:
    """Return the event that a GPU has done all it was asked to do so far."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@torch.no_grad()
def first_not_finite(model: nn.Module, stepper: Stepper, batch: Batch) -> str:
    """Return the first part of a model whose output is not finite for these images, computed as in a step."""
    found: list[str] = []

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def look(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all() and not found:
                found.append(name)

        return module.register_forward_hook(look)

    handles = [watch(name, module) for name, module in model.named_modules() if name]
    try:
        for micro in range(stepper.recipe.gradient_accumulation):
            pixels = stepper.pixels(batch.micro(micro, stepper.recipe.gradient_accumulation).to(stepper.device))
            with autocast(stepper.device, stepper.precision):
                model(pixels)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "none: what the model computes was finite, so it was this step's gradient"
