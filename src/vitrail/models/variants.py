"""The named Vision Transformers, as rows of a table. This file does not import torch."""

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
    size: str
    patch: int
    """The patch size, in pixels."""
    resnet: tuple[int, ...] | None = None
    """Depths of the hybrid's ResNet."""


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
    Variant("vit_tiny_r_s16_p8", "R+Ti/16", "tiny", 32, ()),
    Variant("vit_small_r26_s32", "R26+S/32", "small", 32, (2, 2, 2, 2)),
    Variant("vit_base_r50_s16", "R50+B/16", "base", 16, (3, 4, 9)),
    Variant("vit_large_r50_s32", "R50+L/32", "large", 32, (3, 4, 6, 3)),
)

DEFAULT_IMAGE_SIZE = 224
PAPER = {
    name: ViTConfig.model_fields[name].default
    for name in ("stem", "class_token", "position", "activation", "stochastic_depth", "pool", "final_norm", "init")
}
"""The options of the ViT paper's model at any size: plain patches, class token pooling, and so on."""


def variant_config(name: str) -> ViTConfig:
    """Return the config of a named model, by the paper's name or timm's.

    For example "B/16", "R50+B/16", "vit_base_patch16_224", "vit_base_patch16_384".
    """
    variant, image_size = _find(name)
    width, depth, heads, mlp_width = SIZES[variant.size]
    return ViTConfig(
        image_size=(image_size, image_size),
        patch_size=(variant.patch, variant.patch),
        width=width,
        depth=depth,
        heads=heads,
        mlp_width=None if mlp_width == 4 * width else mlp_width,
        stem="conv" if variant.resnet is None else "resnet",
        resnet=None if variant.resnet is None else ResNet(depths=variant.resnet),
    )


def variant_name(config: ViTConfig) -> str | None:
    """Return the paper's name for a model of this size, such as "B/16"; None if no named size fits.

    Plain ViTs match with any square patch size, also one that is not in the table: "S/14".
    """
    size = Size(config.width, config.depth, config.heads, config.mlp_hidden)
    patch, other = config.patch_size
    resnet = config.stem_resnet.depths if config.stem == "resnet" else None
    for variant in VARIANTS:
        if SIZES[variant.size] != size or variant.resnet != resnet or patch != other:
            continue
        if resnet is None:
            return f"{variant.paper.partition('/')[0]}/{patch}"
        if variant.patch == patch and config.stem_resnet.width_factor == 1:
            return variant.paper
    return None


def _find(name: str) -> tuple[Variant, int]:
    """Look up a name: the paper's, or timm's with or without an image size."""
    if not isinstance(name, str):
        raise ConfigError(f"expected a model name such as 'B/16', found {name!r}")
    for variant in VARIANTS:
        if name == variant.paper:
            return variant, DEFAULT_IMAGE_SIZE
        if sized := re.fullmatch(rf"{variant.name}(?:_([1-9][0-9]{{0,5}}))?", name):
            return variant, int(sized[1] or DEFAULT_IMAGE_SIZE)
    names = [v.paper for v in VARIANTS] + [f"{v.name}_{DEFAULT_IMAGE_SIZE}" for v in VARIANTS]
    hint = suggest(name, names) or f"; for example {VARIANTS[4].paper!r} or {names[len(VARIANTS) + 4]!r}"
    shown = name if len(name) <= 60 else f"{name[:60]}…"
    raise ConfigError(f"no model is called {shown!r}{hint} (`vitrail models` lists all)")
