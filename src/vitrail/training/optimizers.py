"""Optimizers, parameter groups, weight decay, layer-wise learning rate decay, and learning rate schedules.

Learning rate and weight decay are pure functions of the step: nothing to save, nothing to advance.

lr
peak │    ╭───╮
     │   ╱     ╲
     │  ╱       ╲        warm-up: peak × (step + 1) / warm-up steps, so the first step is not wasted
 end │ ╱         ╲___    then from the peak to the end value, which step = total would reach
     └─────────────────
       warm-up    total
"""

import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vitrail.errors import ConfigError, suggest
from vitrail.schema import Frozen, Rate
from vitrail.schema import Sequence as AsTuple
from vitrail.training.muon import Muon
from vitrail.training.slices import gathered, is_slice

FUSED_DEVICES = ("cpu", "cuda", "mps")
"""Devices with a fused torch optimizer."""
INSIDE = r"(?:model|encoder)\."
"""Prefix of a model's parameters inside the module of a learner."""
STEM = ("patch_embed.", "cls_token", "dist_token", "reg_token", "mask_token", "pos_embed", "norm_pre.")
"""Name prefixes of parameters before the first block."""
UNUSED = {
    "adamw": ("momentum", "nesterov"),
    "adam": ("momentum", "nesterov"),
    "sgd": ("betas", "eps"),
    "muon": ("nesterov",),  # it always uses Nesterov momentum
}
"""Settings that an optimizer does not use."""


Decay = Annotated[float, Field(ge=0, le=1e3)]


class Optimizer(Frozen):
    """The optimizer and its settings.

    `adamw` subtracts lr × weight_decay × weight at each step, and is what the paper means by Adam with a weight decay
    of 0.1; `adam` and `sgd` add weight_decay × weight to the gradient, as torch does. `muon` applies orthogonalised
    updates to the matrices inside blocks and AdamW to everything else, with the same lr and weight_decay.
    """

    kind: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """The paper's Adam with weight decay is `adamw`."""
    lr: Annotated[float, Field(gt=0, le=1e3)] | None = None
    """The peak learning rate. None: chosen when the run starts."""
    weight_decay: Decay = 0.0
    """Applied to kernels only, not to biases, norms, tokens, positions or LayerScale."""
    betas: Annotated[tuple[Rate, Rate], AsTuple] = (0.9, 0.999)
    """Adam, AdamW and Muon's AdamW: decay of the running averages of the gradient and its square."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Adam, AdamW and Muon's AdamW: added to the denominator for numerical stability."""
    momentum: Rate = 0.9
    """SGD and Muon: momentum factor; 0.95 is usual for Muon."""
    nesterov: bool = False
    """SGD: use Nesterov momentum."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Layer-wise learning rate decay (BEiT, MAE): factor per layer, from the head down. None: off."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip gradients to this global norm. None: no clipping."""

    @model_validator(mode="after")
    def _only_what_it_uses(self) -> Self:
        for name in UNUSED[self.kind]:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                raise ConfigError(
                    f"{name} {value} has no effect with kind {self.kind!r}; leave it out (default {default})"
                )
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs a momentum, but momentum is 0.0; set momentum")
        return self


