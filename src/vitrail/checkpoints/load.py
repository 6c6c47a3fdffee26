"""Opening any ViT checkpoint: what it is, how it is built, its weights, and how its images are prepared."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Never, cast

from torch import nn

from vitrail.checkpoints.adapt import ChannelMethod, adapt
from vitrail.checkpoints.assumptions import (
    Assumption,
    assumed_of_images,
    assumed_of_model,
    cannot_be_guessed,
)
from vitrail.checkpoints.bundle import CONFIG, WEIGHTS, Bundle, is_bundle, read_bundle
from vitrail.checkpoints.custom import read_key_table
from vitrail.checkpoints.dtypes import Dtype, check_dtype, in_dtype, named
from vitrail.checkpoints.family import Family, Hints, Reading
from vitrail.checkpoints.files import SUFFIXES, read_checkpoint, read_json
from vitrail.checkpoints.folders import Known
from vitrail.checkpoints.formats import dinov2, google, lucidrains, timm, torchvision, transformers
from vitrail.checkpoints.hub import fetch, parse
from vitrail.checkpoints.imagenet import imagenet_names
from vitrail.checkpoints.infer import Shapes, infer_config
from vitrail.checkpoints.keys import Weights
from vitrail.checkpoints.locate import Source, find
from vitrail.checkpoints.overrides import IMAGES, checked_overrides, of_images, of_model, spread
from vitrail.checkpoints.strict import loaded_model
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError, ConfigError, unknown_argument
from vitrail.io import check_is_regular
from vitrail.models.config import CALLED_ELSEWHERE, ViTConfig, value_here
from vitrail.models.resample import Method

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


class _How(NamedTuple):
    """What the caller says of a checkpoint."""

    said: Hints
    family: Family | None
    fresh: Sequence[str]
    dtype: Dtype
    wanted_size: tuple[int, int] | None


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

    The family is seen from the tensors, not from the file's name, and the architecture from their shapes where no
    config comes along. What neither tells is assumed where published models agree on it; each assumption is in the
    bundle's `assumptions`, and logged as a warning (logger "vitrail"), which without a handler goes to stderr. Where a
    wrong guess would go unnoticed, the file is refused. `overrides` says such fields by name: those of `ViTConfig`
    ({"pool": "mean"}), and those of `Preprocess` ({"preprocess.mean": 0.5}); `heads` is short for the commonest.
    `keys` names a key table for a ViT of no known family (`vitrail.checkpoints.custom`). Names of ours that match a
    pattern of `fresh`, such as "head.*", may be missing and start fresh; whatever else is missing is an error.

    The model is opened in float32 whatever numbers the file has; `dtype` asks for others, "keep" for the file's own.

    The other arguments adapt the model after it was loaded: a new head, another size, other channels. What was found
    and done is in the bundle's `coverage`, and logged.
    """
    for argument in unknown:
        raise _unknown(argument, unknown[argument])
    bundle = open_checkpoint(
        source, heads=heads, overrides=overrides, keys=keys, fresh=fresh, dtype=dtype, wanted_size=image_size
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
    """Say what an argument is called here, or where a field of the model goes."""
    ours = CALLED_ELSEWHERE.get(argument, argument)
    hint = ""
    if ours in ("classes", "image_size", "patch_size", "channels", "heads"):
        hint = f"vitrail calls it {ours}: {ours}={value!r}"
    elif ours in ViTConfig.model_fields:
        said = value_here(argument, value)
        hint = f"what the file does not tell of its model goes into overrides: overrides={{{ours!r}: {said}}}"
    elif argument == "pretrained":
        hint = "what load opens is pretrained"
    return unknown_argument(load, argument, hint)


def ready_bundle(source: str | Path | Bundle) -> Bundle:
    """Return a bundle to compute with, in float32: one that is given, in whatever numbers, or one that is opened.

    The caller announces it (`Bundle.announce`) when nothing is left to be refused.
    """
    return source.in_dtype("float32") if isinstance(source, Bundle) else open_checkpoint(source)


def open_checkpoint(
    source: str | Path,
    *,
    heads: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    fresh: Sequence[str] = (),
    dtype: Dtype = "float32",
    wanted_size: int | tuple[int, int] | None = None,
) -> Bundle:
    """Open a checkpoint as `load` does, and leave it to the caller to say what was assumed."""
    if not isinstance(source, (str, os.PathLike)):
        raise CheckpointError(
            f"load opens a folder, a weight file or a name on a hub, but was given a {type(source).__name__}; a model "
            f"of your own becomes a bundle by vitrail.Bundle(model, preprocess, classes)"
        )
    check_dtype(dtype)
    said = checked_overrides({**(overrides or {}), **({"heads": heads} if heads is not None else {})})
    if not str(source):
        raise CheckpointError("the source is empty; give a folder, a weight file, or the name of a model on a hub")
    name = parse(str(source))
    path = Path(source) if name is None else fetch(name)
    try:
        if not path.exists():
            raise CheckpointError(f"{source} does not exist; give a folder or a weight file ({', '.join(SUFFIXES)})")
        if not path.is_dir():
            check_is_regular(path)
        folder = path if path.is_dir() else path.parent
        ours = (folder / CONFIG).exists() and is_bundle(read_json(folder / CONFIG))
        if ours and path in (folder, folder / WEIGHTS):
            return _open_bundle(folder, said, keys, fresh, dtype)
        found = find(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if name is not None:
        found = found._replace(known=replace(found.known, hub=str(source)))
    wanted = (wanted_size, wanted_size) if isinstance(wanted_size, int) else wanted_size
    how = _How(said, None if keys is None else read_key_table(keys), fresh, dtype, wanted)
    bundle = _open(found, how)
    bundle.origin = path if name is None else None
    return bundle


def _open_bundle(folder: Path, said: Hints, keys: str | Path | None, fresh: Sequence[str], dtype: Dtype) -> Bundle:
    bundle = read_bundle(folder, fresh=fresh, dtype=dtype)
    if keys is not None:
        raise CheckpointError(f"{folder} is a bundle, whose names are known; open it without a key table")
    images = spread(of_images(said), bundle.preprocess.channels)
    for config, before, fields in ((bundle.model.config, "", of_model(said)), (bundle.preprocess, IMAGES, images)):
        for field, value in fields.items():
            own = getattr(config, field)
            if value != own:
                raise CheckpointError(
                    f"{folder} is a bundle, which says {before}{field}={own!r} itself; open it without {before}{field}="
                )
    bundle.origin = folder
    return bundle


def _open(source: Source, how: _How) -> Bundle:
    file, known = source.files[0], source.known
    stored = read_checkpoint(source.files)
    total, kept_as = len(stored.weights), named(stored.weights)
    said: Hints = {**known.hints, **of_model(how.said)}
    if how.wanted_size is not None:
        said["wanted_size"] = how.wanted_size
    reading, family = _read(stored.weights, said, how.family, file)
    shapes = {name: tuple(tensor.shape) for name, tensor in reading.weights.items()}
    config = _config_of(reading, family, said, shapes, file)
    told = {**reading.told, **dict.fromkeys(known.told), **said}
    if missing := cannot_be_guessed(config, shapes, told, family.name):
        raise CheckpointError(f"{file}: {'; '.join(missing.values())}")
    model, started_fresh = loaded_model(config, in_dtype(reading.weights, how.dtype), fresh=how.fresh)
    images = of_images(how.said)
    preprocess, fitted = _preprocess(known, family, config, images)
    classes, names = _names(known, config)
    assumptions = [
        *assumed_of_model(config, shapes, told, family.assumes),
        *([] if known.preprocess else assumed_of_images(preprocess, {*images, *family.images_told}, family.images)),
        *names,
    ]
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    zero = "the head is all zero, as in Google's ImageNet-21k originals: give it new classes"
    notes = [
        *stored.notes,
        *([] if kept_as in ("float32", named(model.state_dict())) else [f"the file has {kept_as} numbers"]),
        *known.notes,
        *fitted,
        *([f"{len(reading.dropped)} tensors were left out: {', '.join(reading.dropped)}"] if reading.dropped else []),
        *([zero] if config.classes and not cast("nn.Linear", model.head).weight.any() else []),
    ]
    provenance: dict[str, Any] = {
        "source": known.hub or file.name,
        "family": family.name,
        "coverage": f"{total - len(reading.dropped)} of {total} tensors, {millions:.2f} M parameters",
        **({"fresh": started_fresh} if started_fresh else {}),
        **({"assumed": list(map(str, assumptions))} if assumptions else {}),
        **({"notes": notes} if notes else {}),
    }
    return Bundle(model, preprocess, classes, provenance, assumptions=tuple(assumptions))


def _read(weights: Weights, hints: Hints, family: Family | None, file: Path) -> tuple[Reading, Family]:
    """Bring the weights to our names, by the family's table."""
    total = len(weights)
    if family is None:
        family = detect({name: tuple(tensor.shape) for name, tensor in weights.items()}, file)
    try:
        reading = family.read(weights, hints)
    except (KeyError, IndexError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} looks like {family.name}, but its tensors are not shaped as there ({error})"
        ) from None
    if unknown := reading.unknown:
        raise CheckpointError(
            f"{file} looks like {family.name}, but {len(unknown)} of its {total} tensors are not known there: "
            f"{', '.join(unknown[:8])}{', …' if len(unknown) > 8 else ''}"
        )
    return reading, family


def _config_of(reading: Reading, family: Family, said: Hints, shapes: Shapes, file: Path) -> ViTConfig:
    found = reading.hints.get("heads")
    if found is not None and said.get("heads", found) != found:
        raise CheckpointError(f"{file} has {found} heads, as its shapes tell; open it without heads={said['heads']}")
    if "pooler_act" in said and "pre_logits.fc.weight" in reading.weights:
        raise CheckpointError(f"its config says pooler_act {said['pooler_act']!r}, and ours is tanh")
    merged = {**reading.hints, **said}
    return infer_config(shapes, {**family.follows(merged, shapes), **merged})


def inferred_config(file: Path) -> tuple[ViTConfig, set[str]]:
    """Return the model that a weight file would be taken for by somebody who knows nothing else of it, and the fields
    without which it would be refused."""
    reading, family = _read(read_checkpoint([file]).weights, {}, None, file)
    shapes = {name: tuple(tensor.shape) for name, tensor in reading.weights.items()}
    config = _config_of(reading, family, {}, shapes, file)
    return config, set(cannot_be_guessed(config, shapes, reading.told, family.name))


def _names(known: Known, config: ViTConfig) -> tuple[tuple[str, ...] | None, list[Assumption]]:
    """Return the names of the classes, and what was assumed of them."""
    if known.classes is not None and len(known.classes) == config.classes:
        return known.classes, []
    if config.classes == IMAGENET_CLASSES:
        return imagenet_names(), [Assumption("classes", "ImageNet's names", "because the head has 1,000 outputs")]
    return None, []


def _preprocess(known: Known, family: Family, config: ViTConfig, said: Hints) -> tuple[Preprocess, list[str]]:
    """Return what is done to images, fitted to the model, and a note where the config beside it said otherwise."""
    usual = family.preprocess if family.preprocess_at is None else family.preprocess_at(config.image_size)
    found = known.preprocess or usual
    fitted = found if found.size == config.image_size else found.resized(config.image_size)
    if config.channels != fitted.channels:
        mean, std = ((sum(n) / len(n),) * config.channels for n in (fitted.mean, fitted.std))
        fitted = fitted.replace(channels=config.channels, mean=mean, std=std)
    noted = known.preprocess is not None and fitted != found
    fitted = fitted.replace(**spread(said, config.channels))
    if fitted.size != config.image_size or fitted.channels != config.channels:
        raise ConfigError("preprocess.size and preprocess.channels are the model's; change those of the model")
    height, width = found.size
    note = f"its preprocessing was for {height}×{width}×{found.channels}, and was fitted to the model"
    return fitted, [note] if noted else []


def detect(shapes: Shapes, file: Path) -> Family:
    """Return the family a file is of."""
    found = [family for family in FAMILIES if family.recognise(shapes)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{file} has tensors of several families ({', '.join(family.name for family in found)}); "
            f"keep one model in a file"
        )
    some = ", ".join(list(shapes)[:3])
    raise CheckpointError(
        f"{file} is no Vision Transformer we know: {len(shapes)} tensors such as {some}. We know "
        f"{', '.join(family.name for family in FAMILIES)}"
    )
