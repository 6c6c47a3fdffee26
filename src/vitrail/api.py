"""The public functions: what `import vitrail` offers, each one call deep."""

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
from vitrail.inference.probe import probe
from vitrail.inference.probe_result import ProbeResult
from vitrail.models.config import CALLED_ELSEWHERE, ViTConfig
from vitrail.models.cost import Cost, cost
from vitrail.models.stages import Stage, sample_image, stages
from vitrail.models.variants import variant_config
from vitrail.models.vit import ViT
from vitrail.reports.report import report, report_of_finished
from vitrail.runtime import Precision, autocast, choose_device
from vitrail.terminal import printable
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
"""A model of more parameters is described without computing anything, because drawing its weights takes long."""


def create(
    name: str | ViTConfig,
    *,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    **unknown: Never,
) -> ViT:
    """Build a fresh model: `create("B/16")`, `create("vit_small_patch16_224", classes=10)`, or from a `ViTConfig`.

    The arguments are the fields people change most. Any other is changed in the config:
    `create(variant_config("B/16").replace(pool="mean"))`.
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
    """Train a classifier on images, or go on with a run that was stopped: the same call finds the same folder.

    `recipe` is the name of one that comes with the package, a TOML file, or a value; `changes` are such as
    "optimizer.lr=3e-4". `start` is a model to begin with; `overrides` and `keys` say what its file does not tell, as
    for `load`. `evaluate_on="val"` leaves the test split alone while
    settings are still being chosen; the same call without it gives the result later, and writes the report.
    """
    for argument in unknown:
        raise unknown_setting(train, argument, unknown[argument])
    run = train_run(
        data, recipe=recipe, changes=changes, pretrained=pretrained, overrides=overrides, keys=keys,
        folder=folder, device=device, workers=workers, quiet=quiet, evaluate_on=evaluate_on,
    )  # fmt: skip
    if evaluate_on != "test" or os.environ.get("RANK", "0") != "0":  # torchrun has started others that do not report
        return run
    path, said = report_of_finished(run.folder)
    if not quiet:
        print(printable(said), file=sys.stderr)
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
    """Evaluate a model on labelled images: what `vitrail eval` prints, as the same kind of object as `Run.metrics`.

    By default the images are the test split that the data names, else its validation split; of a model of `train`, the
    split that its run held out; else all of them. `result` says which, and whether the model has met them before.
    `by_number` matches classes by their order, whatever they are called. Images that cannot be read are in `bad`.
    """
    autocast(choose_device(device), precision)  # refuses a wrong one before anything is read
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
    """A model in numbers."""

    config: ViTConfig
    cost: Cost
    stages: list[Stage]
    computed: bool
    """Whether a real image went through the model; if not, only shapes were worked out."""


def describe(name: str | ViTConfig) -> Description:
    """Send an image made on the spot through a fresh model, and say what it becomes at every stage."""
    config = _config(name)
    spent = cost(config)
    computed = spent.parameters <= LARGE
    with torch.device("cpu" if computed else "meta"), torch.random.fork_rng(devices=[]):
        model, image = ViT(config).eval(), sample_image(config.channels, config.image_size)
    if not computed:
        model = model.to("meta")
    return Description(config, spent, stages(model, image), computed)


def _unknown_of_model(argument: str, value: object) -> ConfigError:
    """Say what another library's argument is called here, or how a field of the config is changed."""
    ours = CALLED_ELSEWHERE.get(argument, argument)
    hint = ""
    if ours in ("classes", "image_size", "patch_size", "channels"):
        hint = f"vitrail calls it {ours}: {ours}={value!r}"
    elif ours in ViTConfig.model_fields:
        hint = f"change it in the config: create(variant_config(…).replace({ours}={value!r}))"
    elif argument in ("pretrained", "checkpoint_path"):
        hint = "create builds a fresh model, and vitrail.load opens a pretrained one, such as load('timm:name.tag')"
    return unknown_argument(create, argument, hint)


def _config(name: str | ViTConfig) -> ViTConfig:
    if isinstance(name, ViTConfig):
        return name
    if isinstance(name, str):
        return variant_config(name)
    raise ConfigError(f"expected a model's name, such as 'B/16', or a ViTConfig, found {name!r}")
