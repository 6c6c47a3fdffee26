"""What the configs of timm and transformers, beside the weights in a folder, say of a model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.checkpoints.family import Hints
from vitrail.checkpoints.files import read_json
from vitrail.data.preprocess import Interpolation, Preprocess

_PIL: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
_TIMM_CROPS = {"squash": "squash", "center": "cover", "border": "contain"}


@dataclass(frozen=True)
class Known:
    """What is known of a model before its weights are looked at."""

    hints: Hints = field(default_factory=dict)
    preprocess: Preprocess | None = None
    classes: tuple[str, ...] | None = None
    hub: str | None = None
    """The name on a hub it was fetched by."""


def known_from_folder(folder: Path) -> Known:
    """Read the configs in a folder, if it has any."""
    if not (folder / "config.json").is_file():
        return Known()
    config = read_json(folder / "config.json")
    if "model_type" in config:
        return _transformers(folder, config)
    if "architecture" in config:
        return _timm(config)
    return Known()


def _transformers(folder: Path, config: dict[str, Any]) -> Known:
    hints: Hints = {}
    for theirs, ours in {"num_attention_heads": "heads", "layer_norm_eps": "norm_eps"}.items():
        if theirs in config:
            hints[ours] = config[theirs]
    if isinstance(config.get("image_size"), int):
        hints["image_size"] = (config["image_size"], config["image_size"])
    elif isinstance(config.get("image_size"), list):
        hints["image_size"] = tuple(config["image_size"])
    if config.get("hidden_act") in _ACTIVATIONS:
        hints["activation"] = _ACTIVATIONS[config["hidden_act"]]
    names = config.get("id2label")
    classes = tuple(names[key] for key in sorted(names, key=int)) if isinstance(names, dict) and names else None
    path = folder / "preprocessor_config.json"
    return Known(hints, _transformers_preprocess(read_json(path)) if path.is_file() else None, classes)


def _transformers_preprocess(config: dict[str, Any]) -> Preprocess | None:
    size = config.get("size")
    if isinstance(size, int):
        size = {"height": size, "width": size}
    if not isinstance(size, dict):
        return None
    common: dict[str, Any] = {
        "interpolation": _PIL.get(config.get("resample", 2), "bilinear"),
        "mean": config.get("image_mean", [0.5, 0.5, 0.5]),
        "std": config.get("image_std", [0.5, 0.5, 0.5]),
    }
    common["channels"] = len(common["mean"])
    if "shortest_edge" in size:
        crop = config.get("crop_size") or size["shortest_edge"]
        crop = (crop["height"], crop["width"]) if isinstance(crop, dict) else (crop, crop)
        return Preprocess(size=crop, resize="cover", resize_to=(size["shortest_edge"], size["shortest_edge"]), **common)
    return Preprocess(size=(size["height"], size["width"]), resize="squash", **common)


def _timm(config: dict[str, Any]) -> Known:
    pretrained = config.get("pretrained_cfg") or config
    arguments = config.get("model_args") or {}
    hints: Hints = {}
    if "num_heads" in arguments:
        hints["heads"] = arguments["num_heads"]
    if "img_size" in arguments:
        size = arguments["img_size"]
        hints["image_size"] = tuple(size) if isinstance(size, list) else (size, size)
    if arguments.get("act_layer") in _ACTIVATIONS:
        hints["activation"] = _ACTIVATIONS[arguments["act_layer"]]
    names = config.get("label_names") or pretrained.get("label_names")
    return Known(hints, _timm_preprocess(pretrained), tuple(names) if isinstance(names, list) else None)


def _timm_preprocess(config: dict[str, Any]) -> Preprocess | None:
    if "input_size" not in config or "mean" not in config:
        return None
    channels, height, width = config["input_size"]
    share = config.get("crop_pct") or 0.875
    box = int(height / share), int(width / share)
    resize = _TIMM_CROPS.get(config.get("crop_mode") or "center", "cover")
    # For an oblong picture timm's `center` resizes bilinearly whatever the config says.
    plain = resize != "cover" or box[0] == box[1]
    return Preprocess(
        size=(height, width),
        resize=resize,  # type: ignore[arg-type]
        resize_to=box,
        interpolation=config.get("interpolation", "bilinear") if plain else "bilinear",
        channels=channels,
        mean=config["mean"],
        std=config["std"],
    )
