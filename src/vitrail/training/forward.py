"""The model as it is trained: as it is, wrapped for several processes, compiled, or by the shorter way of a GPU."""

import torch
from torch import nn

from vitrail.acceleration.training_pass import TrainingPass, can_hasten
from vitrail.models.vit import ViT
from vitrail.runtime import Precision
from vitrail.training.recipe import Recipe
from vitrail.training.team import Team


def forward_of(model: nn.Module, recipe: Recipe, precision: Precision, team: Team) -> nn.Module:
    """Return what maps pictures to logits in a step; it has no parameters but the model's own."""
    if not recipe.compile:
        return team.wrapped(model)
    # Of a sweep's ninth model torch would compile nothing, and what it recorded for those before would keep its memory.
    torch.compiler.reset()
    # Not beside other processes: torch 2.11 cannot cut up gradients of our own, as their exchange would need.
    shorter = team.device.type == "cuda" and team.alone and precision == "bf16" and not recipe.deterministic
    if not (shorter and isinstance(model, ViT) and can_hasten(model.config)):
        return torch.compile(team.wrapped(model))  # type: ignore[return-value]
    # Recorded and replayed: a small model's kernels take less time than Python needs to launch them. But what a
    # recording leaves behind must be gone before the next one, and gradients that are still added up are not.
    mode = "reduce-overhead" if recipe.micro_batches == 1 else None
    return torch.compile(TrainingPass(model), mode=mode)  # type: ignore[return-value]
