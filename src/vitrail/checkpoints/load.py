"""Load any ViT checkpoint: detect its family, infer its config, load its weights and preprocessing."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Never, cast

from torch import nn

from vitrail.checkpoints.adapt import ChannelMethod, adapt
from vitrail.checkpoints.assumptions import (
    IMAGES,
    Assumption,
    assumed_of_images,
    assumed_of_model,
    cannot_be_guessed,
    checked_overrides,
    of_images,
    of_model,
    spread,
)
from vitrail.checkpoints.bundle import CONFIG, WEIGHTS, Bundle, imagenet_names, is_bundle, read_bundle
from vitrail.checkpoints.config_files import FolderInfo
from vitrail.checkpoints.custom import read_key_table
from vitrail.checkpoints.family import Family, Hints, Reading
from vitrail.checkpoints.files import SUFFIXES, read_checkpoint, read_json
from vitrail.checkpoints.formats import dinov2, google, lucidrains, timm, torchvision, transformers
from vitrail.checkpoints.infer import Shapes, infer_config
from vitrail.checkpoints.keys import Weights
from vitrail.checkpoints.locate import Source, fetch, find, parse
from vitrail.checkpoints.tensors import Dtype, check_dtype, dtype_names, in_dtype, loaded_model
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError, ConfigError, unknown_argument
from vitrail.io import check_is_regular
from vitrail.models.config import FIELD_ALIASES, ViTConfig, value_here
from vitrail.models.position import Method

IMAGENET_CLASSES = 1000
FAMILIES: tuple[Family, ...] = (
    google.FAMILY,
    timm.FAMILY,
    timm.ROPE,
    torchvision.FAMILY,
    transformers.FAMILY,
    lucidrains.FAMILY,
    dinov2.FAMILY,
    dinov2.IN_TRANSFORMERS,
)


class _Options(NamedTuple):
    """The caller's options."""

    overrides: Hints
    family: Family | None
    fresh: Sequence[str]
    dtype: Dtype
    target_size: tuple[int, int] | None


def load(
    source: str | Path,
    *,
    heads: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    fresh: Sequence[str] = (),
    dtype: Dtype = "float32",
    classes: int | tuple[str, ...] | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    position_method: Method = "timm",
    channel_method: ChannelMethod = "repeat",
    **unknown: Never,
) -> Bundle:
    """Open a checkpoint: a bundle, a folder of transformers or timm, a weight file, or a model on a hub.

    On a hub it is called "hf:org/name", "hf:org/name@revision" or "timm:name.tag".

    The family is detected from the tensors, not from the file name; without a config, the architecture is inferred from
    their shapes. Fields that neither determines are assumed if all published models agree on them; each assumption is
    in the bundle's `assumptions`, and logged as a warning (logger "vitrail"), by default to stderr. If a wrong guess
    would go unnoticed, loading fails. `overrides` sets such fields by name: those of `ViTConfig` ({"pool": "mean"}) and
    of `Preprocess` ({"preprocess.mean": 0.5}); `heads` is a shorthand for the most common one. `keys` is a key table
    for a custom ViT (`vitrail.checkpoints.custom`). Tensors whose (our) names match a pattern in `fresh`, such as
    "head.*", may be missing and are initialised; anything else that is missing is an error.

    The model is loaded in float32 by default; `dtype` sets another dtype, "keep" that of the file.

    The other arguments adapt the loaded model: a new head, another size, other channels. The bundle's `coverage`
    summarises what was loaded and changed, and is logged.
    """
    for argument in unknown:
        raise _unknown(argument, unknown[argument])
    bundle = open_checkpoint(
        source, heads=heads, overrides=overrides, keys=keys, fresh=fresh, dtype=dtype, target_size=image_size
    )
    adapt(
        bundle,
        classes=classes,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        position_method=position_method,
        channel_method=channel_method,
    )
    bundle.announce()
    logging.getLogger("vitrail").info("%s: %s", source, bundle.coverage)
    return bundle


def _unknown(argument: str, value: object) -> ConfigError:
    """Map an argument to ours, or to `overrides`."""
    ours = FIELD_ALIASES.get(argument, argument)
    hint = ""
    if ours in ("classes", "image_size", "patch_size", "channels", "heads"):
        hint = f"vitrail calls it {ours}: {ours}={value!r}"
    elif ours in ViTConfig.model_fields:
        value_text = value_here(argument, value)
        hint = f"set fields that the file does not record with overrides={{{ours!r}: {value_text}}}"
    elif argument == "pretrained":
        hint = "load always loads pretrained weights"
    return unknown_argument(load, argument, hint)