def parameter_groups(model: nn.Module, config: Optimizer) -> list[dict[str, Any]]:
    """Group the trainable parameters for torch's optimizers, from the stem to the head.

    Besides what torch reads (`params`, `param_names`, `weight_decay`), each group has a `name`, the `lr_scale` that
    `set_learning_rate` multiplies the learning rate by, whether it `decays`, and what `Muon` reads. The order follows
    the model, so it is the same in every run.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError(
            f"all {sum(1 for _ in model.parameters())} parameters are frozen, so there is nothing to train"
        )
    depth = 1 + max((_block_of(name) for name, _ in model.named_parameters()), default=-1)
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for name, parameter in trained:
        level = depth + 1 if config.layer_decay is None else _level_of(name, depth)
        scale = 1.0 if config.layer_decay is None else config.layer_decay ** (depth + 1 - level)
        decays, matrix = is_kernel(name, parameter), config.kind == "muon" and is_matrix(name, parameter)
        group = groups.setdefault(
            (level, not matrix, not decays),
            {
                "name": _group_name(level, depth, decays, matrix, layered=config.layer_decay is not None),
                "lr_scale": scale,
                "decays": decays,
                "weight_decay": config.weight_decay if decays else 0.0,
                "matrices": matrix,
                "params": [],
                "param_names": [],
                "stacked": [],
            },
        )
        group["params"].append(parameter)
        group["param_names"].append(name)
        group["stacked"].append(3 if name.endswith(".qkv.weight") else 1)
    return [group for _, group in sorted(groups.items(), key=lambda item: item[0])]


def is_kernel(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a kernel (multiplies features); only kernels get weight decay."""
    leaf = name.rpartition(".")[2]
    added = leaf.endswith("_token") or leaf.startswith("pos_embed") or leaf in ("rel_pos", "latent", "gamma")
    return parameter.ndim >= 2 and not added


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates a parameter: a 2-D kernel inside a block."""
    return _block_of(name) >= 0 and parameter.ndim == 2 and is_kernel(name, parameter)


def make_optimizer(model: nn.Module, config: Optimizer, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """Return the optimizer for the trainable parameters of `model`.

    With `fused=None`, the fused implementation is used wherever torch has one for the device and the dtype.
    """
    if config.lr is None:
        raise ConfigError("the optimizer has no learning rate; set lr")
    groups = parameter_groups(model, config)
    parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
    possible = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
    if config.kind == "sgd" and any(is_slice(p) for p in parameters):
        possible = False  # torch has no fused SGD for slices
    if fused and not possible:
        devices = ", ".join(sorted({p.device.type for p in parameters}))
        raise ConfigError(
            f"a fused optimizer runs on {', '.join(FUSED_DEVICES)}, but parameters are on {devices}; leave fused out"
        )
    fused = possible if fused is None else fused
    optimizer = _torch_optimizer(groups, config, config.lr, fused)
    set_learning_rate(optimizer, config.lr)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group, scaled by its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def set_weight_decay(optimizer: torch.optim.Optimizer, weight_decay: float) -> None:
    """Set the weight decay of every group of kernels."""
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Clip the gradients to a global norm of `max_norm`; None only computes the norm.

    Returns the norm before clipping, without a synchronisation; it is NaN or infinite if any gradient is.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in with_grad if parameter.grad is not None])
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return gathered(norm)


def can_skip_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_unless` works: fused torch optimizers and Muon read `found_inf` on the device."""
    return all(group.get("fused") or group["matrices"] for group in optimizer.param_groups)


def step_unless(bad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take a step unless `bad` is 1, without a device synchronisation."""
    # The interface torch's GradScaler uses for fused optimizers.
    optimizer.found_inf = bad.to(torch.float32)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze the parameters whose names match, and return their names.

    Patterns are shell-style: `blocks.*`, `*.bias`. A leading "!" unfreezes what earlier patterns froze, so
    `("*", "!head.*")` trains only the head. A frozen BatchNorm also keeps its statistics.
    """
    names = [name for name, _ in model.named_parameters()]
    if patterns and patterns[0].startswith("!"):
        raise ConfigError(f"the pattern {patterns[0]!r} unfreezes what earlier patterns froze; put '*' before it")
    frozen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern.removeprefix("!"))}
        if not matched:
            raise ConfigError(
                f"no parameter matches {pattern.removeprefix('!')!r}"
                + (suggest(pattern.removeprefix("!"), _patterns_for(names)) or f"; there is {', '.join(names[:3])}, …")
            )
        frozen = frozen - matched if pattern.startswith("!") else frozen | matched
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not any(p.requires_grad for p in module.parameters()):
            module.eval()
    return [name for name in names if name in frozen]


