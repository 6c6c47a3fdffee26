"""The model as it is trained: as it is, wrapped for several processes, compiled, or by the shorter way of a GPU."""

import gc
import threading

import torch
from torch import nn

from vitrail.acceleration.fused_training import FusedTraining, can_checkpoint, can_fuse
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, faster_in_bf16
from vitrail.training.distributed import Ranks
from vitrail.training.recipe import Recipe


def forward_of(model: nn.Module, recipe: Recipe, precision: Precision, ranks: Ranks) -> nn.Module:
    """Return what maps images to logits in a step; it has no parameters but the model's own."""
    if not recipe.compile:
        return ranks.wrapped(model)
    if not (
        isinstance(model, ViT) and uses_fused_pass(model.config, recipe, precision, ranks.device, alone=ranks.alone)
    ):
        return torch.compile(ranks.wrapped(model))  # type: ignore[return-value]
    mode = "reduce-overhead" if uses_cuda_graph(recipe) else None
    return torch.compile(FusedTraining(model), mode=mode)  # type: ignore[return-value]


def uses_fused_pass(
    config: ViTConfig, recipe: Recipe, precision: Precision, device: torch.device, *, alone: bool
) -> bool:
    """Say whether a run takes the shorter way of a GPU."""
    # Not beside other processes: torch 2.11 cannot cut up gradients of our own, as their exchange would need.
    asked = recipe.compile and precision == "bf16" and not recipe.deterministic and alone
    spares = not recipe.gradient_checkpointing or can_checkpoint()
    return asked and spares and device.type == "cuda" and faster_in_bf16(device) and can_fuse(config)


def uses_cuda_graph(recipe: Recipe) -> bool:
    """Say whether the kernels of the shorter way are recorded and replayed.

    A small model's kernels take less time than Python needs to launch them. But what a recording leaves behind must be
    gone before the next one, and gradients that are still added up are not; and torch records for the main thread only.
    """
    return recipe.gradient_accumulation == 1 and threading.current_thread() is threading.main_thread()


def forget_compiled(device: torch.device) -> None:
    """Give back what compiled models of this process hold, whoever compiled them; they are compiled again when used.

    Otherwise recorded kernels would keep their memory, and of a sweep's ninth model torch would compile nothing.
    """
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
