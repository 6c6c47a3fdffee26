"""Convert a checkpoint to another library's format. The result is opened again and its outputs are compared."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from vitrail.checkpoints import timm_config
from vitrail.checkpoints.adapt import adapt
from vitrail.checkpoints.bundle import CLASSIFICATION, CONFIG, WEIGHTS, Bundle
from vitrail.checkpoints.config_files import (
    dinov2_config,
    preprocessor_differences,
    transformers_config,
    transformers_preprocessor,
)
from vitrail.checkpoints.custom import read_key_table
from vitrail.checkpoints.family import Family
from vitrail.checkpoints.files import SUFFIXES
from vitrail.checkpoints.keys import Weights
from vitrail.checkpoints.load import FAMILIES, inferred_config, open_checkpoint
from vitrail.checkpoints.locate import parse
from vitrail.checkpoints.tensors import Dtype, check_dtype, load_weights, loaded_model
from vitrail.checkpoints.writing import atomic_file, atomic_folder, write_npz, write_safetensors, write_torch
from vitrail.errors import CheckpointError, suggest
from vitrail.models.config import ViTConfig
from vitrail.models.position import Method, read_table
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
"""The maximum difference of the converted model's logits, relative to the largest one."""
APPROXIMATE_TOLERANCE = 0.1
"""The same for a target whose outputs differ slightly by design."""
_IN_TRANSFORMERS = ("transformers", "dinov2-transformers")
_TORCH_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix != ".npz")


class Conversion(NamedTuple):
    """The result of a conversion."""

    target: Path
    family: str
    tensors: int
    """The number of tensors in the target."""
    parameters: int
    change: float
    """The maximum difference of logits and features on random images, relative to the largest value."""
    differences: list[str]
    """Config fields where the target differs slightly, as allowed by `approximate`."""
    notes: list[str]
    """What the target does not record, so that it must be set when opening it."""
    coverage: str = ""
    """The tensors that were loaded and the changes made, in one line."""
    source_notes: tuple[str, ...] = ()
    """Anything unusual about the source."""


class _Plan(NamedTuple):
    """How to write the target."""

    family: Family | None
    folder: bool
    changes: dict[str, Any]
    """Config fields that have another value in the target, with nearly the same outputs."""
    pixels: list[str]
    """Differences in preprocessing."""

    def differences(self, config: ViTConfig) -> list[str]:
        return [
            *(f"{name}={getattr(config, name)!r} (the target has {v!r})" for name, v in self.changes.items()),
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
    classes: int | tuple[str, ...] | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    position_method: Method = "timm",
    approximate: bool = False,
    overwrite: bool = False,
) -> Conversion:
    """Convert a checkpoint to another format, open the result, and compare the logits before renaming it into place.

    `source` is a bundle or anything that `load` opens, with the same `overrides` and `keys`; to="own" writes your own
    tensor names with the key table `keys`. `classes`, `image_size`, `patch_size`, `channels` and `position_method`
    adapt the model, as in `load`. An architecture that the target cannot express is an error. Small differences (which
    GELU, LayerNorm's eps) are allowed with `approximate`, and measured. `dtype` changes the dtype of the weights; by
    default it is kept.
    """
    own = to == "own"
    check_format(to, keys if own or isinstance(source, Bundle) else None)
    check_dtype(dtype)
    keys_of_source, keys = (None, keys) if own else (keys, None)
    changes = (classes, image_size, patch_size, channels)
    if isinstance(source, Bundle):
        if overrides:
            raise CheckpointError("overrides apply to weight files only; a bundle records every field")
        # A changed model must not change the caller's.
        bundle = source.in_dtype(dtype) if changes == (None,) * 4 else copy.deepcopy(source.in_dtype(dtype))
    else:
        bundle = open_checkpoint(source, overrides=overrides, keys=keys_of_source, dtype=dtype, target_size=image_size)
    adapt(
        bundle,
        classes=classes,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        position_method=position_method,
    )
    opened = bundle
    path = Path(target)
    _check_not_source(bundle, target)
    bundle = _learned_positions(_norm_before_pool(bundle, to), to)
    plan = _plan(bundle, path, to, None if keys is None else read_key_table(keys))
    differences = plan.differences(bundle.model.config)
    if differences and not approximate:
        raise CheckpointError(
            f"the outputs of {to} would differ slightly: {'; '.join(differences)}; allow it with --approximate "
            f"(approximate=True), which also measures the difference"
        )
    near = _nearest(bundle, plan.changes)
    with (atomic_folder if plan.folder else atomic_file)(path, overwrite=overwrite) as temporary:
        tensors = _write(near, plan.family, temporary)
        change = _compare(bundle, near, temporary, plan, keys)
        # Written so that NaN fails, too.
        if not change <= (APPROXIMATE_TOLERANCE if plan.changes else TOLERANCE):
            raise CheckpointError(
                f"the logits of the converted {to} model differ by {change:.1e} of the largest one, so it was deleted; "
                f"this is a bug in vitrail, please report it"
            )
        notes = _lost_task(bundle, to) + ([] if plan.folder else _not_in_file(near, temporary, own=to == "own"))
    parameters = sum(p.numel() for p in bundle.model.parameters())
    opened.announce()
    about = tuple(opened.provenance.get("notes", ()))
    return Conversion(path, to, tensors, parameters, change, differences, notes, opened.coverage, about)


