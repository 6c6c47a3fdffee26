"""Sharded training (FSDP2): each rank holds a slice of the weights, the gradients and the optimizer state.

    blocks              one group each: gathered before its forward and its backward pass, freed after
    everything else     one group: gathered for the whole step

In bf16 the blocks are gathered in bf16 (on GPUs) and gradients are reduced in float32; the slices that the optimizer
updates stay in float32. The rest of the model (tokens, positions, the last norm, the head) is gathered in float32, so
the residual stream keeps its precision, as under autocast.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from vitrail.errors import ConfigError
from vitrail.models.blocks import Block
from vitrail.runtime import Precision
from vitrail.training.distributed import Ranks
from vitrail.training.recipe import Recipe


class ShardGroup(NamedTuple):
    """The ranks that save and load slices, on the CPU: their own group, so that a save can overlap with steps."""

    group: dist.ProcessGroup
    mesh: DeviceMesh


def check_shardable(recipe: Recipe, precision: Precision) -> None:
    """Raise if a recipe uses something that sharded training does not support."""
    if not dist.is_initialized():
        raise ConfigError(
            "distributed.shard is true, but there is one process without a process group; start the command with "
            "torchrun, or set distributed.shard=auto"
        )
    if fault := unsupported_by_sharding(recipe, precision):
        raise ConfigError(fault)


def unsupported_by_sharding(recipe: Recipe, precision: Precision) -> str:
    """Return why a run cannot be sharded, and what to change; empty if it can."""
    if recipe.dino is not None:
        return "dino has a second model, its teacher, and cannot be sharded; set distributed.shard=false"
    if precision == "fp16":
        return "sharded training has no loss scaling for fp16; set precision=bf16 or float32"
    return ""


def shard(module: nn.Module, ranks: Ranks, precision: Precision, *, compiled: bool) -> None:
    """Shard a module in place and move it to the device of the rank, block by block."""
    mesh = init_device_mesh(ranks.device.type, (ranks.processes.size,))
    # A CPU's layer norm needs weights of its input's dtype; on CUDA, autocast casts them.
    dtype = torch.bfloat16 if precision == "bf16" and ranks.device.type == "cuda" else None
    in_blocks = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    outside = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)
    for block in blocks_of(module):
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=in_blocks)
    fully_shard(module, mesh=mesh, mp_policy=outside)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a module's models, in order: the units of sharding."""
    return [child for child in module.modules() if isinstance(child, Block)]


def shard_group() -> ShardGroup:
    """Return the ranks' group for saving; all ranks have to call it."""
    group: Any = dist.new_group(backend="gloo")
    return ShardGroup(group, DeviceMesh.from_group(group, "cpu"))


def is_sharded(module: nn.Module) -> bool:
    """Whether a module was sharded."""
    return isinstance(module, FSDPModule)


class ShardedUnits(NamedTuple):
    """The units of a sharded module, in bytes; see the head of this file."""

    block: int
    """The largest block, in the precision in which it is gathered."""
    blocks: int
    """All blocks, in that precision."""
    outside: int
    """Everything else, in float32."""
    cast: int
    """Copies of the blocks' weights that autocast makes of float32 weights, and not of gathered ones."""
    trained: int
    """The gradients, in float32."""

    @classmethod
    def of(cls, module: nn.Module, precision: Precision) -> Self:
        """Measure the units of a module whose parameters are in float32."""
        sizes = [_bytes(block.parameters()) for block in blocks_of(module)]
        low = precision == "bf16"
        gathered = [size // 2 if low else size for size in sizes]
        matrices = [p for block in blocks_of(module) for p in block.parameters() if p.ndim >= 2]
        outside = _bytes(module.parameters()) - sum(sizes)
        trained = _bytes(p for p in module.parameters() if p.requires_grad)
        return cls(max(gathered, default=0), sum(gathered), outside, _bytes(matrices) // 2 if low else 0, trained)

    @property
    def gathered(self) -> int:
        """The memory of what is gathered at once: this block and the next, their gradients, everything outside."""
        return 2 * self.block + 2 * self.block + 2 * self.outside

    def sent(self, ranks: int, accumulation: int) -> int:
        """Return the bytes that a rank sends in a step: two gathers of the blocks, one of the rest, the gradients."""
        return accumulation * (2 * self.blocks + self.outside + self.trained) * (ranks - 1) // ranks


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
