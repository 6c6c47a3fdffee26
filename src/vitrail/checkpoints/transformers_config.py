"""The config files that transformers reads with the weights."""

from collections.abc import Sequence
from typing import Any, Literal

from vitrail.checkpoints.formats.dinov2 import integer_ratio
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ViTConfig

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu", "relu": "relu"}
_RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


def transformers_config(config: ViTConfig, classes: Sequence[str] | None) -> dict[str, Any]:
    """Return config.json for a ViT, or for a DeiT if there is a distillation token."""
    kind, name = ("deit", "DeiTForImageClassificationWithTeacher") if config.distillation_token else (
        "vit", "ViTForImageClassification" if config.classes else "ViTModel"
    )  # fmt: skip
    names = classes if classes is not None else [f"LABEL_{i}" for i in range(config.classes)]
    return {
        "architectures": [name],
        "model_type": kind,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_hidden,
        "hidden_act": _ACTIVATIONS[config.activation],
        "hidden_dropout_prob": config.mlp_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": config.norm_eps,
        "image_size": _one(config.image_size),
        "patch_size": _one(config.patch_size),
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
        "id2label": {str(i): label for i, label in enumerate(names)},
        "label2id": {label: i for i, label in enumerate(names)},
    }


def dinov2_config(config: ViTConfig) -> dict[str, Any]:
    """Return config.json for a DINOv2 backbone; with registers it is another class in transformers."""
    gated = config.activation == "swiglu"
    kind, name = ("dinov2_with_registers", "Dinov2WithRegisters") if config.registers else ("dinov2", "Dinov2")
    return {
        "architectures": [f"{name}Model"],
        "model_type": kind,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "mlp_ratio": integer_ratio(config),
        "use_swiglu_ffn": gated,
        "hidden_act": "gelu" if gated else _ACTIVATIONS[config.activation],
        "layer_norm_eps": config.norm_eps,
        "layerscale_value": config.layer_scale,
        "image_size": _one(config.image_size),
        "patch_size": _one(config.patch_size),
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
        **({"num_register_tokens": config.registers} if config.registers else {}),
    }


def preprocessor_differences(preprocess: Preprocess) -> list[str]:
    """Return how the closest image processor of transformers differs."""
    box, size = preprocess.resize_to or preprocess.size, preprocess.size
    if _processor(preprocess) != "none":
        return []
    return [
        f"preprocess.resize={preprocess.resize!r} to {box[0]}×{box[1]}, crop to {size[0]}×{size[1]} (no image "
        f"processor of transformers supports it; the one written squashes images to {size[0]}×{size[1]})"
    ]


def _processor(preprocess: Preprocess) -> Literal["squash", "shortest_edge", "none"]:
    box = preprocess.resize_to or preprocess.size
    if preprocess.resize == "squash" and box == preprocess.size:
        return "squash"
    return "shortest_edge" if preprocess.resize == "cover" and box[0] == box[1] else "none"


def transformers_preprocessor(preprocess: Preprocess) -> dict[str, Any]:
    """Return preprocessor_config.json; a processor that crops is another class in transformers."""
    height, width = preprocess.size
    common = {
        "do_resize": True,
        "resample": _RESAMPLE[preprocess.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
    if _processor(preprocess) == "shortest_edge":
        return {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": (preprocess.resize_to or preprocess.size)[0]},
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
            **common,
        }
    return {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}, **common}


def _one(size: tuple[int, int]) -> int | list[int]:
    """Return a square size as one number, as nearly every file does."""
    return size[0] if size[0] == size[1] else list(size)
