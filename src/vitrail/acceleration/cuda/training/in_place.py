"""The fused training path inside another module, such as a pretraining method around its encoder.

The blocks and patch projections of the module are computed by the fused path where the module is compiled. Everywhere
else, such as in an evaluation, they are what they were.
"""

from functools import partial

import torch
from torch import Tensor, nn

from vitrail.acceleration.cuda.training.block import all_tokens, as_stream
from vitrail.acceleration.cuda.training.model import project_patches
from vitrail.acceleration.planner import hardware_of
from vitrail.models.blocks import Block
from vitrail.models.position import TokenPositions
from vitrail.models.resampled import ResampledForward
from vitrail.models.stems import ConvProjection


def fuse_in_place(module: nn.Module) -> None:
    """Let the fused path compute all blocks and patch projections of a module, which must support it."""
    can_be_short = hardware_of(next(module.parameters()).device).short_attention
    for part in _parts(module):
        # A partial, not a closure: it is copied along with the module.
        if isinstance(part, Block):
            part.forward = partial(_block, part, can_be_short)  # type: ignore[method-assign]
        elif isinstance(part, ConvProjection):
            part.forward = partial(_stem, part)  # type: ignore[method-assign]


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return all submodules, also those of a model for another image size."""
    parts = list(module.modules())
    return parts + [part for each in parts if isinstance(each, ResampledForward) for part in each.model.modules()]


def _block(block: Block, can_be_short: bool, x: Tensor, positions: TokenPositions) -> Tensor:
    if not torch.compiler.is_compiling():
        return Block.forward(block, x, positions)
    return all_tokens(block, as_stream(x), positions, can_be_short)


def _stem(stem: ConvProjection, x: Tensor) -> Tensor:
    return project_patches(stem, x) if torch.compiler.is_compiling() else ConvProjection.forward(stem, x)
