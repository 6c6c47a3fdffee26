"""What the configs of timm and transformers, beside the weights in a folder, say of a model."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.checkpoints.family import Hints
from vitrail.checkpoints.files import read_json
from vitrail.data.preprocess import Interpolation, Preprocess
from vitrail.errors import CheckpointError, ConfigError

_PIL: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
_TIMM_CROPS = {"squash": "squash", "center": "cover", "border": "contain"}
_TIMM_POOLS = {"token": "cls", "avg": "mean", "map": "map"}
_TIMM_ARCHITECTURES: dict[str, Hints | None] = {
    r"_quickgelu": {"activation": "quick_gelu"},
    r"_clip_": {"norm_eps": 1e-5},
    r"^vit_base_patch16_gap_224$|_giantopt_": {"heads": 16},
    r"_patch32_siglip_|_large_patch16_siglip_(gap_)?512|_so400m_patch16_siglip_|_giantopt_": {
        "activation": "gelu_tanh"
    },
    r"^test_vit2?$": {"heads": 2},
    r"^test_vit3$": {"heads": 3, "pool_over": "all"},
    r"_rpn_": None,
}
"""What timm's names of architectures say and tensors do not; None: another architecture, which only looks the same."""


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


def known_from_folder(folder: Path) -> Known:
    """Read the configs in a folder, if it has any."""
    if not (folder / "config.json").is_file():
        return Known()
    config = read_json(folder / "config.json")
    try:
        if "model_type" in config:
            return _transformers(folder, config)
        if "architecture" in config:
            return _timm(config)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, ConfigError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"the configs in {folder} are not as their library writes them: {reason}") from None
    return Known()


def _activation(name: Any) -> str:
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"its config says activation {name!r}, which we do not have")
    return _ACTIVATIONS[name]


def _size(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def _names(names: Any) -> tuple[str, ...] | None:
    """Return the names of the classes, where these are names."""
    named = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    return tuple(names) if named else None


# ── transformers ──


def _transformers(folder: Path, config: dict[str, Any]) -> Known:
    hints: Hints = {}
    for theirs, ours, kind in (("num_attention_heads", "heads", int), ("layer_norm_eps", "norm_eps", float)):
        if theirs in config:
            hints[ours] = kind(config[theirs])
    if "image_size" in config:
        hints["image_size"] = _size(config["image_size"])
    if "hidden_act" in config:
        hints["activation"] = _activation(config["hidden_act"])
    if config.get("pooler_act", "tanh") != "tanh":
        hints["pooler_act"] = config["pooler_act"]
    labels = config.get("id2label")
    classes = None
    if isinstance(labels, dict) and sorted(map(int, labels)) == list(range(len(labels))):
        classes = _names([labels[key] for key in sorted(labels, key=int)])
    path = folder / "preprocessor_config.json"
    preprocess, notes = _transformers_preprocess(read_json(path)) if path.is_file() else (None, ())
    return Known(hints, preprocess, classes, notes=notes)


def _transformers_preprocess(config: dict[str, Any]) -> tuple[Preprocess | None, tuple[str, ...]]:
    notes = []
    size = config.get("size")
    if isinstance(size, int):
        size = {"height": size, "width": size}
    if not isinstance(size, dict) or not ({"height", "width"} <= size.keys() or "shortest_edge" in size):
        return None, (f"its preprocessor's size {size!r} is not one we have; pictures are resized to the model's",)
    if not config.get("do_resize", True):
        notes.append("its preprocessor does not resize pictures; ours does, to the model's size")
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
    cut = _size(crop) if cropped and crop is not None else None
    if cut is not None:
        common["half"] = "down"
    if "shortest_edge" in size:
        box = _size(size["shortest_edge"])
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


# ── timm ──


def _timm(config: dict[str, Any]) -> Known:
    pretrained = config.get("pretrained_cfg") or config
    arguments = config.get("model_args") or {}
    hints = _from_architecture(str(config["architecture"]))
    if "num_heads" in arguments:
        hints["heads"] = int(arguments["num_heads"])
    if "img_size" in arguments:
        hints["image_size"] = _size(arguments["img_size"])
    if arguments.get("act_layer") is not None:
        hints["activation"] = _activation(arguments["act_layer"])
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool is not None:
        if pool not in _TIMM_POOLS:
            raise CheckpointError(f"its config says global_pool {pool!r}, which we do not have")
        hints["pool"] = _TIMM_POOLS[pool]
    if arguments.get("pool_include_prefix"):
        hints["pool_over"] = "all"
    names = config.get("label_names") or pretrained.get("label_names")
    return Known(hints, _timm_preprocess(pretrained), _names(names))


def _from_architecture(name: str) -> Hints:
    hints: Hints = {}
    for pattern, known in _TIMM_ARCHITECTURES.items():
        if re.search(pattern, name):
            if known is None:
                raise CheckpointError(f"timm's {name} is another architecture than a plain ViT, and not ours")
            hints |= known
    return hints


def _timm_preprocess(config: dict[str, Any]) -> Preprocess | None:
    if "input_size" not in config or "mean" not in config:
        return None
    channels, height, width = config["input_size"]
    share = config.get("crop_pct") or 0.875
    box = int(height / share), int(width / share)
    resize = _TIMM_CROPS.get(config.get("crop_mode") or "center", "cover")
    # For an oblong picture timm's `center` resizes bilinearly whatever the config says.
    plain = resize != "cover" or box[0] == box[1]
    mean, std = (list(config[name]) for name in ("mean", "std"))
    if len(mean) != channels:  # timm keeps three numbers for a model of other channels
        mean, std = ([sum(n) / len(n)] * channels for n in (mean, std))
    return Preprocess(
        size=(height, width),
        resize=resize,  # type: ignore[arg-type]
        resize_to=box,
        interpolation=config.get("interpolation", "bilinear") if plain else "bilinear",
        channels=channels,
        mean=mean,  # type: ignore[arg-type]
        std=std,  # type: ignore[arg-type]
    )
