"""The named models, as rows of a table: Vision Transformers, hybrids, ResNets. This file does not import torch."""

import re
from typing import NamedTuple

from vitrail.errors import ConfigError, suggest
from vitrail.models.config import ResNet, ViTConfig


class Size(NamedTuple):
    """The size of an encoder."""

    width: int
    depth: int
    heads: int
    mlp_width: int


SIZES = {
    "tiny": Size(192, 12, 3, 768),
    "small": Size(384, 12, 6, 1536),
    "base": Size(768, 12, 12, 3072),
    "large": Size(1024, 24, 16, 4096),
    "huge": Size(1280, 32, 16, 5120),
    "giant": Size(1408, 40, 16, 6144),
    "gigantic": Size(1664, 48, 16, 8192),
}


class Variant(NamedTuple):
    """One named model. `name` is timm's, without the image size; `paper` is the name in the papers."""

    name: str
    paper: str
    size: str | None
    """The size of the encoder; None for a plain ResNet, which has none."""
    patch: int
    """The patch size, in pixels."""
    resnet: ResNet | None = None
    """The ResNet of a hybrid, or of a plain ResNet."""
    image_size: int = 224
    """The image size of the name without one."""


R26, R50 = ResNet(depths=(2, 2, 2, 2)), ResNet(depths=(3, 4, 6, 3))
VARIANTS = (
    Variant("vit_tiny_patch16", "Ti/16", "tiny", 16),
    Variant("vit_small_patch16", "S/16", "small", 16),
    Variant("vit_small_patch32", "S/32", "small", 32),
    Variant("vit_base_patch8", "B/8", "base", 8),
    Variant("vit_base_patch16", "B/16", "base", 16),
    Variant("vit_base_patch32", "B/32", "base", 32),
    Variant("vit_large_patch14", "L/14", "large", 14),
    Variant("vit_large_patch16", "L/16", "large", 16),
    Variant("vit_large_patch32", "L/32", "large", 32),
    Variant("vit_huge_patch14", "H/14", "huge", 14),
    Variant("vit_giant_patch14", "g/14", "giant", 14),
    Variant("vit_gigantic_patch14", "G/14", "gigantic", 14),
    # R+Ti/16 keeps its published name, but has 8×8 patches on a feature map of stride 4: 32 pixels per token.
    Variant("vit_tiny_r_s16_p8", "R+Ti/16", "tiny", 32, ResNet(depths=())),
    Variant("vit_small_r26_s32", "R26+S/32", "small", 32, R26),
    Variant("vit_base_r50_s16", "R50+B/16", "base", 16, ResNet(depths=(3, 4, 9))),
    Variant("vit_large_r50_s32", "R50+L/32", "large", 32, R50),
    # Plain ResNets to compare with. The last one is for small images: its root has no stride, and half the channels.
    Variant("resnet26", "R26", None, 32, R26),
    Variant("resnet50", "R50", None, 32, R50),
    Variant("resnet26_s8", "R26/8", None, 8, ResNet(depths=(2, 2, 2, 2), width_factor=0.5, root_stride=1), 64),
)

PAPER = {
    name: ViTConfig.model_fields[name].default
    for name in ("stem", "class_token", "position", "activation", "stochastic_depth", "pool", "final_norm", "init")
}
"""The options of the ViT paper's model at any size: plain patches, class token pooling, and so on."""


def variant_config(name: str) -> ViTConfig:
    """Return the config of a named model, by the paper's name or timm's.

    For example "B/16", "R50+B/16", "R50", "vit_base_patch16_224", "vit_base_patch16_384".
    """
    variant, image_size = _find(name)
    if variant.size is None:
        return resnet_config(variant.resnet or ResNet()).replace(image_size=(image_size, image_size))
    width, depth, heads, mlp_width = SIZES[variant.size]
    return ViTConfig(
        image_size=(image_size, image_size),
        patch_size=(variant.patch, variant.patch),
        width=width,
        depth=depth,
        heads=heads,
        mlp_width=None if mlp_width == 4 * width else mlp_width,
        stem="conv" if variant.resnet is None else "resnet",
        resnet=variant.resnet,
    )


def resnet_config(resnet: ResNet) -> ViTConfig:
    """Return the config of a plain ResNet: the `resnet` stem without encoder blocks, mean pooling and a linear head."""
    return ViTConfig(
        patch_size=(resnet.stride, resnet.stride),
        width=resnet.out_channels,
        depth=0,
        heads=1,
        stem="resnet",
        resnet=resnet,
        class_token="none",
        position="none",
        pool="mean",
        final_norm="none",
    )


def variant_name(config: ViTConfig) -> str | None:
    """Return the paper's name for a model of this size, such as "B/16"; None if no named size fits.

    Plain ViTs match with any square patch size, also one that is not in the table: "S/14".
    """
    size = Size(config.width, config.depth, config.heads, config.mlp_hidden)
    patch, other = config.patch_size
    resnet = config.stem_resnet.replace(numerics="google") if config.stem == "resnet" else None
    for variant in VARIANTS:
        same_encoder = not config.depth if variant.size is None else SIZES[variant.size] == size
        if not same_encoder or variant.resnet != resnet or patch != other:
            continue
        if resnet is None:
            return f"{variant.paper.partition('/')[0]}/{patch}"
        if variant.patch == patch:
            return variant.paper
    return None


def _find(name: str) -> tuple[Variant, int]:
    """Look up a name: the paper's, or timm's with or without an image size."""
    if not isinstance(name, str):
        raise ConfigError(f"expected a model name such as 'B/16', found {name!r}")
    for variant in VARIANTS:
        if name == variant.paper:
            return variant, variant.image_size
        if sized := re.fullmatch(rf"{variant.name}(?:_([1-9][0-9]{{0,5}}))?", name):
            return variant, int(sized[1] or variant.image_size)
    names = [v.paper for v in VARIANTS] + [f"{v.name}_{v.image_size}" for v in VARIANTS]
    hint = suggest(name, names) or f"; for example {VARIANTS[4].paper!r} or {names[len(VARIANTS) + 4]!r}"
    shown = name if len(name) <= 60 else f"{name[:60]}…"
    raise ConfigError(f"no model is called {shown!r}{hint} (`vitrail models` lists all)")
