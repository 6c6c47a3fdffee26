"""One picture on its way through a model: what each stage is, and the shape its tensor really had."""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.models.patches import cut
from vitrail.models.vit import ViT


class Stage(NamedTuple):
    """One tensor on the way."""

    name: str
    shape: tuple[int, ...]
    meaning: str


@torch.no_grad()
def stages(model: ViT, picture: Tensor) -> list[Stage]:
    """Run pictures (B, C, H, W) through the model and list what they become."""
    config, first, last = model.config, 0, model.config.depth - 1
    (rows, columns), (h, w) = config.grid, config.patch_size
    model.embed(picture)  # refuses a picture that does not fit, before anything else looks at it
    traced = model.trace(picture, attention=(first,), tokens=(last,))
    special = [
        name
        for name, count in (
            ("the class token", config.class_token != "none"),
            ("the distillation token", config.distillation_token),
            (f"{config.registers} registers", config.registers),
        )
        if count
    ]
    joined = f"{' and '.join(special)} joined, " if special else ""
    placed = "" if config.position == "none" else f"position {config.position} known"
    pooled = {
        "cls": "the class token alone",
        "mean": "the mean of the tokens",
        "map": "one query's attention over the tokens",
        "none": "every token for itself",
    }[config.pool]
    answers = f"a score for each of {config.classes} classes" if config.classes else "no head: the features"
    found = [
        (
            "picture",
            picture,
            f"{_channels(config.channels)} of {config.image_size[0]}×{config.image_size[1]} pixels",
        ),
        (
            "patches",
            cut(picture, config.patch_size),
            f"{rows}×{columns} patches, each {h}×{w} pixels × {_channels(config.channels)}",
        ),
        ("patch embeddings", model.patch_embed(picture), f"each patch as {config.width} learned features"),
        ("tokens", model.embed(picture)[0], f"{joined}{placed}".strip(", ") or "as they came from the stem"),
        (
            "attention, layer 0",
            traced.attention[first],
            f"in each of {config.heads} heads, how much each token looks at each other one",
        ),
        (
            f"tokens after layer {config.depth - 1}",
            traced.tokens[last],
            f"{config.depth} blocks of attention and MLP later",
        ),
        ("pooled", model.features(picture).pooled, pooled),
        ("logits", traced.logits, answers),
    ]
    return [Stage(name, tuple(tensor.shape), meaning) for name, tensor, meaning in found]


def sample_picture(channels: int, size: tuple[int, int]) -> Tensor:
    """Paint a bright disc on a sloping background: (1, channels, height, width) in ±1, no two channels alike."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size[0]), torch.linspace(-1, 1, size[1]), indexing="ij")
    disc = (((x - 0.25) ** 2 + (y + 0.2) ** 2) < 0.3).float()
    turns = torch.linspace(0, 3, channels + 1)[:channels, None, None]
    slope = 0.5 * (x * torch.cos(turns) + y * torch.sin(turns))
    return (slope * (1 - disc) + disc * torch.cos(2 * turns + x)).clamp(-1, 1)[None]


def _channels(count: int) -> str:
    return "1 channel" if count == 1 else f"{count} channels"