def check_format(to: str, keys: str | Path | None) -> None:
    """Raise on an unknown format or a missing key table, before anything is opened."""
    if to not in get_args(Target):
        raise CheckpointError(
            f"no format is called {to!r}; choose one of {', '.join(get_args(Target))}{suggest(to, get_args(Target))}"
        )
    if (to == "own") != (keys is not None):
        raise CheckpointError("the format 'own' needs a key table (--keys), and other formats take none")


def _norm_before_pool(bundle: Bundle, to: Target) -> Bundle:
    """Move a norm after class token pooling to before it, which is equivalent and more formats support."""
    config = bundle.model.config
    family = next((family for family in FAMILIES if family.name == to), None)
    if family is None or config.final_norm in family.needs.get("final_norm", (config.final_norm,)):
        return bundle
    if (config.final_norm, config.pool) != ("after_pool", "cls"):
        return bundle
    state = {name.replace("fc_norm.", "norm."): tensor for name, tensor in bundle.model.state_dict().items()}
    model, _ = loaded_model(config.replace(final_norm="before_pool"), state)
    return replace(bundle, model=model)


def _learned_positions(bundle: Bundle, to: Target) -> Bundle:
    """Write sincos and 2-D positions as a learned table, which is equivalent and more formats support."""
    config = bundle.model.config
    family = next((family for family in FAMILIES if family.name == to), None)
    if family is None or config.position in family.needs.get("position", (config.position,)):
        return bundle
    if config.position not in ("sincos_2d", "learned_2d") or config.position_at != "stem":
        return bundle
    same = {name: tensor for name, tensor in bundle.model.state_dict().items() if not name.startswith("pos_embed")}
    table = read_table(bundle.model, config).detach().to(next(bundle.model.parameters()))
    written = config.replace(position="learned_1d", position_covers=None)
    model, _ = loaded_model(written, {**same, "pos_embed": table})
    return replace(bundle, model=model)


def _check_not_source(bundle: Bundle, target: str | Path) -> None:
    if parse(str(target)) is not None:
        raise CheckpointError(f"{target} is the name of a model on a hub; the target must be a local path")
    if bundle.origin is not None:
        origin, place = bundle.origin.resolve(), Path(target).resolve()
        if place == origin or place in origin.parents:
            raise CheckpointError(f"{target} is or contains the source; choose another target")


def _plan(bundle: Bundle, path: Path, to: Target, own: Family | None) -> _Plan:
    """Decide how to write the target, or raise with the fields that it cannot express."""
    config = bundle.model.config
    family = own or next((family for family in FAMILIES if family.name == to), None)
    folder = family is None or to in _IN_TRANSFORMERS or (to == "timm" and path.suffix not in SUFFIXES)
    if family is not None and not config.depth:
        raise CheckpointError(f"{to} has no ResNet without encoder blocks; vitrail export writes ONNX")
    if unsupported := family.unsupported(config) if family is not None else []:
        hint = "; vitrail export writes ONNX, and models trained with --set model.paper=true can be converted"
        ours = bundle.provenance.get("source") == "trained from scratch"
        raise CheckpointError(f"{to} cannot express {'; '.join(unsupported)}{hint if ours else ''}")
    _check_suffix(path, to, folder)
    if family is None:
        return _Plan(None, True, {}, [])
    if to == "timm" and folder:
        changes = {} if timm_config.expressible(config) else {"norm_eps": 1e-6}
        if not timm_config.expressible(config.replace(**changes)):
            raise CheckpointError(
                "timm has no plain ViT with these options; write only the weights, to a file (weights.pth)"
            )
        return _Plan(family, True, changes, [])
    changes = {name: value for name, value in family.nearly.items() if getattr(config, name) != value}
    pixels = preprocessor_differences(bundle.preprocess) if to in _IN_TRANSFORMERS else []
    return _Plan(family, folder, changes, pixels)


