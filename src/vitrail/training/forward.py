"""The forward pass of training: eager, DistributedDataParallel, compiled, or the fused CUDA path."""

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
    """Return the module that maps images to logits in a step; its parameters are the model's own."""
    if not recipe.compile:
        return ranks.wrap(model)
    if not (
        isinstance(model, ViT) and uses_fused_pass(model.config, recipe, precision, ranks.device, alone=ranks.alone)
    ):
        return torch.compile(ranks.wrap(model))  # type: ignore[return-value]
    mode = "reduce-overhead" if uses_cuda_graph(recipe) else None
    return torch.compile(FusedTraining(model), mode=mode)  # type: ignore[return-value]


def uses_fused_pass(
    config: ViTConfig, recipe: Recipe, precision: Precision, device: torch.device, *, alone: bool
) -> bool:
    """Whether a run uses the fused CUDA path."""
    # Single rank only: torch 2.11 cannot split a custom backward pass, as DDP's gradient buckets need.
    requested = recipe.compile and precision == "bf16" and not recipe.deterministic and alone
    supported = not recipe.gradient_checkpointing or can_checkpoint()
    return requested and supported and device.type == "cuda" and faster_in_bf16(device) and can_fuse(config)


def uses_cuda_graph(recipe: Recipe) -> bool:
    """Whether the fused path runs as a CUDA graph.

    A small model's kernels take less time than Python needs to launch them. But a graph's outputs must be freed before
    it runs again, which accumulated gradients are not; and torch captures graphs in the main thread only.
    """
    return recipe.gradient_accumulation == 1 and threading.current_thread() is threading.main_thread()


def reset_compiled(device: torch.device) -> None:
    """Free everything that compiled models in this process hold; they are recompiled on their next use.

    Otherwise CUDA graphs would keep their memory, and torch's recompile limit would stop it from compiling the ninth
    model of a sweep.
    """
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
