"""Moving a checkpoint to another library's format, with proof: what was written is opened again and compared."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from vitrail.checkpoints import timm_config
from vitrail.checkpoints.bundle import CONFIG, WEIGHTS, Bundle
from vitrail.checkpoints.custom import read_key_table
from vitrail.checkpoints.dtypes import Dtype, check_dtype
from vitrail.checkpoints.family import Family
from vitrail.checkpoints.files import SUFFIXES
from vitrail.checkpoints.hub import parse
from vitrail.checkpoints.keys import Weights
from vitrail.checkpoints.load import FAMILIES, inferred_config, open_checkpoint
from vitrail.checkpoints.strict import load_weights, loaded_model
from vitrail.checkpoints.transformers_config import (
    dinov2_config,
    preprocessor_differences,
    transformers_config,
    transformers_preprocessor,
)
from vitrail.checkpoints.writing import whole_file, whole_folder, write_npz, write_safetensors, write_torch
from vitrail.errors import CheckpointError, suggest
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

Target = Literal[
    "bundle",
    "google",
    "timm",
    "timm-rope",
    "torchvision",
    "transformers",
    "lucidrains",
    "dinov2",
    "dinov2-transformers",
    "own",
]
TOLERANCE = 1e-5
"""How much the logits of what was written may differ, as a share of the largest one, before it counts as wrong."""
LARGEST_CHANGE = 0.1
"""The same where the target is known to compute slightly other numbers: more is no approximation."""
_IN_TRANSFORMERS = ("transformers", "dinov2-transformers")
_TORCH_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix != ".npz")


class Conversion(NamedTuple):
    """What a conversion came to."""

    target: Path
    family: str
    tensors: int
    """How many the target has."""
    parameters: int
    change: float
    """Largest difference of logits and features, as a share of the largest, on random images."""
    differences: list[str]
    """Where the target computes slightly other numbers, which was allowed."""
    notes: list[str]
    """What the target does not hold, so that whoever opens it has to be told."""


class _Way(NamedTuple):
    """How a bundle gets to its target."""

    family: Family | None
    folder: bool
    changes: dict[str, Any]
    """Fields of the config that the target has another value for, which gives nearly the same numbers."""
    pixels: list[str]
    """Where the target's preprocessing differs."""

    def differences(self, config: ViTConfig) -> list[str]:
        return [
            *(f"{name}={getattr(config, name)!r} (it computes with {v!r})" for name, v in self.changes.items()),
            *self.pixels,
        ]


def convert(
    source: str | Path | Bundle,
    target: str | Path,
    *,
    to: Target = "bundle",
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    dtype: Dtype = "keep",
    approximate: bool = False,
    overwrite: bool = False,
) -> Conversion:
    """Write a checkpoint in another format, open what was written, and compare the logits before it gets its name.

    `source` is whatever `load` opens (`overrides` says what its file does not tell), or a bundle, which may have been
    adapted: `convert(load("B_16.npz", image_size=384), …)`. An architecture the target cannot express is refused. Where
    only small numbers differ (which GELU, LayerNorm's eps), `approximate` allows it, and the change is measured. "own"
    writes by the key table that `keys` names. The numbers stay those of the file, or of the bundle, unless `dtype` asks
    for others.
    """
    check_format(to, keys)
    check_dtype(dtype)
    if isinstance(source, Bundle):
        if overrides:
            raise CheckpointError("overrides go with a file; this is a bundle, which says everything itself")
        bundle = source.in_dtype(dtype)
    else:
        bundle = open_checkpoint(source, overrides=overrides, dtype=dtype)
    opened = bundle
    path = Path(target)
    _keep_the_source(bundle, target)
    bundle = _norm_before_pool(bundle, to)
    way = _way(bundle, path, to, None if keys is None else read_key_table(keys))
    differences = way.differences(bundle.model.config)
    if differences and not approximate:
        raise CheckpointError(
            f"{to} would compute slightly other numbers: {'; '.join(differences)}; allow it with --approximate "
            f"(approximate=True), and the change is measured"
        )
    near = _nearest(bundle, way.changes)
    with (whole_folder if way.folder else whole_file)(path, overwrite=overwrite) as temporary:
        tensors = _write(near, way.family, temporary)
        change = _compare(bundle, near, temporary, way, keys)
        # Written so that "not a number" is refused, too.
        if not change <= (LARGEST_CHANGE if way.changes else TOLERANCE):
            raise CheckpointError(
                f"what was written as {to} answers differently (by {change:.1e} of the largest logit), so it was "
                f"thrown away; this is a fault of vitrail, please report it"
            )
        notes = [] if way.folder else _not_in_a_file(near, temporary, own=to == "own")
    parameters = sum(p.numel() for p in bundle.model.parameters())
    opened.announce()
    return Conversion(path, to, tensors, parameters, change, differences, notes)


