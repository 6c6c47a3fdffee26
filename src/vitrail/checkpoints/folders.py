"""What the configs of timm and transformers, beside the weights in a folder, say of a model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.checkpoints.family import Hints
from vitrail.checkpoints.files import read_json
from vitrail.checkpoints.timm_folder import as_size, hints_from_timm, known_activation, preprocess_from_timm
from vitrail.data.preprocess import Interpolation, Preprocess
from vitrail.errors import CheckpointError, ConfigError

_PIL: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_TRANSFORMERS_TYPES = ("vit", "deit", "dinov2", "dinov2_with_registers")
"""The kinds of model whose defaults are those below, so that a config which leaves them out has told them."""
_TRANSFORMERS_DEFAULTS: Hints = {"heads": 12, "activation": "gelu"}


FROM_A_CONFIG = frozenset({"activation", "norm_eps", "pool", "pool_over", "pre_logits", "norm_order"})
"""What a config tells also where it leaves it out: its library's default is meant."""


@dataclass(frozen=True)
class Known:
    """What is known of a model before its weights are looked at."""

    hints: Hints = field(default_factory=dict)
    preprocess: Preprocess | None = None
    classes: tuple[str, ...] | None = None
    hub: str | None = None
    """The name on a hub it was fetched by."""
    notes: tuple[str, ...] = ()
    """What a person should know of it."""
    told: frozenset[str] = frozenset()
    """Fields of the model that the config tells, also by leaving them at its library's defaults."""


def known_from_folder(folder: Path) -> Known:
    """Read the configs in a folder, if it has any."""
    if not (folder / "config.json").is_file():
        return Known()
    config = read_json(folder / "config.json")
    try:
        if "model_type" in config:
            return _transformers(folder, config)
        if "architecture" in config:
            pretrained = config.get("pretrained_cfg") or config
            names = config.get("label_names") or pretrained.get("label_names")
            told = hints_from_timm(config)
            return Known(told, preprocess_from_timm(pretrained), _names(names), told=frozenset({*told, *FROM_A_CONFIG}))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, ConfigError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"the configs in {folder} are not as their library writes them: {reason}") from None
    return Known()


def _names(names: Any) -> tuple[str, ...] | None:
    """Return the names of the classes, where these are names."""
    named = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    return tuple(names) if named else None


# ── transformers ──


def _transformers(folder: Path, config: dict[str, Any]) -> Known:
    plain = config["model_type"] in _TRANSFORMERS_TYPES
    hints: Hints = dict(_TRANSFORMERS_DEFAULTS) if plain else {}
    for theirs, ours, kind in (("num_attention_heads", "heads", int), ("layer_norm_eps", "norm_eps", float)):
        if theirs in config:
            hints[ours] = kind(config[theirs])
    if "image_size" in config:
        hints["image_size"] = as_size(config["image_size"])
    if "hidden_act" in config:
        hints["activation"] = known_activation(config["hidden_act"])
    if config.get("pooler_act", "tanh") != "tanh":
        hints["pooler_act"] = config["pooler_act"]
    labels = config.get("id2label")
    classes = None
    if isinstance(labels, dict) and sorted(map(int, labels)) == list(range(len(labels))):
        classes = _names([labels[key] for key in sorted(labels, key=int)])
    path = folder / "preprocessor_config.json"
    preprocess, notes = _transformers_preprocess(read_json(path)) if path.is_file() else (None, ())
    told = frozenset({*hints, *(FROM_A_CONFIG if plain else ())})
    return Known(hints, preprocess, classes, notes=notes, told=told)


def _transformers_preprocess(config: dict[str, Any]) -> tuple[Preprocess | None, tuple[str, ...]]:
    notes = []
    size = config.get("size")
    if isinstance(size, int):
        size = {"height": size, "width": size}
    if not isinstance(size, dict) or not ({"height", "width"} <= size.keys() or "shortest_edge" in size):
        return None, (f"its preprocessor's size {size!r} is not one we have; images are resized to the model's",)
    if not config.get("do_resize", True):
        notes.append("its preprocessor does not resize images; ours does, to the model's size")
    if config.get("crop_pct") is not None:
        notes.append("its preprocessor has a crop_pct, which is not followed")
    resample = config.get("resample", 2)
    common: dict[str, Any] = {
        "interpolation": _PIL[resample] if resample in _PIL else str(resample).lower(),
        **_statistics(config),
    }
    cropped = bool(config.get("do_center_crop", "shortest_edge" in size and "crop_size" in config))
    crop = config.get("crop_size")
    if isinstance(crop, dict):
        crop = (crop["height"], crop["width"])
    cut = as_size(crop) if cropped and crop is not None else None
    if cut is not None:
        common["half"] = "down"
    if "shortest_edge" in size:
        box = as_size(size["shortest_edge"])
        return Preprocess(size=cut or box, resize="cover", resize_to=box, **common), tuple(notes)
    box = size["height"], size["width"]
    return Preprocess(size=cut or box, resize="squash", resize_to=box if cut else None, **common), tuple(notes)


def _statistics(config: dict[str, Any]) -> dict[str, Any]:
    """Return mean and std of pixels between 0 and 1, whatever the preprocessor multiplies pixels by."""
    mean, std = config.get("image_mean", [0.5, 0.5, 0.5]), config.get("image_std", [0.5, 0.5, 0.5])
    mean, std = (list(n) if isinstance(n, list) else [n] * 3 for n in (mean, std))
    if not config.get("do_normalize", True):
        mean, std = [0.0] * len(mean), [1.0] * len(std)
    factor = 255 * (config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0)
    if abs(factor - 1) > 1e-6:
        mean, std = ([number / factor for number in numbers] for numbers in (mean, std))
    return {"channels": len(mean), "mean": mean, "std": std}
