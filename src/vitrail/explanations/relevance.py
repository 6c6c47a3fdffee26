"""Gradient-weighted relevance (Chefer et al. 2021, arXiv 2103.15679): which patches are evidence for a class.

In every layer, the positive part of gradient × attention weight, averaged over the heads, is that layer's A. Relevance
starts as R = I, and every layer updates it to R + A R. Only the row of R that the head reads is needed, and that can be
computed from the last layer backwards: r + r A. So the layers are recomputed one at a time in the backward pass, and
the attention of only one is in memory.
"""

from typing import cast

import torch
from torch import Tensor

from vitrail.errors import InputError
from vitrail.explanations.tokens import Query, check_ready, patch_grid, pooled_tokens, read_query, read_token, spread
from vitrail.models.blocks import Block
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT


def relevance(model: ViT, pixels: Tensor, target: int | Tensor, query: Query | None = None) -> Tensor:
    """Return the relevance of each token for class `target`, one index or one per image: (B, T).

    `query` selects the token whose logits are explained if every token has logits (pool none).
    """
    check_ready(model)
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
    check_has_classes(config)
    chosen = torch.as_tensor(target, device=logits.device).expand(len(logits))
    if not bool(((chosen >= 0) & (chosen < config.classes)).all()):
        raise InputError(f"class {target} does not exist: this model has classes 0 to {config.classes - 1}")
    scores = logits[:, explained_token(config, query)] if config.pool == "none" else logits
    return scores.gather(1, chosen[:, None]).sum()


def explained_token(config: ViTConfig, query: Query | None) -> int:
    """Return the token whose logits are explained, in a model with logits for every token."""
    if query is None and config.class_token == "none":
        raise InputError(
            "this model has logits for every token (its pool is none), so choose a token with query: a patch as "
            "'row,column'; attention, rollout and pca work without"
        )
    return read_token(query if query is not None else "class", config)


def check_has_classes(config: ViTConfig) -> None:
    """Raise for a model without a classification head."""
    if not config.classes:
        raise InputError("the model has no head, so it has no class to explain; use attention, rollout or pca")


def _read_weights(config: ViTConfig, query: Query | None) -> Tensor:
    """Return the weights (T,) with which the head reads the tokens."""
    match config.pool:
        case "none":
            row = torch.zeros(config.tokens)
            row[explained_token(config, query)] = 1
        case "cls" if config.distillation_token:  # the logits are the mean of two heads
            row = (read_query("class", config) + read_query("distillation", config)) / 2
        case "cls":
            row = read_query("class", config)
        case _:
            row = pooled_tokens(config)
    return row
