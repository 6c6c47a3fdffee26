"""One training step: the forward pass (eager, DDP, compiled or fused), backward, clip, update."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from vitrail.acceleration.cuda.attention import REPEATABLE, TRUSTED
from vitrail.acceleration.cuda.training.in_place import fuse_in_place
from vitrail.acceleration.cuda.training.model import FusedTraining
from vitrail.acceleration.cuda.training.pieces import FusedPieces
from vitrail.acceleration.planner import ExecutionPlan, hardware_of, plan_training
from vitrail.data.augmentation.mixing import mix_pixels
from vitrail.data.batches import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.data.views import AnyBatch, ViewBatch
from vitrail.errors import ConfigError, Diverged
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, autocast, derive_seed, seed_torch
from vitrail.text import first_line
from vitrail.training.distributed import Ranks
from vitrail.training.learner import Learner
from vitrail.training.optimizers import can_skip_step, clip_gradients, set_learning_rate, step_unless
from vitrail.training.recipe import Recipe
from vitrail.training.sharding import is_sharded
from vitrail.training.state import State

COMPILER = ("torch._dynamo", "torch._inductor")
"""Where the errors of torch's compiler are defined."""

# ── forward pass ──


def plan_step(
    config: ViTConfig,
    recipe: Recipe,
    precision: Precision,
    device: torch.device,
    *,
    alone: bool,
    sharded: bool = False,
) -> ExecutionPlan:
    """Return the execution path of a run's steps; `alone`: one rank, which needs no DDP."""
    return plan_training(
        config,
        hardware_of(device),
        precision,
        compiled=recipe.compile is True,
        deterministic=recipe.deterministic,
        gradient_checkpointing=recipe.gradient_checkpointing,
        gradient_accumulation=recipe.gradient_accumulation,
        adapters=recipe.lora.rank > 0,
        alone=alone,
        sharded=sharded,
        wrapped=recipe.method is not None or (recipe.teacher is not None and config.distillation_token),
    )


def forward_of(model: nn.Module, execution: ExecutionPlan, ranks: Ranks) -> nn.Module:
    """Return the module that maps images to logits in a step; its parameters are the model's own."""
    if is_sharded(model):  # its blocks are compiled one by one
        return model
    if execution.path == "eager":
        return ranks.wrap(model)
    if execution.path == "fused_training" and isinstance(model, ViT):
        if execution.pieces:
            return ranks.replicate(FusedPieces(model), views=True)
        mode = "reduce-overhead" if execution.graphs else None
        return torch.compile(FusedTraining(model), mode=mode)  # type: ignore[return-value]
    if execution.path == "fused_training":
        fuse_in_place(model)
    return torch.compile(ranks.wrap(model))  # type: ignore[return-value]


@contextmanager
def compiler_errors() -> Iterator[None]:
    """Report a failure of torch's compiler, and how to do without it."""
    try:
        yield
    except Exception as error:  # the compiler's errors have no common base class
        if not any(kind.__module__.startswith(COMPILER) for kind in type(error).__mro__):
            raise
        text = first_line(error)
        remedy = "add --set compile=false"
        if "file too short" in text or "invalid ELF header" in text:  # left by a process killed while it wrote
            from torch._inductor.runtime.cache_dir_utils import cache_dir

            remedy = f"delete torch's cache of compiled code, {cache_dir()}, and rerun the same command, or {remedy}"
        raise ConfigError(f"torch cannot compile the model on this machine ({text}); {remedy}") from None


def reset_compiled(device: torch.device) -> None:
    """Free everything that compiled models in this process hold; they are recompiled on their next use.

    Otherwise CUDA graphs would keep their memory, and torch's recompile limit would stop it from compiling the ninth
    model of a sweep.
    """
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ── step ──


class StepResult(NamedTuple):
    """Metrics of a step."""

    loss: float
    total: float
    """The task's training metric, summed over the images: correct predictions."""
    gradient_norm: float


class PendingStep(NamedTuple):
    """A launched step that the device may still be computing; `read` waits for its metrics."""

    number: int
    numbers: Tensor
    """Losses and sums of the training metric of the micro-batches, summed over all ranks, and the gradient norm. From a
    GPU this is an asynchronous copy."""
    ready: torch.cuda.Event | None
    """Signals that the copy is complete; None if there is nothing to wait for. A plain `.item()` would also wait for
    the next step, which is already queued."""
    processes: int
    may_skip: bool
    """Whether non-finite gradients only skip the step, as in fp16 with loss scaling, instead of raising `Diverged`."""
    done: torch.cuda.Event | None = None
    """Signals the end of the step on the device, including the update; None if the step was synchronous."""

    def is_busy(self) -> bool:
        """Whether the device is still computing this step."""
        return self.done is not None and not self.done.query()

    def read(self) -> StepResult:
        """Wait for this step and return its metrics, without communicating with other ranks."""
        if self.ready is not None:
            self.ready.synchronize()
        *sums, norm = self.numbers.tolist()
        micro_batches = len(sums) // 2
        loss = sum(sums[:micro_batches]) / micro_batches / self.processes
        if not (math.isfinite(loss) and (math.isfinite(norm) or self.may_skip)):
            raise Diverged(f"step {self.number}: the loss is {loss}, the gradient norm {norm}")
        return StepResult(loss, sum(sums[micro_batches:]), norm)