def check_format(to: str, keys: str | Path | None) -> None:
    """Refuse what is not a format, or lacks its key table, before anything is opened."""
    if to not in get_args(Target):
        raise CheckpointError(
            f"no format is called {to!r}; choose one of {', '.join(get_args(Target))}{suggest(to, get_args(Target))}"
        )
    if (to == "own") != (keys is not None):
        raise CheckpointError("a key table (--keys) goes with the format 'own', and 'own' needs one")


def _norm_before_pool(bundle: Bundle, to: Target) -> Bundle:
    """Where the class token is read, a norm after pooling is the same as one before, which more formats have."""
    config = bundle.model.config
    family = next((family for family in FAMILIES if family.name == to), None)
    if family is None or config.final_norm in family.needs.get("final_norm", (config.final_norm,)):
        return bundle
    if (config.final_norm, config.pool) != ("after_pool", "cls"):
        return bundle
    state = {name.replace("fc_norm.", "norm."): tensor for name, tensor in bundle.model.state_dict().items()}
    model, _ = loaded_model(config.replace(final_norm="before_pool"), state)
    return replace(bundle, model=model)


def _keep_the_source(bundle: Bundle, target: str | Path) -> None:
    if parse(str(target)) is not None:
        raise CheckpointError(f"{target} is the name of a model on a hub; what is written needs the path of a file")
    if bundle.origin is not None:
        origin, place = bundle.origin.resolve(), Path(target).resolve()
        if place == origin or place in origin.parents:
            raise CheckpointError(f"{target} is, or holds, what is being converted; choose another name")


def _way(bundle: Bundle, path: Path, to: Target, own: Family | None) -> _Way:
    """Find out how the target is written, or say which field of the config stands in the way."""
    config = bundle.model.config
    family = own or next((family for family in FAMILIES if family.name == to), None)
    folder = family is None or to in _IN_TRANSFORMERS or (to == "timm" and path.suffix not in SUFFIXES)
    if found := family.obstacles(config) if family is not None else []:
        way = "; vitrail export writes ONNX, and models trained with --set model.paper=true can be converted"
        ours = bundle.provenance.get("source") == "trained from scratch"
        raise CheckpointError(f"{to} cannot express {'; '.join(found)}{way if ours else ''}")
    _check_suffix(path, to, folder)
    if family is None:
        return _Way(None, True, {}, [])
    if to == "timm" and folder:
        changes = {} if timm_config.expressible(config) else {"norm_eps": 1e-6}
        if not timm_config.expressible(config.replace(**changes)):
            raise CheckpointError(
                "timm has no plain ViT with these options; write the weights alone, by the name of a file (weights.pth)"
            )
        return _Way(family, True, changes, [])
    changes = {name: value for name, value in family.nearly.items() if getattr(config, name) != value}
    pixels = preprocessor_differences(bundle.preprocess) if to in _IN_TRANSFORMERS else []
    return _Way(family, folder, changes, pixels)


def _check_suffix(path: Path, to: Target, folder: bool) -> None:
    allowed = () if folder else (".npz",) if to == "google" else _TORCH_SUFFIXES
    if folder and path.suffix in SUFFIXES:
        raise CheckpointError(f"{to} is written as a folder, but {path.name} is the name of a file; leave the end out")
    if not folder and path.suffix not in allowed:
        raise CheckpointError(f"{to} is written as a file; give it a name that ends in {' or '.join(allowed)}")


