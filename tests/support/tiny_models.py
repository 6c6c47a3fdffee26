"""Tiny models of every kind, and images for them."""

from typing import Any

import torch
from tests.support.peers import scramble
from torch import Tensor

from vitrail import Bundle, Preprocess, ViT, ViTConfig

TINY: dict[str, Any] = {"image_size": (16, 32), "patch_size": 8, "width": 24, "depth": 2, "heads": 3, "classes": 5}
BASIC_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"stem": "linear", "class_token": "last"},
    "linear_norm": {"stem": "linear_norm", "qkv_bias": False},
    "conv_stem": {"stem": "conv_stem", "norm_order": "post"},
    "resnet": {"stem": "resnet", "resnet": {"depths": (1, 1), "width_factor": 0.5}},
    "rope": {"position": "rope_2d", "registers": 2, "qk_norm": True},
    "relative": {"position": "relative", "activation": "swiglu"},
    "every_block": {"position_at": "every_block", "position_covers": "class", "registers": 1},
    "learned_2d": {"position": "learned_2d", "position_at": "shared"},
    "sincos": {"position": "sincos_2d", "pool": "map", "layer_scale": 0.1},
    "distilled": {"distillation_token": True, "representation": 7},
    "every_rate": dict.fromkeys(
        ("embed_dropout", "attention_dropout", "proj_dropout", "mlp_dropout", "stochastic_depth", "patch_dropout"), 0.2
    ),
}
"""Every stem, token and position type, and every kind of dropout."""
KINDS: dict[str, dict[str, Any]] = {
    **BASIC_KINDS,
    "no_position": {"position": "none", "activation": "quick_gelu", "norm_before_blocks": True},
    "mean_of_all": {"pool": "mean", "pool_over": "all", "final_norm": "after_pool", "class_token": "none"},
    "every_token": {"pool": "none", "activation": "gelu_tanh"},
    "patches": {"pool": "patches", "class_token": "last", "registers": 2, "final_norm": "after_pool"},
    "patches_of_layers": {"pool": "patches", "head_layers": (0, -1), "registers": 1},
    "no_head": {"classes": 0, "activation": "relu", "out_proj": False},
    "grey": {"channels": 1, "head_dim": 4},
    "cnn": {
        "stem": "resnet", "resnet": {"depths": (1, 1), "width_factor": 0.5, "root_stride": 1}, "patch_size": 2,
        "depth": 0, "width": 256, "class_token": "none", "position": "none", "pool": "mean", "final_norm": "none",
    },
}  # fmt: skip
"""Every stem, token, position type, pool and activation; all can be exported."""
CPU = torch.device("cpu")


def bundle(kind: str = "plain", **changes: Any) -> Bundle:
    """Return a tiny model with random parameters and an asymmetric preprocessing."""
    config = ViTConfig(**{**TINY, **KINDS[kind], **changes})
    model = scramble(ViT(config))
    size = Preprocess(size=config.image_size, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    names = tuple("abcde") if config.classes else None
    return Bundle(model, size.with_channels(config.channels), names)


def pixels(count: int, channels: int = 3, seed: int = 1) -> Tensor:
    """Return images in channels-last memory format, like batches."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 16, 32, channels), dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)


@torch.inference_mode()
def eager(made: Bundle, images: Tensor) -> Tensor:
    """Return the model's output in float32."""
    outputs: Tensor = made.model(made.preprocess.normalise(images))
    return outputs
