"""Moving a checkpoint to another library's format, with proof: what was written is opened again and compared."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from vitrail.checkpoints.bundle import CONFIG, WEIGHTS, Bundle
from vitrail.checkpoints.custom import read_key_table
from vitrail.checkpoints.family import Family
from vitrail.checkpoints.files import whole_file, whole_folder, write_npz, write_safetensors
from vitrail.checkpoints.load import FAMILIES, load
from vitrail.checkpoints.transformers_config import (
    dinov2_config,
    preprocessor_differences,
    transformers_config,
    transformers_preprocessor,
)
from vitrail.errors import CheckpointError, suggest
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

Target = Literal[
    "bundle",
    "google",
    "timm",
    "torchvision",
    "transformers",
    "timm-rope",
    "lucidrains",
    "dinov2",
    "dinov2-transformers",
    "own",
]
_FOLDERS = ("transformers", "dinov2-transformers")
"""Families whose models are folders, with a config and a preprocessor beside the weights."""
TOLERANCE = 1e-5
"""How much the logits of what was written may differ, as a share of the largest one, before it counts as wrong."""


class Conversion(NamedTuple):
    """What a conversion came to."""

    target: Path
    family: str
    tensors: int
    parameters: int
    change: float
    """Largest difference of logits and features, as a share of the largest, on random pictures."""
    differences: list[str]
    """Where the target computes slightly other numbers, which was allowed."""


def convert(
    source: str | Path | Bundle,
    target: str | Path,
    *,
    to: Target = "bundle",
    keys: str | Path | None = None,
    approximate: bool = False,
    overwrite: bool = False,
) -> Conversion:
    """Write a checkpoint in another format, open what was written, and compare the logits before it gets its name.

    `source` is whatever `load` opens, or a bundle, which may have been adapted: `convert(load("B_16.npz",
    image_size=384), …)`. An architecture the target cannot express is refused. Where only small numbers differ (which
    GELU, LayerNorm's eps), `approximate` allows it, and the change is measured. "own" writes by the key table that
    `keys` names.
    """
    if to not in get_args(Target):
        raise CheckpointError(
            f"no format is called {to!r}; choose one of {', '.join(get_args(Target))}{suggest(to, get_args(Target))}"
        )
    if (to == "own") != (keys is not None):
        raise CheckpointError("a key table (--keys) goes with the format 'own', and 'own' needs one")
    family = next((family for family in FAMILIES if family.name == to), None) if keys is None else read_key_table(keys)
    bundle = source if isinstance(source, Bundle) else load(source)
    numbers = [] if family is None else family.differences(bundle.model.config)
    pixels = [] if family is None or family.name not in _FOLDERS else preprocessor_differences(bundle.preprocess)
    if family is not None:
        _check(family, bundle.model.config, [*numbers, *pixels], approximate)
    path = Path(target)
    folder = family is None or family.name in _FOLDERS or (family.name == "timm" and not path.suffix)
    with (whole_folder if folder else whole_file)(path, overwrite=overwrite) as temporary:
        if family is None:
            bundle.write(temporary)
        else:
            _WRITERS.get(family.name, _write_torch)(bundle, family, temporary)
        change = _compare(bundle, temporary, keys)
        if change > TOLERANCE and not numbers:
            raise CheckpointError(
                f"what was written as {to} answers differently (by {change:.1e} of the largest logit), so it was "
                f"thrown away; this is a fault of vitrail, please report it"
            )
    parameters = sum(p.numel() for p in bundle.model.parameters())
    return Conversion(path, to, len(bundle.model.state_dict()), parameters, change, [*numbers, *pixels])


def _check(family: Family, config: ViTConfig, differences: list[str], approximate: bool) -> None:
    if found := family.obstacles(config):
        raise CheckpointError(f"{family.name} cannot express {'; '.join(found)}")
    if differences and not approximate:
        raise CheckpointError(
            f"{family.name} would compute slightly other numbers: {'; '.join(differences)}; allow it with "
            f"--approximate (approximate=True), and the change is measured"
        )


@torch.no_grad()
def _compare(bundle: Bundle, written: Path, keys: str | Path | None) -> float:
    """Return how much the answers of what was written differ, on random pictures."""
    config = bundle.model.config
    again = load(written, heads=config.heads, keys=keys).model
    like = next(bundle.model.parameters())
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(2, config.channels, *config.image_size, generator=generator).to(like)
    before, after = (_answers(model, pictures) for model in (bundle.model.eval(), again.to(like.device, like.dtype)))
    if not before.isfinite().all():
        raise CheckpointError(
            "the model's answers are not finite, so nothing was written; look at it with vitrail inspect"
        )
    if before.shape != after.shape:
        return float("inf")
    return float((before - after).abs().max() / before.abs().max().clamp(min=1e-12))


def _answers(model: ViT, pictures: torch.Tensor) -> torch.Tensor:
    """Return logits and features in one row: a fresh head may answer 0 to everything, which would prove nothing."""
    return torch.cat([model(pictures).flatten(), model.features(pictures).pooled.flatten()]).float()


def _weights(bundle: Bundle, family: Family) -> dict[str, torch.Tensor]:
    ours = {name: tensor.detach().cpu() for name, tensor in bundle.model.state_dict().items()}
    return family.write(ours, bundle.model.config)


def _write_npz(bundle: Bundle, family: Family, path: Path) -> None:
    write_npz(path, _weights(bundle, family))


def _write_torch(bundle: Bundle, family: Family, path: Path) -> None:
    weights = _weights(bundle, family)
    if path.suffix == ".safetensors":
        write_safetensors(path, weights, {"format": "pt"})
    else:
        try:
            torch.save(weights, path)
        except RuntimeError as error:  # what torch makes of a full disk
            raise OSError(str(error).split("\n", 1)[0]) from None


def _write_timm(bundle: Bundle, family: Family, path: Path) -> None:
    """A folder for timm is a bundle; a file holds the weights alone."""
    if path.is_dir():
        bundle.write(path)
        if "architecture" not in json.loads((path / CONFIG).read_text(encoding="utf-8")):
            raise CheckpointError(
                "timm has no plain ViT with these options; write the weights alone by giving a file's name "
                "(weights.pth)"
            )
    else:
        _write_torch(bundle, family, path)


def _write_transformers(bundle: Bundle, family: Family, path: Path) -> None:
    config = bundle.model.config
    plain = family.name == "transformers"
    write_safetensors(path / WEIGHTS, _weights(bundle, family), {"format": "pt"})
    for name, content in (
        (CONFIG, transformers_config(config, bundle.classes) if plain else dinov2_config(config)),
        ("preprocessor_config.json", transformers_preprocessor(bundle.preprocess)),
    ):
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


_WRITERS: dict[str, Callable[[Bundle, Family, Path], None]] = {
    "google": _write_npz,
    "timm": _write_timm,
    "torchvision": _write_torch,
    "transformers": _write_transformers,
    "lucidrains": _write_torch,
    "dinov2": _write_torch,
    "dinov2-transformers": _write_transformers,
}