def _torch_optimizer(groups: list[dict[str, Any]], config: Optimizer, lr: float, fused: bool) -> torch.optim.Optimizer:
    # Every group sets weight_decay, so AdamW's own default is never used.
    match config.kind:
        case "adamw":
            return torch.optim.AdamW(groups, lr, betas=config.betas, eps=config.eps, fused=fused)
        case "adam":
            return torch.optim.Adam(groups, lr, betas=config.betas, eps=config.eps, fused=fused)
        case "sgd":
            return torch.optim.SGD(groups, lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
        case "muon":
            return Muon(groups, lr, betas=config.betas, eps=config.eps, momentum=config.momentum, fused=fused)


def _patterns_for(names: list[str]) -> list[str]:
    """Return patterns that match something: every name, and every module followed by `.*`."""
    paths = [name.split(".") for name in names]
    modules = {".".join([*path[:length], "*"]): None for path in paths for length in range(1, len(path))}
    return [*modules, *names]


def _block_of(name: str) -> int:
    """Return the index of a parameter's block in a ViT, or in the model inside a learner's module; else -1."""
    match = re.match(rf"(?:{INSIDE})?blocks\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _level_of(name: str, depth: int) -> int:
    """Return the layer of a parameter: 0 for the stem, 1 to depth for the blocks, depth + 1 for the rest."""
    if re.sub(f"^{INSIDE}", "", name).startswith(STEM):
        return 0
    block = _block_of(name)
    return depth + 1 if block < 0 else block + 1


def _group_name(level: int, depth: int, decays: bool, matrix: bool, *, layered: bool) -> str:
    """Return a group's name: "decay", or with layer-wise decay "blocks.3.no_decay"."""
    kind = "matrices" if matrix else "decay" if decays else "no_decay"
    place = "stem" if level == 0 else "head" if level > depth else f"blocks.{level - 1}"
    return f"{place}.{kind}" if layered else kind


# ── schedules ──

Steps = Annotated[int, Field(ge=0, le=10**9)]
"""A number of optimizer steps."""


class Schedule(Frozen):
    """The schedule of the learning rate, and of the weight decay."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """The decay after the warm-up; `constant` stays at the peak."""
    warmup_steps: Steps | None = None
    """Warm-up steps. None: from `warmup_fraction`, or no warm-up."""
    warmup_fraction: Rate | None = None
    """Warm-up as a fraction of the run, instead of a number of steps."""
    end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate as a fraction of the peak."""
    end_lr: Annotated[float, Field(ge=0)] | None = None
    """Final learning rate as a value, instead of `end`. Google's linear schedule ends at 1e-5."""
    end_weight_decay: Decay | None = None
    """Final weight decay, reached from `optimizer.weight_decay` by a cosine over the run (DINO). None: constant."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise ConfigError(
                f"warmup_steps is {self.warmup_steps} and warmup_fraction is {self.warmup_fraction}; leave one of them "
                f"out"
            )
        if self.end and self.end_lr is not None:
            raise ConfigError(f"end is {self.end} of the peak and end_lr is {self.end_lr}; leave one of them out")
        if self.kind == "constant" and (self.end or self.end_lr is not None):
            name, value = ("end", self.end) if self.end else ("end_lr", self.end_lr)
            raise ConfigError(f"{name} {value} has no effect with kind 'constant'; leave it out, or use kind 'linear'")
        return self


def warmup_of(schedule: Schedule, total: int) -> int:
    """Return the number of warm-up steps in a run of `total` steps."""
    if total < 1:
        raise ConfigError(f"a run needs at least 1 step, not {total}")
    if schedule.warmup_fraction is not None:
        # Even the shortest run has one step at the peak.
        return min(round(schedule.warmup_fraction * total), total - 1)
    steps = schedule.warmup_steps or 0
    if steps >= total:
        raise ConfigError(
            f"a warm-up of {steps:,} steps does not fit into a run of {total:,} steps; reduce warmup_steps, set "
            f"warmup_fraction instead, or train longer"
        )
    return steps


def learning_rate(schedule: Schedule, step: int, total: int, peak: float) -> float:
    """Return the learning rate of step `step` (from 0) in a run of `total` steps that peaks at `peak`.

    >>> learning_rate(Schedule(kind="linear", warmup_steps=2), step=5, total=8, peak=1.0)
    0.5
    """
    warmup = warmup_of(schedule, total)
    end = _end_of(schedule, peak)
    if step < warmup:
        return peak * (step + 1) / warmup
    left = 1 - min((step - warmup) / (total - warmup), 1.0)
    match schedule.kind:
        case "cosine":
            return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * (1 - left)))
        case "linear":
            return end + (peak - end) * left
        case "constant":
            return peak


def weight_decay_at(schedule: Schedule, step: int, total: int, first: float) -> float:
    """Return the weight decay of step `step` (from 0) in a run of `total` steps that starts with `first`."""
    if schedule.end_weight_decay is None:
        return first
    change = 0.5 * (1 - math.cos(math.pi * min(step / total, 1.0)))
    return first + (schedule.end_weight_decay - first) * change


def _end_of(schedule: Schedule, peak: float) -> float:
    """Return the final learning rate."""
    if schedule.end_lr is None:
        return schedule.end * peak
    if schedule.end_lr > peak:
        raise ConfigError(f"end_lr {schedule.end_lr} is above the peak {peak}; lower it, or raise the learning rate")
    return schedule.end_lr
