"""The public functions: `vitrail.create`, `vitrail.train`, `vitrail.evaluate` and so on."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Never

import torch

from vitrail.acceleration.accelerate import accelerate
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.convert import Conversion, convert
from vitrail.checkpoints.load import load, ready_bundle
from vitrail.data.sources.selection import choose_images, recorded_split
from vitrail.errors import ConfigError, unknown_argument
from vitrail.evaluation import Evaluation, evaluate_chosen
from vitrail.explanations.explain import explain
from vitrail.explanations.explanation import Explanation
from vitrail.exporting import Export, export
from vitrail.inference.embed import EmbedResult, embed
from vitrail.inference.probe import ProbeResult, probe
from vitrail.models.config import FIELD_ALIASES, ViTConfig, value_here
from vitrail.models.stages import Cost, Stage, cost, sample_image, stages
from vitrail.models.variants import variant_config
from vitrail.models.vit import ViT
from vitrail.reports.report import report, report_of_finished
from vitrail.runtime import Precision, autocast, choose_device
from vitrail.text import printable
from vitrail.training.recipe import Recipe, unknown_setting
from vitrail.training.sweep import Sweep, sweep
from vitrail.training.train import Run
from vitrail.training.train import train as train_run

__all__ = [
    "Conversion",
    "Description",
    "EmbedResult",
    "Evaluation",
    "Explanation",
    "Export",
    "ProbeResult",
    "Run",
    "Sweep",
    "accelerate",
    "convert",
    "create",
    "describe",
    "embed",
    "evaluate",
    "explain",
    "export",
    "load",
    "probe",
    "report",
    "sweep",
    "train",
]

LARGE = 150_000_000
"""Above this many parameters, `describe` only infers shapes (meta device): initialising the weights would be slow."""


def create(
    name: str | ViTConfig,
    *,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    **unknown: Never,
) -> ViT:
    """Build a new model with random weights, from a name or a `ViTConfig`.

    `name` is a paper's name ("B/16") or timm's ("vit_small_patch16_224"); `vitrail models` lists them. The other
    arguments change the most common fields of the config. To change another field, pass a config:
    `create(variant_config("B/16").replace(pool="mean"))`. To open a pretrained model, use `load`.
    """
    for argument in unknown:
        raise _unknown_of_model(argument, unknown[argument])
    changes = {"classes": classes, "image_size": image_size, "patch_size": patch_size, "channels": channels}
    return ViT(_config(name).replace(**{field: value for field, value in changes.items() if value is not None}))


def train(
    data: str | Path = "digits",
    *,
    recipe: str | Path | Recipe | None = None,
    changes: Sequence[str] = (),
    pretrained: str | Path | Bundle | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    folder: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    quiet: bool = False,
    evaluate_on: Literal["test", "val"] = "test",
    **unknown: Never,
) -> Run:
    """Train or fine-tune an image classifier, evaluate it on the test split, and write a report.

    The same call resumes an interrupted run, because the same data and recipe give the same `folder`.

    `recipe` is the name of a built-in recipe, the path of a TOML file, or a `Recipe`. `changes` change its settings,
    such as `["optimizer.lr=3e-4", "epochs=50"]`. `pretrained` is the model to fine-tune; `overrides` and `keys`
    describe its checkpoint, as in `load`. While you tune settings, pass `evaluate_on="val"` to leave the test split
    untouched; call `train` again without it to evaluate on the test split and write the report.
    """
    for argument in unknown:
        raise unknown_setting(train, argument, unknown[argument])
    run = train_run(
        data, recipe=recipe, changes=changes, pretrained=pretrained, overrides=overrides, keys=keys,
        folder=folder, device=device, workers=workers, quiet=quiet, evaluate_on=evaluate_on,
    )  # fmt: skip
    if evaluate_on != "test" or os.environ.get("RANK", "0") != "0":  # only rank 0 writes the report
        return run
    path, message = report_of_finished(run.folder)
    if not quiet:
        print(printable(message), file=sys.stderr)
    return replace(run, report=path)


def evaluate(
    model: str | Path | Bundle,
    data: str | Path,
    *,
    split: Literal["test", "val", "train", "all"] | None = None,
    by_number: bool = False,
    device: str = "auto",
    precision: Precision = "float32",
    batch: int = 64,
    workers: int | None = None,
) -> Evaluation:
    """Evaluate a model on labelled images. Returns the same type as `Run.metrics`.

    By default it uses the test split that the data defines, or its validation split. If the data defines neither, it
    uses the test split of the model's run, or else all images. `summary` says which split it was, and whether the model
    was trained on it. `by_number` matches classes by index instead of by name. `bad` lists unreadable images.
    """
    autocast(choose_device(device), precision)  # fail early on a wrong device or precision
    bundle = ready_bundle(model)
    record = recorded_split(bundle.origin)
    return evaluate_chosen(
        bundle,
        choose_images(data, split, record=record),
        record,
        device=device,
        precision=precision,
        batch=batch,
        workers=workers,
        by_number=by_number,
    )


class Description(NamedTuple):
    """The config of a model, its cost, and the shape of each intermediate tensor."""

    config: ViTConfig
    cost: Cost
    stages: list[Stage]
    computed: bool
    """Whether the model ran on an image. For large models, only the shapes are inferred."""


def describe(name: str | ViTConfig) -> Description:
    """Return the parameters, FLOPs and intermediate shapes of a model, by running a new one on a synthetic image."""
    config = _config(name)
    spent = cost(config)
    computed = spent.parameters <= LARGE
    with torch.device("cpu" if computed else "meta"), torch.random.fork_rng(devices=[]):
        model, image = ViT(config).eval(), sample_image(config.channels, config.image_size)
    if not computed:
        model = model.to("meta")
    return Description(config, spent, stages(model, image), computed)


def _unknown_of_model(argument: str, value: object) -> ConfigError:
    """Map another library's argument to ours, or show how to change the config field."""
    ours = FIELD_ALIASES.get(argument, argument)
    hint = ""
    if ours in ("classes", "image_size", "patch_size", "channels"):
        hint = f"vitrail calls it {ours}: {ours}={value!r}"
    elif ours in ViTConfig.model_fields:
        hint = f"change it in the config: create(variant_config(…).replace({ours}={value_here(argument, value)}))"
    elif argument in ("pretrained", "checkpoint_path"):
        hint = "create builds a new model; vitrail.load opens a pretrained one, such as load('timm:name.tag')"
    return unknown_argument(create, argument, hint)


def _config(name: str | ViTConfig) -> ViTConfig:
    if isinstance(name, ViTConfig):
        return name
    if isinstance(name, str):
        return variant_config(name)
    raise ConfigError(f"expected a model name such as 'B/16', or a ViTConfig, found {name!r}")
