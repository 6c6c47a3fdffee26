"""Torch's optimisers, and which parameter gets which weight decay and which share of the learning rate."""

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

FUSED_DEVICES = ("cpu", "cuda", "mps")
"""Where torch has an optimiser that is one kernel."""
STEM = ("patch_embed.", "cls_token", "dist_token", "reg_token", "mask_token", "pos_embed", "norm_pre.")
"""How the names of parameters before the first block begin."""
UNUSED = {
    "adamw": ("momentum", "nesterov"),
    "adam": ("momentum", "nesterov"),
    "sgd": ("betas", "eps"),
    "muon": ("nesterov",),  # it always looks ahead
}
"""Which settings mean nothing to an optimiser."""


class Optimizer(Frozen):
    """How gradients become new weights.

    `adamw` takes lr × weight_decay × weight off the weights at each step, and is what the paper means by Adam with a
    weight decay of 0.1; `adam` and `sgd` add weight_decay × weight to the gradient, as torch does. `muon` changes the
    matrices inside blocks by orthogonal ones, and everything else as `adamw` does, with the same lr and weight_decay.
    """

    kind: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """The paper's Adam with weight decay is `adamw`."""
    lr: Annotated[float, Field(gt=0, le=1e3)] | None = None
    """The peak of the schedule. None: left to be chosen, which must have been done when training begins."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """On kernels only: no bias, norm, token, position or LayerScale factor decays."""
    betas: Annotated[tuple[Rate, Rate], AsTuple] = (0.9, 0.999)
    """How slowly Adam, AdamW and Muon's AdamW forget the mean of the gradients and of their squares."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Adam, AdamW and Muon's AdamW: added to the root of the mean square."""
    momentum: Rate = 0.9
    """SGD and Muon: how slowly they forget past gradients; 0.95 is usual for Muon."""
    nesterov: bool = False
    """SGD: look ahead along the momentum."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Each layer learns this many times as fast as the one above it (BEiT, MAE). None: all learn alike."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Longest gradient, as the norm over all parameters; longer ones are scaled down to it. None: no limit."""

    @model_validator(mode="after")
    def _only_what_it_uses(self) -> Self:
        for name in UNUSED[self.kind]:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                raise ConfigError(
                    f"{name} {value} means nothing with kind {self.kind!r}; leave it out (it is {default} by default)"
                )
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov looks ahead along the momentum, but momentum is 0.0; give it a momentum")
        return self


def parameter_groups(model: nn.Module, config: Optimizer) -> list[dict[str, Any]]:
    """Sort the parameters that are trained into groups for torch's optimisers, from the stem to the head.

    Each group has, beside what torch reads (`params`, `param_names`, `weight_decay`), a `name` and the `lr_scale` that
    `set_learning_rate` multiplies the learning rate by, and what `Muon` reads. Order follows the model, so it is the
    same in every run.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError(
            f"all {sum(1 for _ in model.parameters())} parameters are frozen, so nothing is left to train"
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
    """Say whether a parameter multiplies features with each other: those alone have a reason to decay."""
    leaf = name.rpartition(".")[2]
    added = leaf.endswith("_token") or leaf.startswith("pos_embed") or leaf in ("rel_pos", "latent", "gamma")
    return parameter.ndim >= 2 and not added


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Say whether a parameter is what Muon is for: a matrix inside a block, from features to features."""
    return _block_of(name) >= 0 and parameter.ndim == 2 and is_kernel(name, parameter)


def make_optimizer(model: nn.Module, config: Optimizer, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """Return torch's optimiser for the parameters of `model` that are not frozen.

    With `fused` None, its one-kernel form is taken wherever torch has one for the device and the dtype.
    """
    if config.lr is None:
        raise ConfigError("the optimiser has no learning rate; set lr")
    groups = parameter_groups(model, config)
    parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
    possible = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
    if fused and not possible:
        devices = ", ".join(sorted({p.device.type for p in parameters}))
        raise ConfigError(
            f"a fused optimiser runs on {', '.join(FUSED_DEVICES)}, but parameters are on {devices}; leave fused out"
        )
    fused = possible if fused is None else fused
    optimizer = _torch_optimizer(groups, config, config.lr, fused)
    set_learning_rate(optimizer, config.lr)
    return optimizer


def _torch_optimizer(groups: list[dict[str, Any]], config: Optimizer, lr: float, fused: bool) -> torch.optim.Optimizer:
    # weight_decay is in every group; AdamW's own default must never count.
    match config.kind:
        case "adamw":
            return torch.optim.AdamW(groups, lr, betas=config.betas, eps=config.eps, fused=fused)
        case "adam":
            return torch.optim.Adam(groups, lr, betas=config.betas, eps=config.eps, fused=fused)
        case "sgd":
            return torch.optim.SGD(groups, lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
        case "muon":
            return Muon(groups, lr, betas=config.betas, eps=config.eps, momentum=config.momentum, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group, each by its own share."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def clip_gradients(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """Scale the gradients down until their norm, over all of them together, is at most `limit`.

    Returns the norm before that, which is NaN or infinite where a gradient is; nobody has waited for it yet. Without a
    limit it only measures.
    """
    found = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in found if parameter.grad is not None])
    if limit is not None:
        nn.utils.clip_grads_with_norm_(found, limit, norm)
    return norm


def can_leave_out(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether `step_unless` knows how: torch's one-kernel forms and Muon look at the device's own word for it."""
    return all(group.get("fused") or group["matrices"] for group in optimizer.param_groups)


def step_unless(bad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, but leave every number as it is where `bad` is 1, without asking the device which it is."""
    # What torch's own GradScaler tells an optimiser of this kind.
    optimizer.found_inf = bad.to(torch.float32)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop training the parameters whose names match, and return their names.

    Patterns are the shell's: `blocks.*`, `*.bias`. One that begins with "!" takes back what those before it froze, so
    `("*", "!head.*")` leaves only the head to train. A BatchNorm that is frozen keeps its statistics, too.
    """
    names = [name for name, _ in model.named_parameters()]
    if patterns and patterns[0].startswith("!"):
        raise ConfigError(f"the pattern {patterns[0]!r} takes back what those before it froze; put '*' before it")
    frozen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern.removeprefix("!"))}
        if not matched:
            raise ConfigError(
                f"no parameter is called {pattern.removeprefix('!')!r}"
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


def _patterns_for(names: list[str]) -> list[str]:
    """Return patterns that match something: every name, and every module with a star behind it."""
    parts = [name.split(".") for name in names]
    modules = {".".join([*part[:length], "*"]): None for part in parts for length in range(1, len(part))}
    return [*modules, *names]


def _block_of(name: str) -> int:
    """Return the number of the block a parameter lies in, or -1."""
    found = re.match(r"blocks\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _level_of(name: str, depth: int) -> int:
    """Return the layer of a parameter: 0 the stem, 1 to depth the blocks, depth + 1 whatever follows them."""
    if name.startswith(STEM):
        return 0
    block = _block_of(name)
    return depth + 1 if block < 0 else block + 1


def _group_name(level: int, depth: int, decays: bool, matrix: bool, *, layered: bool) -> str:
    """Name a group: "decay", or with layer-wise decay "blocks.3.no_decay"."""
    kind = "matrices" if matrix else "decay" if decays else "no_decay"
    place = "stem" if level == 0 else "head" if level > depth else f"blocks.{level - 1}"
    return f"{place}.{kind}" if layered else kind
