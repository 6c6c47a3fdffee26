"""The cost of a model: parameters and FLOPs, counted on the meta device."""

from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT


class Cost(NamedTuple):
    """Parameters, tokens and FLOPs of a model."""

    parameters: int
    tokens: int
    flops: int
    """FLOPs per image; a multiply-add counts as two."""


def cost(config: ViTConfig) -> Cost:
    """Count the parameters of a model and the FLOPs of its matmuls, convolutions and attention.

    All blocks are identical, so the cost is extrapolated from models with one and two blocks.
    """
    one, two = _count(config.replace(depth=1)), _count(config.replace(depth=2))
    more = config.depth - 1
    return Cost(
        parameters=one.parameters + more * (two.parameters - one.parameters),
        tokens=config.tokens,
        flops=one.flops + more * (two.flops - one.flops),
    )


def _count(config: ViTConfig) -> Cost:
    with torch.device("meta"):
        model = ViT(config).eval().to("meta")  # also moves computed buffers, such as the RoPE table
        image = torch.empty(1, config.channels, *config.image_size)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(image)
    return Cost(sum(p.numel() for p in model.parameters()), config.tokens, counter.get_total_flops())