def ready_bundle(
    source: str | Path | Bundle, *, overrides: Mapping[str, Any] | None = None, keys: str | Path | None = None
) -> Bundle:
    """Return a bundle in float32, opened from a path or converted from a given bundle.

    `overrides` and `keys` are those of `load`. The caller logs the assumptions (`Bundle.announce`) after all checks.
    """
    if not isinstance(source, Bundle):
        return open_checkpoint(source, overrides=overrides, keys=keys)
    if overrides or keys is not None:
        raise CheckpointError("overrides and keys apply to weight files only; a bundle records every field")
    return source.in_dtype("float32")


def open_checkpoint(
    source: str | Path,
    *,
    heads: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    fresh: Sequence[str] = (),
    dtype: Dtype = "float32",
    target_size: int | tuple[int, int] | None = None,
) -> Bundle:
    """Open a checkpoint as `load` does, but leave logging its assumptions to the caller."""
    if not isinstance(source, (str, os.PathLike)):
        raise CheckpointError(
            f"load opens a folder, a weight file or a name on a hub, found a {type(source).__name__}; wrap your own "
            f"model with vitrail.Bundle(model, preprocess, classes)"
        )
    check_dtype(dtype)
    fields = checked_overrides({**(overrides or {}), **({"heads": heads} if heads is not None else {})})
    if not str(source):
        raise CheckpointError("the source is empty; pass a folder, a weight file, or the name of a model on a hub")
    name = parse(str(source))
    path = Path(source) if name is None else fetch(name)
    try:
        if not path.exists():
            raise CheckpointError(f"{source} does not exist; pass a folder or a weight file ({', '.join(SUFFIXES)})")
        if not path.is_dir():
            check_is_regular(path)
        folder = path if path.is_dir() else path.parent
        ours = (folder / CONFIG).exists() and is_bundle(read_json(folder / CONFIG))
        if ours and path in (folder, folder / WEIGHTS):
            return _open_bundle(folder, fields, keys, fresh, dtype)
        file = find(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if name is not None:
        file = file._replace(info=replace(file.info, hub=str(source)))
    size = (target_size, target_size) if isinstance(target_size, int) else target_size
    options = _Options(fields, None if keys is None else read_key_table(keys), fresh, dtype, size)
    bundle = _open(file, options)
    bundle.origin = path if name is None else None
    return bundle


def _open_bundle(folder: Path, overrides: Hints, keys: str | Path | None, fresh: Sequence[str], dtype: Dtype) -> Bundle:
    bundle = read_bundle(folder, fresh=fresh, dtype=dtype)
    if keys is not None:
        raise CheckpointError(f"{folder} is a bundle, which needs no key table; open it without --keys")
    images = spread(of_images(overrides), bundle.preprocess.channels)
    for config, before, fields in ((bundle.model.config, "", of_model(overrides)), (bundle.preprocess, IMAGES, images)):
        for field, value in fields.items():
            own = getattr(config, field)
            if value != own:
                raise CheckpointError(
                    f"{folder} is a bundle, which records {before}{field}={own!r}; open it without {before}{field}="
                )
    bundle.origin = folder
    return bundle


def _open(source: Source, options: _Options) -> Bundle:
    file, info = source.files[0], source.info
    stored = read_checkpoint(source.files)
    total, stored_dtype = len(stored.weights), dtype_names(stored.weights)
    hints: Hints = {**info.hints, **of_model(options.overrides)}
    if options.target_size is not None:
        hints["target_size"] = options.target_size
    reading, family = _read(stored.weights, hints, options.family, file)
    shapes = {name: tuple(tensor.shape) for name, tensor in reading.weights.items()}
    config = _config_of(reading, family, hints, shapes, file)
    stated = {**reading.stated, **dict.fromkeys(info.stated), **hints}
    if missing := cannot_be_guessed(config, shapes, stated, family.name):
        raise CheckpointError(f"{file}: {'; '.join(missing.values())}")
    model, initialised = loaded_model(config, in_dtype(reading.weights, options.dtype), fresh=options.fresh)
    images = of_images(options.overrides)
    preprocess, fitted = _preprocess(info, family, config, images)
    classes, names = _names(info, config)
    assumptions = [
        *assumed_of_model(config, shapes, stated, family.assumes),
        *([] if info.preprocess else assumed_of_images(preprocess, {*images, *family.images_stated}, family.images)),
        *names,
    ]
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    zero = "the head is all zero, as in Google's ImageNet-21k checkpoints: set new classes"
    notes = [
        *stored.notes,
        *([] if stored_dtype in ("float32", dtype_names(model.state_dict())) else [f"the file is in {stored_dtype}"]),
        *info.notes,
        *fitted,
        *([f"{len(reading.dropped)} tensors were dropped: {', '.join(reading.dropped)}"] if reading.dropped else []),
        *([zero] if config.classes and not cast("nn.Linear", model.head).weight.any() else []),
    ]
    provenance: dict[str, Any] = {
        "source": info.hub or file.name,
        "family": family.name,
        "coverage": f"{total - len(reading.dropped)} of {total} tensors, {millions:.2f} M parameters",
        **({"fresh": initialised} if initialised else {}),
        **({"assumed": list(map(str, assumptions))} if assumptions else {}),
        **({"notes": notes} if notes else {}),
    }
    return Bundle(model, preprocess, classes, provenance, assumptions=tuple(assumptions))


def _read(weights: Weights, hints: Hints, family: Family | None, file: Path) -> tuple[Reading, Family]:
    """Convert the weights to our names with the family's key table."""
    total = len(weights)
    if family is None:
        family = detect({name: tuple(tensor.shape) for name, tensor in weights.items()}, file)
    try:
        reading = family.read(weights, hints)
    except (KeyError, IndexError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} looks like {family.name}, but its tensors have other shapes ({error})") from None
    if unknown := reading.unknown:
        raise CheckpointError(
            f"{file} looks like {family.name}, but {len(unknown)} of its {total} tensors do not belong to it: "
            f"{', '.join(unknown[:8])}{', …' if len(unknown) > 8 else ''}"
        )
    return reading, family


def _config_of(reading: Reading, family: Family, hints: Hints, shapes: Shapes, file: Path) -> ViTConfig:
    heads = reading.hints.get("heads")
    if heads is not None and hints.get("heads", heads) != heads:
        raise CheckpointError(f"{file} has {heads} heads, by its shapes; open it without heads={hints['heads']}")
    if "pooler_act" in hints and "pre_logits.fc.weight" in reading.weights:
        raise CheckpointError(f"its config has pooler_act {hints['pooler_act']!r}; only tanh is supported")
    merged = {**reading.hints, **hints}
    return infer_config(shapes, {**family.follows(merged, shapes), **merged})


def inferred_config(file: Path) -> tuple[ViTConfig, set[str]]:
    """Return the config that is inferred from a weight file without any overrides, and the fields that would have to be
    set to open it."""
    reading, family = _read(read_checkpoint([file]).weights, {}, None, file)
    shapes = {name: tuple(tensor.shape) for name, tensor in reading.weights.items()}
    config = _config_of(reading, family, {}, shapes, file)
    return config, set(cannot_be_guessed(config, shapes, reading.stated, family.name))


def _names(info: FolderInfo, config: ViTConfig) -> tuple[tuple[str, ...] | None, list[Assumption]]:
    """Return the class names, and any assumption about them."""
    if info.classes is not None and len(info.classes) == config.classes:
        return info.classes, []
    if config.classes == IMAGENET_CLASSES:
        return imagenet_names(), [Assumption("classes", "ImageNet's names", "because the head has 1,000 outputs")]
    return None, []


def _preprocess(info: FolderInfo, family: Family, config: ViTConfig, overrides: Hints) -> tuple[Preprocess, list[str]]:
    """Return the preprocessing, fitted to the model, and a note if that differs from its config."""
    default = family.preprocess if family.preprocess_at is None else family.preprocess_at(config.image_size)
    preprocess = info.preprocess or default
    fitted = preprocess if preprocess.size == config.image_size else preprocess.resized(config.image_size)
    if config.channels != fitted.channels:
        mean, std = ((sum(n) / len(n),) * config.channels for n in (fitted.mean, fitted.std))
        fitted = fitted.replace(channels=config.channels, mean=mean, std=std)
    noted = info.preprocess is not None and fitted != preprocess
    fitted = fitted.replace(**spread(overrides, config.channels))
    if fitted.size != config.image_size or fitted.channels != config.channels:
        raise ConfigError("preprocess.size and preprocess.channels follow the model; change image_size and channels")
    height, width = preprocess.size
    note = f"its preprocessing was for {height}×{width}×{preprocess.channels}, and was adapted to the model"
    return fitted, [note] if noted else []


def detect(shapes: Shapes, file: Path) -> Family:
    """Return the family that a file belongs to."""
    families = [family for family in FAMILIES if family.recognise(shapes)]
    if len(families) == 1:
        return families[0]
    if families:
        raise CheckpointError(
            f"{file} has tensors of several families ({', '.join(family.name for family in families)}); "
            f"keep one model in a file"
        )
    some = ", ".join(list(shapes)[:3])
    raise CheckpointError(
        f"{file} is not a supported Vision Transformer: {len(shapes)} tensors such as {some}. Supported: "
        f"{', '.join(family.name for family in FAMILIES)}"
    )
