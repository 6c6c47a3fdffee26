"""Opening any ViT checkpoint: what it is, how it is built, its weights, and how its pictures are prepared."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import nn

from vitrail.checkpoints.adapt import ChannelMethod, adapt
from vitrail.checkpoints.bundle import CONFIG, WEIGHTS, Bundle, is_bundle, read_bundle
from vitrail.checkpoints.custom import read_key_table
from vitrail.checkpoints.family import Family, Hints, Reading
from vitrail.checkpoints.files import SUFFIXES, read_checkpoint, read_json
from vitrail.checkpoints.folders import Known, known_from_folder
from vitrail.checkpoints.formats import dinov2, google, lucidrains, timm, torchvision, transformers
from vitrail.checkpoints.hub import fetch, parse
from vitrail.checkpoints.imagenet import imagenet_names
from vitrail.checkpoints.infer import Shapes, heads_are_certain, infer_config
from vitrail.checkpoints.keys import Weights
from vitrail.checkpoints.strict import loaded_model
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError, ConfigError, suggest
from vitrail.io import check_is_regular
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


_PREFERRED = ("model.safetensors", "pytorch_model.bin")
"""Where transformers and timm keep the weights; other files beside them belong to training."""


class _Source(NamedTuple):
    """A checkpoint's weight files, and what stands beside them."""

    files: tuple[Path, ...]
    known: Known


def load(
    source: str | Path,
    *,
    heads: int | None = None,
    known: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    fresh: Sequence[str] = (),
    classes: int | tuple[str, ...] | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    position_method: Method = "timm",
    channel_method: ChannelMethod = "repeat",
) -> Bundle:
    """Open a checkpoint: a bundle, a folder of transformers or timm, a weight file, or a model on a hub.

    On a hub it is called "hf:org/name", "hf:org/name@revision" or "timm:name.tag".

    The family is seen from the tensors, not from the file's name, and the architecture from their shapes where no
    config comes along. What shapes do not tell is said by `known`, fields of `ViTConfig` by name ({"pool": "mean"}),
    and the number of attention heads by `heads`; by default heads are 64 wide, but for the widths of well-known models
    that have others. `keys` names a key table for a ViT of no known family (`vitrail.checkpoints.custom`). Names of
    ours that match a pattern of `fresh`, such as "head.*", may be missing and start fresh; whatever else is missing is
    an error.

    The other arguments adapt the model after it was loaded: a new head, another size, other channels. What was found
    and done is in the bundle's `coverage`, and logged.
    """
    said: Hints = {**(known or {}), **({"heads": heads} if heads is not None else {})}
    check_known(said)
    bundle = adapt(
        _load(source, said, keys, fresh, image_size),
        classes=classes,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        position_method=position_method,
        channel_method=channel_method,
    )
    logging.getLogger("vitrail").info("%s: %s", source, bundle.coverage)
    return bundle


def check_known(fields: Mapping[str, Any]) -> None:
    """See to it that these are fields of a `ViTConfig`, and numbers where it has numbers."""
    for name in fields:
        if name not in ViTConfig.model_fields:
            raise ConfigError(f"ViTConfig has no option {name!r}{suggest(name, ViTConfig.model_fields)}")
    if fields.get("heads", 1) < 1:
        raise ConfigError(f"heads is {fields['heads']}; it should be 1 or more")


