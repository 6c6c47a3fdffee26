"""The config files of timm and transformers next to the weights: reading both, and writing those of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitrail.checkpoints.family import Hints
from vitrail.checkpoints.files import read_json
from vitrail.checkpoints.formats.dinov2 import integer_ratio
from vitrail.checkpoints.timm_config import activation_name, as_size, hints_from_timm, preprocess_from_timm
from vitrail.data.preprocess import Interpolation, Preprocess
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import ViTConfig

_PIL: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_TRANSFORMERS_TYPES = ("vit", "deit", "dinov2", "dinov2_with_registers")
"""The model types whose defaults are those below; a config may omit them."""
_TRANSFORMERS_DEFAULTS: Hints = {"heads": 12, "activation": "gelu"}

CONFIG_FIELDS = frozenset({"activation", "norm_eps", "pool", "pool_over", "pre_logits", "norm_order"})
"""Fields that a config determines even if it omits them, by its library's defaults."""


@dataclass(frozen=True)
class FolderInfo:
    """What the configs in a folder say about a model."""

    hints: Hints = field(default_factory=dict)
    preprocess: Preprocess | None = None
    classes: tuple[str, ...] | None = None
    hub: str | None = None
    """The name of the model on the hub."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    stated: frozenset[str] = frozenset()
    """Fields of the model that the config determines, including its library's defaults."""


def read_folder_info(folder: Path) -> FolderInfo:
    """Read the configs in a folder, if it has any."""
    if not (folder / "config.json").is_file():
        return FolderInfo()
    config = read_json(folder / "config.json")
    try:
        if "model_type" in config:
            return _transformers(folder, config)
        if "architecture" in config:
            pretrained = config.get("pretrained_cfg") or config
            names = config.get("label_names") or pretrained.get("label_names")
            hints = hints_from_timm(config)
            return FolderInfo(
                hints, preprocess_from_timm(pretrained), _names(names), stated=frozenset({*hints, *CONFIG_FIELDS})
            )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, ConfigError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"the configs in {folder} are invalid: {reason}") from None
    return FolderInfo()


def _names(names: Any) -> tuple[str, ...] | None:
    """Return the class names, if they are a list of strings."""
    named = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    return tuple(names) if named else None


# ── reading transformers' files ──


def _transformers(folder: Path, config: dict[str, Any]) -> FolderInfo:
    plain = config["model_type"] in _TRANSFORMERS_TYPES
    hints: Hints = dict(_TRANSFORMERS_DEFAULTS) if plain else {}
    for theirs, ours, kind in (("num_attention_heads", "heads", int), ("layer_norm_eps", "norm_eps", float)):
        if theirs in config:
            hints[ours] = kind(config[theirs])
    if "image_size" in config:
        hints["image_size"] = as_size(config["image_size"])
    if "hidden_act" in config:
        hints["activation"] = activation_name(config["hidden_act"])
    if config.get("pooler_act", "tanh") != "tanh":
        hints["pooler_act"] = config["pooler_act"]
    labels = config.get("id2label")
    classes = None
    if isinstance(labels, dict) and sorted(map(int, labels)) == list(range(len(labels))):
        classes = _names([labels[key] for key in sorted(labels, key=int)])
    path = folder / "preprocessor_config.json"
    preprocess, notes = _transformers_preprocess(read_json(path)) if path.is_file() else (None, ())
    stated = frozenset({*hints, *(CONFIG_FIELDS if plain else ())})
    return FolderInfo(hints, preprocess, classes, notes=notes, stated=stated)


def _transformers_preprocess(config: dict[str, Any]) -> tuple[Preprocess | None, tuple[str, ...]]:
    notes = []
    size = config.get("size")
    if isinstance(size, int):
        size = {"height": size, "width": size}
    if not isinstance(size, dict) or not ({"height", "width"} <= size.keys() or "shortest_edge" in size):
        return None, (f"its preprocessor's size {size!r} is not supported; images are resized to the model's size",)
    if not config.get("do_resize", True):
        notes.append("its preprocessor does not resize images; vitrail resizes them to the model's size")
    if config.get("crop_pct") is not None:
        notes.append("its preprocessor has a crop_pct, which is ignored")
    resample = config.get("resample", 2)
    common: dict[str, Any] = {
        "interpolation": _PIL[resample] if resample in _PIL else str(resample).lower(),
        **_statistics(config),
    }
    cropped = bool(config.get("do_center_crop", "shortest_edge" in size and "crop_size" in config))
    crop = config.get("crop_size")
    if isinstance(crop, dict):
        crop = (crop["height"], crop["width"])
    crop_to = as_size(crop) if cropped and crop is not None else None
    if crop_to is not None:
        common["half"] = "down"
    if "shortest_edge" in size:
        box = as_size(size["shortest_edge"])
        return Preprocess(size=crop_to or box, resize="cover", resize_to=box, **common), tuple(notes)
    box = size["height"], size["width"]
    return Preprocess(size=crop_to or box, resize="squash", resize_to=box if crop_to else None, **common), tuple(notes)


def _statistics(config: dict[str, Any]) -> dict[str, Any]:
    """Return mean and std for pixels in 0…1, with the preprocessor's rescale factor applied."""
    mean, std = config.get("image_mean", [0.5, 0.5, 0.5]), config.get("image_std", [0.5, 0.5, 0.5])
    mean, std = (list(n) if isinstance(n, list) else [n] * 3 for n in (mean, std))
    if not config.get("do_normalize", True):
        mean, std = [0.0] * len(mean), [1.0] * len(std)
    factor = 255 * (config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0)
    if abs(factor - 1) > 1e-6:
        mean, std = ([number / factor for number in numbers] for numbers in (mean, std))
    return {"channels": len(mean), "mean": mean, "std": std}


# ── writing transformers' files ──

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


def _one(size: tuple[int, int]) -> int | list[int]:
    """Return a square size as one number, as nearly every file does."""
    return size[0] if size[0] == size[1] else list(size)
