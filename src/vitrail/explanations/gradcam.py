"""Grad-CAM (arXiv 1610.02391) on tokens: features weighted by how much they raise a class's score.

The features are the normalised patch tokens. By default they are taken where they are last read: by the pool if it is
`mean` or `map`; else by the last layer's attention, because after it patches do not influence the class token and have
no gradient.
"""

import copy
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from vitrail.explanations.relevance import class_score
from vitrail.explanations.tokens import Query, check_ready, patch_grid
from vitrail.models.checks import read_layer
from vitrail.models.vit import ViT

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def gradcam_maps(
    model: ViT, pixels: Tensor, target: int | Tensor, layer: int | None = None, query: Query | None = None
) -> Tensor:
    """Return the evidence of each patch for class `target`, one index or one per image: (B, rows, columns).

    With `layer`, the features are the input of that layer's attention.
    """
    check_ready(model)
    config = model.config
    read_by_pool = layer is None and config.pool in ("mean", "map")
    first = config.depth if read_by_pool else read_layer(-1 if layer is None else layer, config.depth)
    before, after = list(model.blocks)[:first], list(model.blocks)[first:]
    with torch.no_grad():
        tokens, places = model.embed(pixels)
        for block in before:
            tokens = block(tokens, places)
    with torch.enable_grad():
        tokens = entering = tokens.detach().requires_grad_()
        head, read = model, _Recorder(nn.Identity())
        if not after:
            head, read = _with_recorder(model, "norm")
        elif config.norm_order == "pre":
            after[0], read = _with_recorder(after[0], "norm1")
        for block in after:
            tokens = block(tokens, places)
        score = class_score(head.classify(tokens)[0], target, config, query)
        features = (
            entering if read.output is None else read.output
        )  # post-norm blocks attend to their unnormalised input
        (gradient,) = torch.autograd.grad(score, features)
    return patch_grid(weigh_features(features.detach(), gradient, config.layout.patches), config)


def weigh_features(tokens: Tensor, gradient: Tensor, patches: slice) -> Tensor:
    """Weight each of the D features by its mean gradient over the patches, sum, and clamp at 0: (B, T)."""
    importance = gradient[:, patches].mean(dim=1, keepdim=True)
    return (tokens.float() * importance.float()).sum(dim=-1).clamp(min=0)


class _Recorder(nn.Module):
    """A module that stores its last output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.output: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.output = cast("Tensor", self.inner(x))
        return self.output


def _with_recorder(module: AnyModule, name: str) -> tuple[AnyModule, _Recorder]:
    """Return a shallow copy of a module, one of whose submodules stores its output.

    A hook would change the model itself, which other threads may be using.
    """
    recorder = _Recorder(cast("nn.Module", getattr(module, name)))
    twin = copy.copy(module)
    twin._modules = {**module._modules, name: recorder}
    return twin, recorder
