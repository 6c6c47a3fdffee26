"""One image on its way through a model: what each stage is, and the shape its tensor really had."""

from contextlib import ExitStack
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitrail.models.config import ViTConfig
from vitrail.models.patches import Order, cut
from vitrail.models.stems import EarlyConvolutions, Hybrid, LinearProjection, NormedLinearProjection
from vitrail.models.vit import ViT

Side = Literal["in", "out"]
Named = tuple[str, Tensor, str]
"""A stage before its tensor is forgotten: name, tensor, meaning."""


class Stage(NamedTuple):
    """One tensor on the way."""

    name: str
    shape: tuple[int, ...]
    meaning: str


@torch.no_grad()
def stages(model: ViT, image: Tensor) -> list[Stage]:
    """Run images (B, C, H, W) through the model and list what they become."""
    config, first, last = model.config, 0, model.config.depth - 1
    model.embed(image)  # refuses an image that does not fit, before anything else looks at it
    traced = model.trace(image, attention=(first,), tokens=(last,))
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
            "image",
            image,
            f"{_channels(config.channels)} of {config.image_size[0]}×{config.image_size[1]} pixels",
        ),
        *_through_the_stem(model, image),
        ("tokens", model.embed(image)[0], f"{joined}{placed}".strip(", ") or "as they came from the stem"),
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
        ("pooled", model.features(image).pooled, pooled),
        ("logits", traced.logits, answers),
    ]
    return [Stage(name, tuple(tensor.shape), meaning) for name, tensor, meaning in found]


def _through_the_stem(model: ViT, image: Tensor) -> list[Named]:
    """Return the tensors that this stem really makes: a convolution, for one, never cuts an image into patches."""
    stem, config = model.patch_embed, model.config
    found: list[Named] = []
    if isinstance(stem, LinearProjection | NormedLinearProjection):
        (rows, columns), (h, w) = config.grid, config.patch_size
        meaning = f"{rows}×{columns} patches, each {h}×{w} pixels × {_channels(config.channels)}"
        order: Order = "hwc" if isinstance(stem, NormedLinearProjection) else "chw"
        found.append(("patches", cut(image, config.patch_size, order), meaning))
        read = f"each patch as {config.width} learned features"
    else:
        read = "the feature map read row by row"
    with ExitStack() as hooks:
        for name, meaning, module, side in _watched(stem, config):
            hooks.callback(_hook(module, side, name, meaning, found).remove)
        embeddings = stem(image)
    return [*found, ("patch embeddings", embeddings, read)]


def _hook(module: nn.Module, side: Side, name: str, meaning: str, found: list[Named]) -> RemovableHandle:
    """Note what goes into a module, or what comes out of it, when it runs."""
    if side == "in":
        return module.register_forward_pre_hook(lambda _, given: found.append((name, given[0], meaning)))
    return module.register_forward_hook(lambda _, __, made: found.append((name, made, meaning)))


def _watched(stem: nn.Module, config: ViTConfig) -> list[tuple[str, str, nn.Module, Side]]:
    """Return what is worth seeing inside a stem: name, meaning, module, and which side of it."""
    h, w = config.patch_size
    match stem:
        case LinearProjection():
            return []
        case NormedLinearProjection():
            return [("patches, normalised", "each by the mean and variance of its own numbers", stem.norm_in, "out")]
        case EarlyConvolutions():
            layers = zip(config.stem_layers, stem.backbone, strict=True)
            return [
                *(
                    (f"convolution {number}", f"{layer.kernel}×{layer.kernel}, stride {layer.stride}", module, "out")
                    for number, (layer, module) in enumerate(layers, start=1)
                ),
                ("feature map", f"{config.width} features for each {h}×{w} pixels", stem.proj, "out"),
            ]
        case Hybrid():
            backbone, depths = stem.backbone, config.stem_resnet.depths
            pooled: tuple[nn.Module, Side] = (backbone.stages[0], "in") if depths else (backbone, "out")
            return [
                ("ResNet root", "a 7×7 convolution, stride 2", backbone.stem, "out"),
                ("ResNet root, pooled", "the largest of 3×3, stride 2", *pooled),
                *(
                    (f"ResNet stage {number}", "1 block" if depth == 1 else f"{depth} blocks", module, "out")
                    for number, (depth, module) in enumerate(zip(depths, backbone.stages, strict=True), start=1)
                ),
                ("feature map", f"{config.width} features for each {h}×{w} pixels", stem.proj, "out"),
            ]
        case _:
            meaning = f"each {h}×{w} patch as {config.width} features, by a convolution whose stride is its kernel"
            return [("feature map", meaning, stem.proj, "out")]  # type: ignore[list-item]


def sample_image(channels: int, size: tuple[int, int]) -> Tensor:
    """Paint a bright disc on a sloping background: (1, channels, height, width) in ±1, no two channels alike."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size[0]), torch.linspace(-1, 1, size[1]), indexing="ij")
    disc = (((x - 0.25) ** 2 + (y + 0.2) ** 2) < 0.3).float()
    turns = torch.linspace(0, 3, channels + 1)[:channels, None, None]
    slope = 0.5 * (x * torch.cos(turns) + y * torch.sin(turns))
    return (slope * (1 - disc) + disc * torch.cos(2 * turns + x)).clamp(-1, 1)[None]


def _channels(count: int) -> str:
    return "1 channel" if count == 1 else f"{count} channels"
