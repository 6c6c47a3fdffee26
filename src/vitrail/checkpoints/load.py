"""Opening any ViT checkpoint: what it is, how it is built, its weights, and how its pictures are prepared."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import nn

from vitrail.checkpoints.adapt import ChannelMethod, adapt
from vitrail.checkpoints.bundle import CONFIG, Bundle, is_bundle, read_bundle
from vitrail.checkpoints.custom import read_key_table
from vitrail.checkpoints.family import Family, Hints
from vitrail.checkpoints.files import SUFFIXES, read_json, read_weights
from vitrail.checkpoints.folders import Known, known_from_folder
from vitrail.checkpoints.formats import dinov2, google, lucidrains, timm, torchvision, transformers
from vitrail.checkpoints.hub import fetch, parse
from vitrail.checkpoints.imagenet import imagenet_names
from vitrail.checkpoints.infer import Shapes, infer_config
from vitrail.checkpoints.strict import loaded_model
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig
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


class _Source(NamedTuple):
    """A weight file, and what stands beside it."""

    file: Path
    known: Known


def load(
    source: str | Path,
    *,
    heads: int | None = None,
    keys: str | Path | None = None,
    classes: int | tuple[str, ...] | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    position_method: Method = "timm",
    channel_method: ChannelMethod = "repeat",
    fresh: Sequence[str] = (),
) -> Bundle:
    """Open a checkpoint: a bundle, a folder of transformers or timm, a weight file, or a model on a hub.

    On a hub it is called "hf:org/name", "hf:org/name@revision" or "timm:name.tag".

    The family is seen from the tensors, not from the file's name, and the architecture from their shapes where no
    config comes along. `heads` says the number of attention heads, which shapes do not tell; by default heads are 64
    wide. `keys` names a key table for a ViT of no known family (`vitrail.checkpoints.custom`). Names of ours that match
    a pattern of `fresh`, such as "head.*", may be missing and start fresh; whatever else is missing is an error. The
    other arguments adapt the model after it was loaded: a new head, another size, other channels. What was found and
    done is in the bundle's `coverage`, and logged.
    """
    bundle = adapt(
        _load(source, heads, keys, fresh, image_size),
        classes=classes,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        position_method=position_method,
        channel_method=channel_method,
    )
    logging.getLogger("vitrail").info("%s: %s", source, bundle.coverage)
    return bundle


def _load(
    source: str | Path,
    heads: int | None,
    keys: str | Path | None,
    fresh: Sequence[str],
    image_size: int | tuple[int, int] | None,
) -> Bundle:
    name = parse(str(source))
    path = Path(source) if name is None else fetch(name)
    try:
        if not path.exists():
            raise CheckpointError(f"{source} does not exist; give a folder or a weight file ({', '.join(SUFFIXES)})")
        if path.is_dir() and (path / CONFIG).is_file() and is_bundle(read_json(path / CONFIG)):
            return read_bundle(path, fresh=fresh)
        found = _find(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if name is not None:
        found = found._replace(known=replace(found.known, hub=str(source)))
    hints: Hints = {**found.known.hints, **({"heads": heads} if heads is not None else {})}
    if image_size is not None:
        hints["wanted_size"] = image_size
    return _open(found, hints, None if keys is None else read_key_table(keys), fresh)


def _open(source: _Source, hints: Hints, family: Family | None, fresh: Sequence[str]) -> Bundle:
    weights = read_weights(source.file)
    total = len(weights)
    if family is None:
        family = detect({name: tuple(tensor.shape) for name, tensor in weights.items()}, source.file)
    ours, unknown, dropped, habits = family.read(weights, hints)
    if unknown:
        raise CheckpointError(
            f"{source.file} looks like {family.name}, but {len(unknown)} of its {total} tensors are not known there: "
            f"{', '.join(unknown[:8])}{', …' if len(unknown) > 8 else ''}"
        )
    config = infer_config({name: tuple(tensor.shape) for name, tensor in ours.items()}, {**habits, **hints})
    model, started_fresh = loaded_model(config, ours, fresh=fresh)
    known = source.known
    preprocess = known.preprocess or _default_preprocess(family, config)
    classes, assumption = _names(known, config)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    provenance: dict[str, Any] = {
        "source": known.hub or source.file.name,
        "family": family.name,
        "coverage": f"{total - len(dropped)} of {total} tensors, {millions:.2f} M parameters",
        **({"left out": dropped} if dropped else {}),
        **({"fresh": started_fresh} if started_fresh else {}),
        **assumption,
    }
    if config.classes and not cast("nn.Linear", model.head).weight.any():
        provenance["warning"] = "the head is all zero, as in Google's ImageNet-21k originals: give it new classes"
    return Bundle(model.eval(), preprocess, classes, provenance)


def _names(known: Known, config: ViTConfig) -> tuple[tuple[str, ...] | None, dict[str, str]]:
    """Return the names of the classes, and what was assumed of them."""
    if known.classes is not None and len(known.classes) == config.classes:
        return known.classes, {}
    if config.classes == IMAGENET_CLASSES:
        return imagenet_names(), {"class names": "assumed to be ImageNet's, because the head has 1,000 outputs"}
    return None, {}


def _default_preprocess(family: Family, config: ViTConfig) -> Preprocess:
    """Return what the family does to pictures, at the model's size and for its channels."""
    default = family.preprocess.resized(config.image_size)
    if config.channels == default.channels:
        return default
    mean, std = (sum(n) / len(n) for n in (default.mean, default.std))
    return default.replace(channels=config.channels, mean=(mean,) * config.channels, std=(std,) * config.channels)


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


def _find(path: Path) -> _Source:
    """Find the weights in a folder, and what a config beside them says."""
    if path.is_file():
        return _Source(path, Known())
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise CheckpointError(f"{path} holds no weight file ({', '.join(SUFFIXES)})")
    # The same weights often lie there twice, in an older format too.
    best = [file for file in files if file.suffix == ".safetensors"] or files
    if len(best) > 1:
        raise CheckpointError(
            f"{path} holds several weight files ({', '.join(f.name for f in best)}); name one of them"
        )
    return _Source(best[0], known_from_folder(path))
