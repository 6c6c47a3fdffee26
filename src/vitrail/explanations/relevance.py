"""Maps from gradients and features: Grad-CAM on tokens, gradient-weighted relevance, PCA of patch features.

Grad-CAM (arXiv 1610.02391) weights features by how much they raise a class's score. They are the normalised patch
tokens. By default they are taken where they are last read: by the pool if it is `mean` or `map`; else by the last
layer's attention, because after it patches do not influence the class token and have no gradient.

Relevance (Chefer et al. 2021, arXiv 2103.15679): in every layer, the positive part of gradient × attention weight,
averaged over the heads, is that layer's A. Relevance starts as R = I, and every layer updates it to R + A R. Only the
row of R that the head reads is needed, and that can be computed from the last layer backwards: r + r A. So the layers
are recomputed one at a time in the backward pass, and the attention of only one is in memory.
"""

import copy
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from vitrail.errors import InputError
from vitrail.explanations.attention import Query, check_ready, patch_grid, pooled_tokens, read_query, read_token, spread
from vitrail.models.blocks import Block
from vitrail.models.checks import read_layer
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

AnyModule = TypeVar("AnyModule", bound=nn.Module)


# ── Grad-CAM ──


def gradcam_maps(
    model: ViT, pixels: Tensor, target: int | Tensor, layer: int | None = None, query: Query | None = None
) -> Tensor:
    """Return the evidence of each patch for class `target`, one index or one per image: (B, rows, columns).

    With `layer`, the features are the input of that layer's attention.
    """
    check_ready(model)
    check_head(model.config)
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


# ── relevance ──


def relevance(model: ViT, pixels: Tensor, target: int | Tensor, query: Query | None = None) -> Tensor:
    """Return the relevance of each token for class `target`, one index or one per image: (B, T).

    `query` selects the token whose logits are explained if every token has logits (pool none), or every patch (pool
    patches).
    """
    check_ready(model)
    check_head(model.config)
    states: list[Tensor] = []
    with torch.no_grad():
        tokens, places = model.embed(pixels)
        for block in model.blocks:
            states.append(tokens)
            tokens = block(tokens, places)
    with torch.enable_grad():
        leaving = tokens.detach().requires_grad_()
        logits, pooling = model.classify(leaving)
        score = class_score(logits, target, model.config, query)
        inputs = [leaving] if pooling is None else [leaving, pooling]
        gradient, *of_pooling = torch.autograd.grad(score, inputs)
    if pooling is None:
        row = _read_weights(model.config, query).to(pixels.device).expand(len(pixels), -1)
    else:
        row = spread(positive_part(of_pooling[0], pooling.detach()), model.config)
    for block in reversed(model.blocks):
        with torch.enable_grad():
            entering = states.pop().detach().requires_grad_()
            leaving, weights = cast("Block", block).traced(entering, places)
            gradient, of_weights = torch.autograd.grad(leaving, (entering, weights), gradient)
        row = row + (row[:, None] @ positive_part(of_weights, weights.detach()))[:, 0]
        del leaving, weights, of_weights
    return row


def relevance_maps(model: ViT, pixels: Tensor, target: int | Tensor, query: Query | None = None) -> Tensor:
    """Return the relevance of each patch for class `target`: (B, rows, columns)."""
    return patch_grid(relevance(model, pixels, target, query), model.config)


def positive_part(gradient: Tensor, weights: Tensor) -> Tensor:
    """Return the positive part of gradient × weights, averaged over the heads of (B, heads, …)."""
    return (gradient * weights).clamp(min=0).mean(dim=1)


def class_score(logits: Tensor, target: int | Tensor, config: ViTConfig, query: Query | None = None) -> Tensor:
    """Return the sum over images of the score of class `target`; its gradient is per image."""
    check_head(config)
    chosen = torch.as_tensor(target, device=logits.device).expand(len(logits))
    if not bool(((chosen >= 0) & (chosen < config.classes)).all()):
        raise InputError(f"class {target} does not exist: this model has classes 0 to {config.classes - 1}")
    return explained_logits(logits, config, query).gather(1, chosen[:, None]).sum()


def explained_logits(logits: Tensor, config: ViTConfig, query: Query | None) -> Tensor:
    """Return the logits (B, K) that are explained: those of one token, in a model with logits for every token."""
    if config.has_pool:
        return logits
    token = explained_token(config, query)
    if config.pool == "none":
        return logits[:, token]
    return logits.flatten(2)[:, :, token - config.layout.patches.start]


def explained_token(config: ViTConfig, query: Query | None) -> int:
    """Return the token whose logits are explained, in a model with logits for every token or patch."""
    patches = config.pool == "patches"
    if query is None and (patches or config.class_token == "none"):
        raise InputError(
            f"this model has logits for every {'patch' if patches else 'token'} (its pool is {config.pool}), so choose "
            f"{'one' if patches else 'a token'} with query: a patch as 'row,column'; attention, rollout and pca work "
            f"without"
        )
    token = read_token(query if query is not None else "class", config)
    if patches and not config.layout.patches.start <= token < config.layout.patches.stop:
        raise InputError(f"this model has logits for patches only, not for {query}; choose a patch as 'row,column'")
    return token


def check_head(config: ViTConfig) -> None:
    """Raise for a model whose head has no class to explain, or reads several layers."""
    if not config.classes:
        raise InputError("the model has no head, so it has no class to explain; use attention, rollout or pca")
    if len(config.head_layers) > 1:
        raise InputError(
            "the head of this model reads several layers, and relevance and gradcam support one; use attention, "
            "rollout or pca"
        )


def _read_weights(config: ViTConfig, query: Query | None) -> Tensor:
    """Return the weights (T,) with which the head reads the tokens."""
    match config.pool:
        case "none" | "patches":
            row = torch.zeros(config.tokens)
            row[explained_token(config, query)] = 1
        case "cls" if config.distillation_token:  # the logits are the mean of two heads
            row = (read_query("class", config) + read_query("distillation", config)) / 2
        case "cls":
            row = read_query("class", config)
        case _:
            row = pooled_tokens(config)
    return row


# ── PCA ──


@torch.no_grad()
def pca_maps(model: ViT, pixels: Tensor, layer: int | None = None) -> Tensor:
    """Return the patches' features after a layer (and the final norm) as colours from 0 to 1: (B, rows, columns, 3)."""
    check_ready(model)
    grid = model.features(pixels, layer=layer, as_grid=True).tokens
    colours = [as_colours(image.flatten(1).T) for image in grid]
    return torch.stack(colours).reshape(len(grid), *model.config.grid, 3).to(pixels.device)


def as_colours(features: Tensor) -> Tensor:
    """Return each row of (N, D) as a colour (N, 3): its first three principal components, scaled to 0 to 1.

    The sign of a component is arbitrary; its largest entry is made positive. A missing third (or second, or first)
    component is 0.5.
    """
    numbers = features.double().cpu()  # on the CPU: same colours on all devices, and some lack float64
    centred = numbers - numbers.mean(dim=0)
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    # Beyond the rank there is only rounding noise, which would be scaled to full colour.
    kept = int((sizes[:3] > 1e-6 * numbers.abs().max()).sum())
    directions = directions[:kept]
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    places = centred @ (directions * largest.sign()).T
    low, high = places.amin(dim=0), places.amax(dim=0)
    colours = torch.full((len(features), 3), 0.5, dtype=torch.float64)
    colours[:, :kept] = (places - low) / (high - low)
    return colours.float()