def _nearest(bundle: Bundle, changes: dict[str, Any]) -> Bundle:
    """Return the bundle with the target's own numbers in its config; the weights are shared."""
    if not changes:
        return bundle
    with torch.device("meta"):
        model = ViT(bundle.model.config.replace(**changes))
    load_weights(model, dict(bundle.model.state_dict()))
    return replace(bundle, model=model.eval())


@torch.no_grad()
def _compare(bundle: Bundle, near: Bundle, written: Path, way: _Way, keys: str | Path | None) -> float:
    """Return how much the answers of what was written differ, on random images."""
    config = bundle.model.config
    told = None if way.folder else dict(near.model.config)
    again = open_checkpoint(written, overrides=told, keys=keys, dtype="keep").model
    like = next(bundle.model.parameters())
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, config.channels, *config.image_size, generator=generator).to(like)
    training = bundle.model.training
    before, after = (_answers(model, images) for model in (bundle.model.eval(), again.to(like.device, like.dtype)))
    bundle.model.train(training)
    if not before.isfinite().all():
        raise CheckpointError(
            "the model's answers are not finite, so nothing was written; look at it with vitrail inspect"
        )
    if before.shape != after.shape:
        return float("inf")
    return float((before - after).abs().max() / before.abs().max().clamp(min=1e-12))


def _answers(model: ViT, images: torch.Tensor) -> torch.Tensor:
    """Return logits and features in one row: a fresh head may answer 0 to everything, which would prove nothing."""
    return torch.cat([model(images).flatten(), model.features(images).pooled.flatten()]).float()


def _not_in_a_file(bundle: Bundle, written: Path, *, own: bool) -> list[str]:
    """Say what a bare weight file leaves behind."""
    names = " and class names" if bundle.classes is not None else ""
    notes = [f"a file holds weights alone: the preprocessing{names} stay behind"]
    if own:
        return notes
    config = bundle.model.config.resolved()
    try:
        guessed, refused = inferred_config(written)
    except CheckpointError:  # a grid that is no square, which nobody can guess
        guessed, refused = config.replace(image_size=config.patch_size), {"heads"}
    guessed = guessed.resolved()
    for name in (
        "heads",
        "image_size",
        "position",
        "activation",
        "norm_eps",
        "pool",
        "pool_over",
        "final_norm",
        "rope_theta",
        "norm_order",
    ):
        value = getattr(config, name)
        if getattr(guessed, name) != value or name in refused:
            notes.append(f"the file does not say {name}={value!r}; say it when you open it (--override {name}=…)")
    return notes


def _write(bundle: Bundle, family: Family | None, path: Path) -> int:
    """Write the target, and return how many tensors it has."""
    if family is None or (family.name == "timm" and path.is_dir()):  # timm opens our bundles
        bundle.write(path)
        return len(bundle.model.state_dict())
    ours = {name: tensor.detach().cpu() for name, tensor in bundle.model.state_dict().items()}
    try:
        weights = family.write(ours, bundle.model.config)
    except (KeyError, IndexError, RuntimeError, ValueError) as error:  # only a home-made table can be so wrong
        raise CheckpointError(f"{family.name} does not fit the model ({error})") from None
    if family.name in _IN_TRANSFORMERS:
        _write_transformers(bundle, family, weights, path)
    elif path.suffix == ".npz":
        write_npz(path, weights)
    elif path.suffix == ".safetensors":
        write_safetensors(path, weights, {"format": "pt"})
    else:
        write_torch(path, weights)
    return len(weights)


def _write_transformers(bundle: Bundle, family: Family, weights: Weights, path: Path) -> None:
    config = bundle.model.config
    plain = family.name == "transformers"
    write_safetensors(path / WEIGHTS, weights, {"format": "pt"})
    for name, content in (
        (CONFIG, transformers_config(config, bundle.classes) if plain else dinov2_config(config)),
        ("preprocessor_config.json", transformers_preprocessor(bundle.preprocess)),
    ):
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