def _check_suffix(path: Path, to: Target, folder: bool) -> None:
    allowed = () if folder else (".npz",) if to == "google" else _TORCH_SUFFIXES
    if folder and path.suffix in SUFFIXES:
        raise CheckpointError(f"{to} is written as a folder, but {path.name} is a file name; remove the suffix")
    if not folder and path.suffix not in allowed:
        raise CheckpointError(f"{to} is written as a file; use a name that ends in {' or '.join(allowed)}")


def _nearest(bundle: Bundle, changes: dict[str, Any]) -> Bundle:
    """Return the bundle with the target's values in its config; the weights are shared."""
    if not changes:
        return bundle
    with torch.device("meta"):
        model = ViT(bundle.model.config.replace(**changes))
    load_weights(model, dict(bundle.model.state_dict()))
    return replace(bundle, model=model.eval())


@torch.no_grad()
def _compare(bundle: Bundle, near: Bundle, written: Path, plan: _Plan, keys: str | Path | None) -> float:
    """Return the relative difference between the outputs of source and target on random images."""
    config = bundle.model.config
    overrides = None if plan.folder else dict(near.model.config)
    converted = open_checkpoint(written, overrides=overrides, keys=keys, dtype="keep").model
    like = next(bundle.model.parameters())
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, config.channels, *config.image_size, generator=generator).to(like)
    training = bundle.model.training
    before, after = (_outputs(model, images) for model in (bundle.model.eval(), converted.to(like.device, like.dtype)))
    bundle.model.train(training)
    if not before.isfinite().all():
        raise CheckpointError(
            "the model's outputs are not finite, so nothing was written; check it with vitrail inspect"
        )
    if before.shape != after.shape:
        return float("inf")
    return float((before - after).abs().max() / before.abs().max().clamp(min=1e-12))


def _outputs(model: ViT, images: torch.Tensor) -> torch.Tensor:
    """Return logits and features as one vector; the logits of a new head may all be zero and prove nothing."""
    return torch.cat([model(images).flatten(), model.features(images).pooled.flatten()]).float()


def _lost_task(bundle: Bundle, to: Target) -> list[str]:
    """Return a note if the target does not record the task; a headless model has none."""
    if to == "bundle" or bundle.task == CLASSIFICATION or not bundle.model.config.classes:
        return []
    return [f"{to} does not record the task, {bundle.task}: it opens the model as a classifier"]


def _not_in_file(bundle: Bundle, written: Path, *, own: bool) -> list[str]:
    """Return notes on what a bare weight file does not record."""
    names = " and class names" if bundle.classes is not None else ""
    notes = [f"the file holds only weights: the preprocessing{names} are not in it"]
    if own:
        return notes
    config = bundle.model.config.resolved()
    try:
        guessed, ambiguous = inferred_config(written)
    except CheckpointError:  # a grid that is not square cannot be inferred
        guessed, ambiguous = config.replace(image_size=config.patch_size), {"heads"}
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
        if getattr(guessed, name) != value or name in ambiguous:
            notes.append(f"the file does not record {name}={value!r}; set it when you open it (--override {name}=…)")
    return notes


def _write(bundle: Bundle, family: Family | None, path: Path) -> int:
    """Write the target, and return its number of tensors."""
    if family is None or (family.name == "timm" and path.is_dir()):  # timm opens our bundles
        bundle.write(path)
        return len(bundle.model.state_dict())
    ours = {name: tensor.detach().cpu() for name, tensor in bundle.model.state_dict().items()}
    try:
        weights = family.write(ours, bundle.model.config)
    except (KeyError, IndexError, RuntimeError, ValueError) as error:  # only a custom key table can cause this
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
