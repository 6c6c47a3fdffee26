"""Grad-CAM (arXiv 1610.02391) on tokens: features weighted by how much they raise a class's score.

The features are the patches' tokens as they enter a layer, by default the last. (As they leave the last, those of a
model that reads its class token have no influence any more, and no gradient.)
"""

import torch
from torch import Tensor

from vitrail.explanations.relevance import class_score
from vitrail.explanations.tokens import Query, check_ready, patch_grid
from vitrail.models.checks import read_layer
from vitrail.models.vit import ViT


def gradcam_maps(
    model: ViT, pixels: Tensor, target: int | Tensor, layer: int | None = None, query: Query | None = None
) -> Tensor:
    """Return how much each patch speaks for class `target`, a number or one for each picture: (B, rows, columns)."""
    check_ready(model)
    config = model.config
    first = read_layer(-1 if layer is None else layer, config.depth)
    with torch.no_grad():
        entering, places = model.embed(pixels)
        for block in list(model.blocks)[:first]:
            entering = block(entering, places)
    with torch.enable_grad():
        tokens = entering = entering.detach().requires_grad_()
        for block in list(model.blocks)[first:]:
            tokens = block(tokens, places)
        score = class_score(model.classify(tokens)[0], target, config, query)
        (gradient,) = torch.autograd.grad(score, entering)
    return patch_grid(weigh_features(entering.detach(), gradient, config.layout.patches), config)


def weigh_features(tokens: Tensor, gradient: Tensor, patches: slice) -> Tensor:
    """Weigh each of the D features by its mean gradient over the patches, and keep what is positive: (B, T)."""
    importance = gradient[:, patches].mean(dim=1, keepdim=True)
    return (tokens * importance).sum(dim=-1).clamp(min=0)
