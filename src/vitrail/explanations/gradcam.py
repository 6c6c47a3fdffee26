"""Grad-CAM (arXiv 1610.02391) on tokens: features weighted by how much they raise a class's score.

The features are the patches' tokens as they are read, that is, normed. Without a layer they are taken where they are
read last: by the pool where that is `mean` or `map`; else by the last layer's attention, because behind it patches
have no influence on a class token, and no gradient.
"""

import copy
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from vitrail.explanations.relevance import class_score
from vitrail.explanations.tokens import Query, check_ready, patch_grid
from vitrail.models.checks import read_layer
from vitrail.models.vit import ViT

Subset = TypeVar("Subset", bound=nn.Module)


def gradcam_maps(
    model: ViT, pixels: Tensor, target: int | Tensor, layer: int | None = None, query: Query | None = None
) -> Tensor:
    """Return how much each patch speaks for class `target`, a number or one for each image: (B, rows, columns).

    With `layer`, the features are what that layer's attention reads.
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
        head, read = model, _Kept(nn.Identity())
        if not after:
            head, read = _watched(model, "norm")
        elif config.norm_order == "pre":
            after[0], read = _watched(after[0], "norm1")
        for block in after:
            tokens = block(tokens, places)
        score = class_score(head.classify(tokens)[0], target, config, query)
        features = entering if read.output is None else read.output  # post-norm blocks read what enters them
        (gradient,) = torch.autograd.grad(score, features)
    return patch_grid(weigh_features(features.detach(), gradient, config.layout.patches), config)


def weigh_features(tokens: Tensor, gradient: Tensor, patches: slice) -> Tensor:
    """Weigh each of the D features by its mean gradient over the patches, and keep what is positive: (B, T)."""
    importance = gradient[:, patches].mean(dim=1, keepdim=True)
    return (tokens.float() * importance.float()).sum(dim=-1).clamp(min=0)


class _Kept(nn.Module):
    """A module that remembers what it gave."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.output: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.output = cast("Tensor", self.inner(x))
        return self.output


def _watched(part: Subset, name: str) -> tuple[Subset, _Kept]:
    """Return a copy of a module, with the same weights, one of whose parts remembers what it gave.

    A hook would do the same to the model itself, which others may be using at this moment.
    """
    kept = _Kept(cast("nn.Module", getattr(part, name)))
    twin = copy.copy(part)
    twin._modules = {**part._modules, name: kept}
    return twin, kept