class Stepper(NamedTuple):
    """Runs training steps."""

    recipe: Recipe
    preprocess: Preprocess
    device: torch.device
    precision: Precision
    learner: Learner
    ranks: Ranks

    def step(self, state: State, forward: nn.Module, batch: AnyBatch, lr: float) -> StepResult:
        """Train on one batch and wait for it. `forward` is the model, possibly wrapped or compiled."""
        return self.launch(state, forward, batch, lr).read()

    def launch(self, state: State, forward: nn.Module, batch: AnyBatch, lr: float) -> PendingStep:
        """Train on one batch without waiting for the device; a step that diverged changes no weights.

        On a GPU nothing here synchronises, so that the next step can be queued before this one is done. Otherwise a
        step that diverged raises `Diverged` here.
        """
        number = state.progress.step
        self.learner.before_step(number)
        numbers = self._gradients(state, forward, batch)
        self.learner.before_update(state.model, number)
        set_learning_rate(state.optimizer, lr)
        if self.runs_ahead and can_skip_step(state.optimizer) and not state.scaler.is_enabled():
            # Copied before the update, so that it arrives early.
            pending = PendingStep(number, *_async_copy(numbers), self.ranks.processes.size, may_skip=False)
            step_unless(~numbers.isfinite().all(), state.optimizer)
        else:
            # In fp16, gradient overflow is expected: GradScaler skips the step and reduces the scale.
            may_skip = state.scaler.is_enabled() and state.scaler.get_scale() > 1
            pending = PendingStep(number, numbers.cpu(), None, self.ranks.processes.size, may_skip)
            pending.read()
            state.scaler.step(state.optimizer)
            state.scaler.update()
        self.learner.after_update(state.model, number, self.ranks)
        self.ranks.average_buffers(state.model)
        state.progress.step += 1
        if state.average is not None:
            state.average.update(state.model, state.progress.step)
        return pending if pending.ready is None else pending._replace(done=_record_event(self.device))

    def _gradients(self, state: State, forward: nn.Module, batch: AnyBatch) -> Tensor:
        """Accumulate the gradients of a batch and clip them; return `PendingStep.numbers`."""
        number, micro_batches = state.progress.step, self.recipe.gradient_accumulation
        state.optimizer.zero_grad(set_to_none=True)
        attention = REPEATABLE if self.recipe.deterministic else TRUSTED
        losses: list[Tensor] = []
        totals: list[Tensor] = []
        for index in range(micro_batches):
            # Dropout is seeded by the position in the run, so no random state has to be saved.
            seed_torch(derive_seed(self.recipe.seed, "dropout", number, index, self.ranks.processes.rank))
            micro_batch = batch.micro(index, micro_batches).to(self.device)
            first = self.first_position(batch, number, index)
            # Includes the backward pass, because gradient checkpointing recomputes attention there.
            with self.ranks.accumulating(forward, last=index == micro_batches - 1), sdpa_kernel(attention):
                loss, total = self._forward(forward, micro_batch, first)
                state.scaler.scale(loss / micro_batches).backward()
            losses.append(loss.detach())
            totals.append(total)
        if state.scaler.is_enabled():
            state.scaler.unscale_(state.optimizer)
        trained = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
        norm = clip_gradients(trained, self.recipe.optimizer.max_grad_norm)
        wide = torch.promote_types(norm.dtype, torch.float32)
        numbers = torch.stack([number.to(wide) for number in (*losses, *totals, norm)])
        self.ranks.all_reduce_sum(numbers[:-1])  # the norm is already global
        return numbers

    @property
    def runs_ahead(self) -> bool:
        """Whether the host may queue the next step while the device is busy."""
        return self.device.type == "cuda"

    @property
    def mixed(self) -> bool:
        """Whether mixup or CutMix is on."""
        return self.recipe.mixing is not None and self.recipe.mixing.on  # never None in a resolved recipe

    def pixels(self, batch: Batch) -> Tensor:
        """Return the model's input: normalised, and mixed."""
        pixels = self.preprocess.normalise(batch.pixels)
        return mix_pixels(pixels, batch.lam, batch.box) if self.mixed else pixels

    def inputs(self, batch: AnyBatch, first: int) -> tuple[Tensor, ...]:
        """Return the arguments of the module for a micro-batch."""
        if isinstance(batch, ViewBatch):
            views = (self.preprocess.normalise(batch.globals), self.preprocess.normalise(batch.locals))
            return self.learner.view_inputs(views, first)
        return self.learner.inputs(self.pixels(batch), first)

    def first_position(self, batch: AnyBatch, step: int, micro_batch: int) -> int:
        """Return the stream position of the first image of a micro-batch of this rank's `batch`."""
        own, processes = len(batch.indices), self.ranks.processes
        start = (step * processes.size + processes.rank) * own
        return start + micro_batch * (own // self.recipe.gradient_accumulation)

    def _forward(self, forward: nn.Module, batch: AnyBatch, first: int) -> tuple[Tensor, Tensor]:
        inputs = self.inputs(batch, first)
        with autocast(self.device, self.precision):
            outputs = forward(*inputs)
        return self.learner.loss(outputs, batch)


def _async_copy(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Start copying numbers from a GPU; return the copy and an event that signals its completion."""
    copy = numbers.to("cpu", non_blocking=True)  # into pinned memory
    return copy, _record_event(numbers.device)


def _record_event(device: torch.device) -> torch.cuda.Event:
    """Record an event after everything queued on the GPU so far."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
