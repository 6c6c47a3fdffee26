"""LoRA (arXiv 2106.09685): freeze the weights, and train low-rank updates of them.

    y = W x + b + scale · B A x        W: out × in, frozen     A: rank × in     B: out × rank, starts at zero

B A is a matrix like W, so an adapted model merges into a plain one: W' = W + scale · B A. Queries, keys and values
share one weight in this model, but each has its own A and B, as if they were three matrices.
"""

import copy
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.blocks import Block
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.schema import Count, Frozen, Names

Layer = Literal["qkv", "proj", "fc1", "fc2"]


class LoRA(Frozen):
    """Low-rank adapters of the blocks' matrices. Everything but the adapters and the head is frozen."""

    rank: Count = 0
    """Rank of each adapter; 0: no adapters, all weights are trained."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """The adapters' output is scaled by alpha / rank. None: 2 × rank, so that the scale is 2 for every rank."""
    on: Annotated[tuple[Layer, ...], Names] = ("qkv",)
    """Which matrices of each block get adapters: `qkv` and `proj` of attention, `fc1` and `fc2` of the MLP."""

    @property
    def scale(self) -> float:
        """The factor of the adapters' output: alpha / rank."""
        return 2.0 if self.alpha is None else self.alpha / self.rank

    def record(self) -> dict[str, Any]:
        """Return the settings for a bundle's provenance, with alpha resolved."""
        return {"rank": self.rank, "alpha": self.scale * self.rank, "on": list(self.on)}


# ── which matrices ──


class _Adapted(NamedTuple):
    """A matrix that gets adapters."""

    owner: Literal["attn", "mlp"]
    stacked: int
    """Number of matrices that are stacked in one weight, each with its own adapter."""
    out: int
    """Rows of each of them."""
    inner: int
    """Columns."""


def _shapes(config: ViTConfig) -> dict[str, _Adapted]:
    heads, gates = config.heads * config.head_width, 2 if config.activation == "swiglu" else 1
    return {
        "qkv": _Adapted("attn", 3, heads, config.width),
        "proj": _Adapted("attn", 1, config.width, heads),
        "fc1": _Adapted("mlp", 1, config.mlp_hidden * gates, config.width),
        "fc2": _Adapted("mlp", 1, config.width, config.mlp_hidden),
    }


def check_lora(settings: LoRA, config: ViTConfig) -> None:
    """Raise if a model cannot have these adapters; without adapters, everything passes."""
    if not settings.rank:
        return
    if not settings.on:
        raise ConfigError("lora.on is empty, so nothing would be adapted; name at least one of qkv, proj, fc1, fc2")
    if not config.depth:
        raise ConfigError("LoRA adapts the matrices of encoder blocks, but this model has none; set lora.rank=0")
    if "proj" in settings.on and not config.out_proj:
        raise ConfigError("lora.on names proj, but the attention of this model has no output projection; leave it out")
    for name, shape in _shapes(config).items():
        largest = min(shape.out, shape.inner)
        if name in settings.on and settings.rank > largest:
            raise ConfigError(
                f"lora.rank is {settings.rank}, but the matrices of {name} are {shape.out}×{shape.inner}; use a rank "
                f"of at most {largest}"
            )


# ── adapters ──


class LoRALinear(nn.Linear):
    """A linear layer with adapters; `weight` and `bias` keep their names, so the plain weights still load."""

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float, stacked: int, generator: torch.Generator) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = scale
        # Drawn on the CPU, so that a seed means the same numbers on every device.
        bound = 1 / math.sqrt(self.in_features)  # Kaiming's uniform initialisation with a = √5, as in every LoRA code
        drawn = torch.empty(stacked, rank, self.in_features, device="cpu").uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(drawn.to(self.weight))
        self.lora_B = nn.Parameter(self.weight.new_zeros(stacked, self.out_features // stacked, rank))
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in) to (…, out). B A is never formed, so no gradient is as large as the weight."""
        low = F.linear(x, self.lora_A.flatten(0, 1)).chunk(len(self.lora_A), dim=-1)
        update = [F.linear(part, matrix) for part, matrix in zip(low, self.lora_B.unbind(), strict=True)]
        return super().forward(x) + self.scale * torch.cat(update, dim=-1)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return a plain linear layer that computes the same."""
        plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        update = (self.lora_B @ self.lora_A).flatten(0, 1)
        plain.weight = nn.Parameter(self.weight + self.scale * update)
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias.clone())
        return plain.train(self.training)


def add_adapters(model: ViT, settings: LoRA, seed: int) -> None:
    """Add adapters to a model, in place; its outputs stay exactly the same until they are trained.

    `seed` draws every A. The adapters are new parameters: freeze the others, and create the optimizer, afterwards.
    With rank 0 nothing happens.
    """
    check_lora(settings, model.config)
    if has_adapters(model):
        raise ConfigError("the model already has LoRA adapters; merge them first, with vitrail.models.lora.merged")
    if not settings.rank:
        return
    generator = torch.Generator().manual_seed(seed)
    chosen = [(name, shape) for name, shape in _shapes(model.config).items() if name in settings.on]
    for block in model.blocks:
        for name, shape in chosen:
            owner = cast("Block", block).attn if shape.owner == "attn" else cast("Block", block).mlp
            linear = cast("nn.Linear", getattr(owner, name))
            adapted = LoRALinear(
                linear, rank=settings.rank, scale=settings.scale, stacked=shape.stacked, generator=generator
            )
            setattr(owner, name, adapted)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has LoRA adapters."""
    return any(True for _ in _adapters(model))


def merged(model: ViT) -> ViT:
    """Return a copy of a model with its adapters merged into the weights: a plain ViT, with all weights trainable."""
    plain = copy.deepcopy(model)
    for name, adapted in list(_adapters(plain)):
        plain.set_submodule(name, adapted.merged())
    return plain.requires_grad_(True)


def _adapters(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear))
