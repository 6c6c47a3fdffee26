"""Opening any ViT checkpoint: what it is, how it is built, its weights, and how its pictures are prepared."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitrail.checkpoints.bundle import CONFIG, Bundle, is_bundle, read_bundle
from vitrail.checkpoints.family import Family, Hints
from vitrail.checkpoints.files import SUFFIXES, read_json, read_weights
from vitrail.checkpoints.folders import Known, known_from_folder
from vitrail.checkpoints.formats import dinov2, google, lucidrains, timm, torchvision, transformers
from vitrail.checkpoints.infer import Shapes, infer_config
from vitrail.checkpoints.strict import load_weights
from vitrail.errors import CheckpointError
from vitrail.models.vit import ViT

FAMILIES: tuple[Family, ...] = (
    google.FAMILY,
    timm.FAMILY,
    torchvision.FAMILY,
    transformers.FAMILY,
    lucidrains.FAMILY,
    dinov2.FAMILY,
)


class _Source(NamedTuple):
    """A weight file, and what stands beside it."""

    file: Path
    known: Known


def load(source: str | Path, *, heads: int | None = None) -> Bundle:
    """Open a checkpoint: a bundle's folder, a folder of transformers or timm, or a file (.npz, .safetensors, .pth, …).

    The family is seen from the tensors, not from the file's name, and the architecture from their shapes where no
    config comes along. `heads` says the number of attention heads, which shapes do not tell; by default heads are 64
    wide.
    """
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"{source} does not exist; give a folder or a weight file ({', '.join(SUFFIXES)})")
    if path.is_dir() and (path / CONFIG).is_file() and is_bundle(read_json(path / CONFIG)):
        return read_bundle(path)
    found = _find(path)
    hints: Hints = {**found.known.hints, **({"heads": heads} if heads is not None else {})}
    return _open(found, hints)


def _open(source: _Source, hints: Hints) -> Bundle:
    weights = read_weights(source.file)
    total = len(weights)
    family = detect({name: tuple(tensor.shape) for name, tensor in weights.items()}, source.file)
    ours, unknown, habits = family.read(weights, hints)
    if unknown:
        raise CheckpointError(
            f"{source.file} looks like {family.name}, but {len(unknown)} of its {total} tensors are not known there: "
            f"{', '.join(unknown[:8])}{', …' if len(unknown) > 8 else ''}"
        )
    config = infer_config({name: tuple(tensor.shape) for name, tensor in ours.items()}, {**habits, **hints})
    with torch.device("meta"):
        model = ViT(config)
    load_weights(model, ours)
    known = source.known
    preprocess = known.preprocess or family.preprocess.replace(
        size=config.image_size, resize_to=_scaled(family, config)
    )
    classes = known.classes if known.classes is not None and len(known.classes) == config.classes else None
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    provenance: dict[str, Any] = {
        "source": source.file.name,
        "family": family.name,
        "coverage": f"{total} of {total} tensors, {millions:.2f} M parameters",
    }
    return Bundle(model.eval(), preprocess, classes, provenance)


def _scaled(family: Family, config: Any) -> tuple[int, int] | None:
    """Keep the family's share of the picture that is cropped, at the model's size."""
    default = family.preprocess
    if default.resize_to is None:
        return None
    sides = zip(config.image_size, default.size, default.resize_to, strict=True)
    height, width = (round(size * larger / smaller) for size, smaller, larger in sides)
    return height, width


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
    try:
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if not files:
        raise CheckpointError(f"{path} holds no weight file ({', '.join(SUFFIXES)})")
    # The same weights often lie there twice, in an older format too.
    best = [file for file in files if file.suffix == ".safetensors"] or files
    if len(best) > 1:
        raise CheckpointError(
            f"{path} holds several weight files ({', '.join(f.name for f in best)}); name one of them"
        )
    return _Source(best[0], known_from_folder(path))
