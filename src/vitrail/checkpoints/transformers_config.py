"""The configs that transformers reads beside the weights."""

from collections.abc import Sequence
from typing import Any

from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu", "relu": "relu"}
_RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


def transformers_config(config: ViTConfig, classes: Sequence[str] | None) -> dict[str, Any]:
    """Return config.json for a ViT, or a DeiT where there is a distillation token."""
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


def transformers_preprocessor(preprocess: Preprocess) -> dict[str, Any]:
    """Return preprocessor_config.json; a processor that crops is another class there."""
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
    box = preprocess.resize_to or preprocess.size
    if preprocess.resize == "squash" and box == preprocess.size:
        return {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}, **common}
    if preprocess.resize == "cover" and box[0] == box[1]:
        return {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": box[0]},
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
            **common,
        }
    raise CheckpointError(
        f"transformers has no image processor that resizes by {preprocess.resize!r} to {box[0]}×{box[1]} and then cuts "
        f"{height}×{width} out"
    )


def _one(size: tuple[int, int]) -> int | list[int]:
    """Say a square by one number, as nearly every file does."""
    return size[0] if size[0] == size[1] else list(size)