def _load(
    source: str | Path,
    said: Hints,
    keys: str | Path | None,
    fresh: Sequence[str],
    image_size: int | tuple[int, int] | None,
) -> Bundle:
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
            return _open_bundle(folder, said, keys, fresh)
        found = _find(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if name is not None:
        found = found._replace(known=replace(found.known, hub=str(source)))
    hints: Hints = {**found.known.hints, **said}
    if image_size is not None:
        hints["wanted_size"] = image_size
    bundle = _open(found, hints, None if keys is None else read_key_table(keys), fresh)
    bundle.origin = path if name is None else None
    return bundle


def _open_bundle(folder: Path, said: Hints, keys: str | Path | None, fresh: Sequence[str]) -> Bundle:
    bundle = read_bundle(folder, fresh=fresh)
    if keys is not None:
        raise CheckpointError(f"{folder} is a bundle, whose names are known; open it without a key table")
    for field, value in said.items():
        if getattr(bundle.model.config.replace(**{field: value}), field) != getattr(bundle.model.config, field):
            raise CheckpointError(
                f"{folder} is a bundle, which says {field}={getattr(bundle.model.config, field)!r} itself; open it "
                f"without {field}="
            )
    bundle.origin = folder
    return bundle


def _open(source: _Source, hints: Hints, family: Family | None, fresh: Sequence[str]) -> Bundle:
    file, known = source.files[0], source.known
    stored = read_checkpoint(source.files)
    total = len(stored.weights)
    reading, family = _read(stored.weights, hints, family, file)
    config = _config_of(reading, hints, file)
    model, started_fresh = loaded_model(config, reading.weights, fresh=fresh)
    preprocess, fitted = _preprocess(known, family, config)
    classes, assumed = _names(known, config)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    zero = "the head is all zero, as in Google's ImageNet-21k originals: give it new classes"
    sure = heads_are_certain(config, {**reading.hints, **hints})
    notes = [
        *stored.notes,
        *known.notes,
        *fitted,
        *([f"{len(reading.dropped)} tensors were left out: {', '.join(reading.dropped)}"] if reading.dropped else []),
        *([] if sure else [f"the number of heads, {config.heads}, is assumed; say another one with heads="]),
        *assumed,
        *([zero] if config.classes and not cast("nn.Linear", model.head).weight.any() else []),
    ]
    provenance: dict[str, Any] = {
        "source": known.hub or file.name,
        "family": family.name,
        "coverage": f"{total - len(reading.dropped)} of {total} tensors, {millions:.2f} M parameters",
        **({"fresh": started_fresh} if started_fresh else {}),
        **({"notes": notes} if notes else {}),
    }
    return Bundle(model, preprocess, classes, provenance)


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


def _config_of(reading: Reading, hints: Hints, file: Path) -> ViTConfig:
    found = reading.hints.get("heads")
    if found is not None and hints.get("heads", found) != found:
        raise CheckpointError(f"{file} has {found} heads, as its shapes tell; open it without heads={hints['heads']}")
    if "pooler_act" in hints and "pre_logits.fc.weight" in reading.weights:
        raise CheckpointError(f"its config says pooler_act {hints['pooler_act']!r}, and ours is tanh")
    shapes = {name: tuple(tensor.shape) for name, tensor in reading.weights.items()}
    return infer_config(shapes, {**reading.hints, **hints})


def inferred_config(file: Path) -> ViTConfig:
    """Return the model that a weight file would be taken for by somebody who knows nothing else of it."""
    reading, _ = _read(read_checkpoint([file]).weights, {}, None, file)
    return _config_of(reading, {}, file)


def _names(known: Known, config: ViTConfig) -> tuple[tuple[str, ...] | None, list[str]]:
    """Return the names of the classes, and what was assumed of them."""
    if known.classes is not None and len(known.classes) == config.classes:
        return known.classes, []
    if config.classes == IMAGENET_CLASSES:
        return imagenet_names(), ["the class names are assumed to be ImageNet's, because the head has 1,000 outputs"]
    return None, []


def _preprocess(known: Known, family: Family, config: ViTConfig) -> tuple[Preprocess, list[str]]:
    """Return what is done to pictures, fitted to the model, and a note where the config beside it said otherwise."""
    usual = family.preprocess if family.preprocess_at is None else family.preprocess_at(config.image_size)
    found = known.preprocess or usual
    fitted = found if found.size == config.image_size else found.resized(config.image_size)
    if config.channels != fitted.channels:
        mean, std = ((sum(n) / len(n),) * config.channels for n in (fitted.mean, fitted.std))
        fitted = fitted.replace(channels=config.channels, mean=mean, std=std)
    if known.preprocess is None or fitted == found:
        return fitted, []
    height, width = found.size
    return fitted, [f"its preprocessing was for {height}×{width}×{found.channels}, and was fitted to the model"]


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
        return _Source((path,), known_from_folder(path.parent))
    if index := sorted(path.glob("*.index.json")):
        return _Source(_shards(index[0]), known_from_folder(path))
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files and (path / "best").is_dir():
        raise CheckpointError(f"{path} is a run; its best model is {path / 'best'}")
    if not files:
        raise CheckpointError(f"{path} holds no weight file ({', '.join(SUFFIXES)})")
    preferred = [file for name in _PREFERRED for file in files if file.name == name]
    # The same weights often lie there twice, in an older format too.
    best = preferred[:1] or [file for file in files if file.suffix == ".safetensors"] or files
    if len(best) > 1:
        raise CheckpointError(
            f"{path} holds several weight files ({', '.join(f.name for f in best)}); name one of them"
        )
    return _Source((best[0],), known_from_folder(path))


def _shards(index: Path) -> tuple[Path, ...]:
    """Return the files that a large checkpoint was cut into."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no weight_map that says which file holds which tensor")
    files = tuple(index.parent / Path(name).name for name in sorted(set(places.values())))
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{index.parent} lacks {', '.join(missing)}, which {index.name} names; fetch it too")
    return files
