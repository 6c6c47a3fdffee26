"""The public functions: `vitrail.create`, `vitrail.train`, `vitrail.evaluate` and so on."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Never

from vitrail.acceleration.accelerate import Accelerated, accelerate
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.convert import Conversion, convert
from vitrail.checkpoints.inspect import Inspection, inspect
from vitrail.checkpoints.load import load, ready_bundle
from vitrail.data.checking.full_check import DataCheck
from vitrail.data.checking.full_check import check as check_data
from vitrail.data.decoder_choice import check_decode
from vitrail.data.sources.given import Data, given_data
from vitrail.data.sources.in_memory import InMemory
from vitrail.data.sources.selection import choose_images, recorded_split
from vitrail.data.sources.targets import Labelling
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation import evaluate_chosen, labelling_for
from vitrail.explanations.attention import Fuse, Query
from vitrail.explanations.explain import Each, Explainer, check_grid, explain
from vitrail.explanations.explanation import Explanation, ending_of, plan_outputs
from vitrail.explanations.figures.draw import WITH_IMAGES, DrawnFigures, check_folder, draw_figures, select_figures
from vitrail.explanations.files import Drawing, ExplainedFiles, write_explanations
from vitrail.explanations.request import ExplanationRequest, Method
from vitrail.exporting import Export, export
from vitrail.inference.benchmark import Benchmark, bench
from vitrail.inference.bulk_prediction import Summary
from vitrail.inference.embed import EmbedResult, embed
from vitrail.inference.features import Features
from vitrail.inference.listing import EMPTY_STDIN, STDIN, list_items, read_stdin
from vitrail.inference.predict import predict
from vitrail.inference.probe import ProbeResult, probe
from vitrail.inference.ray_cluster import RayOptions
from vitrail.inference.skipped import SkippedFiles
from vitrail.models.create import Description, ModelInfo, create, describe, list_models
from vitrail.reports.report import report, report_of_finished
from vitrail.runtime import OnPlan, OnProgress, PrecisionChoice, autocast, choose_device, on_stage
from vitrail.serving.settings import Settings
from vitrail.tasks.classification import ClassPrediction
from vitrail.tasks.classification_metrics import ClassificationMetrics
from vitrail.tasks.lookup import task_named
from vitrail.tasks.metrics import Metrics
from vitrail.tasks.task import Prediction
from vitrail.text import printable, printable_path
from vitrail.training.candidate_results import CandidateSweep
from vitrail.training.cluster import ClusterPlan
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import ANY_METHOD, default_recipe, recipe_for, unknown_setting
from vitrail.training.sweep import Sweep, sweep
from vitrail.training.train import Run, plan
from vitrail.training.train import train as train_run

__all__ = [
    "Accelerated",
    "Benchmark",
    "CandidateSweep",
    "ClassPrediction",
    "ClassificationMetrics",
    "ClusterPlan",
    "Conversion",
    "Data",
    "DataCheck",
    "Description",
    "DrawnFigures",
    "EmbedResult",
    "ExplainedFiles",
    "Explanation",
    "Export",
    "Features",
    "Inspection",
    "Metrics",
    "ModelInfo",
    "Prediction",
    "ProbeResult",
    "RayOptions",
    "Run",
    "ServeSettings",
    "Summary",
    "Sweep",
    "accelerate",
    "bench",
    "check",
    "convert",
    "create",
    "describe",
    "embed",
    "evaluate",
    "explain",
    "explain_files",
    "export",
    "figures",
    "inspect",
    "list_models",
    "load",
    "plan",
    "predict",
    "probe",
    "report",
    "serve",
    "sweep",
    "train",
]

ServeSettings = Settings
_SERVE_PACKAGES = ("starlette", "uvicorn", "prometheus_client", "python_multipart")


def train(
    data: Data = "digits",
    *,
    recipe: str | Path | Recipe | None = None,
    changes: Sequence[str] = (),
    pretrained: str | Path | Bundle | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    teacher: str | Path | Bundle | None = None,
    folder: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    quiet: bool = False,
    evaluate_on: Literal["test", "val"] = "test",
    **unknown: Never,
) -> Run:
    """Train or fine-tune an image classifier, evaluate it on the test split, and write a report.

    `data` is a path or images in Python (`Data`). The same call resumes an interrupted run, because the same data and
    recipe give the same `folder`.

    `recipe` is the name of a built-in recipe, the path of a TOML file, or a `Recipe`. `changes` change its settings,
    such as `["optimizer.lr=3e-4", "epochs=50"]`. `pretrained` is the model to fine-tune; `overrides` and `keys`
    describe its checkpoint, as in `load`. `teacher` is a classifier of the same classes to learn from, besides the
    labels; the recipe's table `teacher` says how. While you tune settings, pass `evaluate_on="val"` to leave the test
    split untouched; call `train` again without it to evaluate on the test split and write the report.
    """
    for argument in unknown:
        raise unknown_setting(train, argument, unknown[argument])
    data = _given(data, None, recipe or default_recipe(pretrained, None), changes)
    run = train_run(
        data, recipe=recipe, changes=changes, pretrained=pretrained, overrides=overrides, keys=keys, teacher=teacher,
        folder=folder, device=device, workers=workers, quiet=quiet, evaluate_on=evaluate_on,
    )  # fmt: skip
    if evaluate_on != "test" or os.environ.get("RANK", "0") != "0":  # only rank 0 writes the report
        return run
    return _with_report(run, data, quiet=quiet)


def _given(data: Data, method: str | None, recipe: str | Path | Recipe, changes: Sequence[str]) -> Data:
    """Open images in Python, labelled as the recipe says."""
    if isinstance(data, str | bytes | os.PathLike):  # of several ranks, one reports what is wrong with a recipe
        return data
    return given_data(data, labelling=recipe_for(method, recipe, changes).labelling)


def _with_report(run: Run, data: Data, *, quiet: bool) -> Run:
    """Write the report of a finished run."""
    path, message = report_of_finished(run.folder, data if isinstance(data, InMemory) else None)
    if not quiet:
        print(printable(message), file=sys.stderr)
    return replace(run, report=path)


def pretrain(
    images: Data,
    *,
    method: str | None = None,
    teacher: str | Path | Bundle | None = None,
    recipe: str | Path | Recipe | None = None,
    changes: Sequence[str] = (),
    folder: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    quiet: bool = False,
    **unknown: Never,
) -> Run:
    """Pretrain a model on images without labels; the result is a bundle without a head, to fine-tune with `train`.

    `method` is "mae", a masked autoencoder, "masked-patches", the ViT paper's own, "dino", self-distillation, or
    "distill", which learns the features of a `teacher`. The default is the method of the `recipe`, or "mae".
    `recipe` replaces the recipe of that name by a TOML file or a `Recipe`; `changes` change its settings. Labels are
    ignored, except that with them the kNN accuracy of the features is reported. The same call resumes an interrupted
    run. A report is written at the end.
    """
    for argument in unknown:
        raise unknown_setting(pretrain, argument, unknown[argument])
    method = method or ANY_METHOD
    data = _given(images, method, recipe or default_recipe(None, method), changes)
    run = train_run(
        data, method=method, recipe=recipe, changes=changes, teacher=teacher, folder=folder, device=device,
        workers=workers, quiet=quiet,
    )  # fmt: skip
    return run if os.environ.get("RANK", "0") != "0" else _with_report(run, data, quiet=quiet)


def evaluate(
    model: str | Path | Bundle,
    data: Data,
    *,
    split: Literal["test", "val", "train", "all"] | None = None,
    by_number: bool = False,
    device: str = "auto",
    precision: PrecisionChoice = "auto",
    batch: int = 64,
    workers: int | None = None,
    decode: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    on_progress: OnProgress | None = None,
    on_plan: OnPlan | None = None,
) -> Metrics:
    """Evaluate a model on labelled images. Returns the same type as `Run.metrics`.

    By default it uses the test split that the data defines, or its validation split. If the data defines neither, it
    uses the test split of the model's run, or else all images. `summary` says which split it was, and whether the model
    was trained on it. `by_number` matches classes by index instead of by name. `bad` lists unreadable images.
    `overrides` and `keys` are those of `load`; `decode` is that of `predict`.
    """
    autocast(choose_device(device), "float32" if precision == "auto" else precision)  # fail early if one is wrong
    check_decode(decode)
    bundle = ready_bundle(model, overrides=overrides, keys=keys)
    record = recorded_split(bundle.origin)
    chosen = choose_images(
        data, split, record=record, labelling=labelling_for(bundle, data), on_progress=on_stage(on_progress, "listing")
    )
    return evaluate_chosen(
        bundle,
        chosen,
        record,
        device=device,
        precision=precision,
        batch=batch,
        workers=workers,
        decode=decode,
        by_number=by_number,
        on_progress=on_stage(on_progress, "evaluating"),
        on_plan=on_plan,
    )


def check(
    data: Data,
    *,
    task: str | None = None,
    labels: str | Sequence[str] = (),
    ignore: Sequence[int] = (),
    size: int = 224,
    images_per_second: float | None = None,
    sheet: str | Path | None = None,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> DataCheck:
    """Find unreadable files, duplicates, class imbalance and outliers in a dataset, and measure how fast it loads.

    Every image is decoded, by `workers` processes (by default one per core). `size` is the image size of your model.
    With `images_per_second`, the training speed of your device, `bounds` says how many workers it needs. `sheet` is a
    PNG file to write: a few images of each class. `task`, `labels` and `ignore` are the recipe's `task`, `data.labels`
    (the columns that hold the labels) and `data.ignore` (values in masks); by default the labels decide. Raises
    `DataError` if no image can be read.
    """
    columns = (labels,) if isinstance(labels, str) else tuple(labels)
    labelling = Labelling(None if task is None else task_named(task).kind, columns, None, tuple(ignore))
    return check_data(
        data, size=size, images_per_second=images_per_second, sheet=sheet, workers=workers, labelling=labelling,
        on_progress=on_progress,
    )  # fmt: skip


def figures(
    model: str | Path | Bundle,
    images: str | Path | Sequence[str | Path] = (),
    *,
    out: str | Path = "figures",
    only: Sequence[str] | None = None,
    device: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> DrawnFigures:
    """Draw the figures of the ViT paper into a folder, with captions: filters, positions, distance and rollout.

    `filters` and `positions` are drawn from the weights. `distance` and `rollout` need `images`: files, folders or
    patterns, of which at most 128 are sampled. `only` names the figures to draw, by default all that are possible.
    `overrides` and `keys` are those of `load`.
    """
    places = _places(images)
    selected, folder = select_figures(only, with_images=bool(places)), Path(out)
    check_folder(folder, selected, overwrite=overwrite)
    choose_device(device)  # fail early on a wrong device
    items = list_items(places, stdin=read_stdin())
    bundle = ready_bundle(model, overrides=overrides, keys=keys)
    drawn = draw_figures(bundle, items, selected, folder, device=device, overwrite=overwrite, on_progress=on_progress)
    return drawn._replace(left_out=() if places or only else WITH_IMAGES)


def explain_files(
    model: str | Path | Bundle,
    images: str | Path | Sequence[str | Path],
    *,
    method: Method = "relevance",
    target: str | int | None = None,
    layer: int | None = None,
    head: int | None = None,
    query: Query | None = None,
    fuse: Fuse = "mean",
    discard: float = 0.0,
    grid: Each | None = None,
    out: str | Path = "explanations",
    arrays: bool = False,
    opacity: float = 0.6,
    side: int | None = None,
    device: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> ExplainedFiles:
    """Explain many images and write a PNG per image to the folder `out`, and with `arrays` the map as .npy.

    `images` are files, folders, patterns, manifests or tar shards. `method` and its options are those of `explain`.
    `grid` shows all "heads" or all "layers" in one image. `opacity` is that of the map, `side` the longer side of an
    image in pixels. `overrides` and `keys` are those of `load`.
    """
    request = ExplanationRequest(method, layer, head, query, fuse, discard)
    if grid is not None:
        check_grid(request, grid)
    places, skipped = _places(images), SkippedFiles()
    items = list(list_items(places, stdin=read_stdin(), skipped=skipped))
    if not items:
        none = EMPTY_STDIN if set(places) == {STDIN} else f"no images in {', '.join(map(printable_path, places))}"
        raise DataError("; ".join([none, *skipped.messages()]))
    ending = ending_of(request, None if target is None else str(target), grid)
    names = [item.name for item in items]
    planned = plan_outputs(names, Path(out), ending, arrays=arrays, overwrite=overwrite)
    bundle = ready_bundle(model, overrides=overrides, keys=keys)
    explainer, drawing = Explainer(bundle, request, target=target, device=device), Drawing(grid, opacity, side)
    done = write_explanations(explainer, items, planned, drawing, overwrite=overwrite, on_progress=on_progress)
    return done._replace(skipped=tuple(skipped.messages()))


def serve(models: str | Path | Sequence[str | Path] | ServeSettings, *, started: float | None = None) -> None:
    """Serve models over HTTP until a signal stops the process: `serve("runs/pets/best")`, at http://127.0.0.1:8000/.

    `models` is what `load` opens, or "NAME=MODEL", one or several; the first is the default. For another port, a token
    or limits, pass the settings: `serve(ServeSettings(models=["runs/pets/best"], port=9000, token="secret"))`. Needs
    the packages of `vitrail[serve]`. `started` is the time the program started, for the startup time in the log.
    """
    missing = [package for package in _SERVE_PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"vitrail serve needs packages that are not installed ({', '.join(missing)}); install them with pip "
            f"install 'vitrail[serve]'"
        )
    from vitrail.serving.run import serve as run  # needs the packages

    # The settings name the models.
    settings = models if isinstance(models, Settings) else Settings(models=models)  # type: ignore[arg-type]
    run(settings, started=started)


def _places(images: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(images)] if isinstance(images, str | Path) else [str(image) for image in images]
