"""Read the configs of timm and transformers next to the weights in a folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.checkpoints.family import Hints
from vitrail.checkpoints.files import read_json
from vitrail.checkpoints.timm_folder import activation_name, as_size, hints_from_timm, preprocess_from_timm
from vitrail.data.preprocess import Interpolation, Preprocess
from vitrail.errors import CheckpointError, ConfigError

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


# ── transformers ──


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
