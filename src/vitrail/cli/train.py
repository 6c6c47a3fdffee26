"""`vitrail train`: train a model on labelled images, and evaluate it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import vitrail
from vitrail.cli.output import echo, on_one_stream
from vitrail.cli.overrides import Keys, Overrides, read_overrides
from vitrail.cli.plan import print_plan
from vitrail.cli.sweep import print_candidates, print_sweep, sweep_source

RECIPES = (
    "scratch-small",
    "finetune",
    "lora",
    "linear-probe",
    "finetune-paper",
    "scratch-paper",
    "augreg",
    "plain-baseline",
    "cifar10",
)
"""The built-in recipes, listed here because reading their folder would slow down `--help`."""


def train(
    data: Annotated[
        str,
        typer.Argument(
            help="The images: a folder with one subfolder per class, a manifest, tar shards, Parquet files, or digits."
        ),
    ] = "digits",
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"Recipe: a TOML file, or one of {', '.join(RECIPES)}. By default {RECIPES[0]}, or with "
            f"--from {RECIPES[1]}."
        ),
    ] = None,
    pretrained: Annotated[
        str | None, typer.Option("--from", help="Pretrained model to fine-tune: anything that vitrail inspect opens.")
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(help="Classifier of the same classes to learn from, besides the labels: a model, as for --from."),
    ] = None,
    override: Overrides = None,
    keys: Keys = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default runs/DATA-HASH, with a hash of the recipe.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Task: classification, multilabel, regression or segmentation; by default what the labels are."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting of the recipe, such as optimizer.lr=3e-4. Can be repeated."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Train with several values, such as optimizer.lr=.003,.01,.03, and keep the best on the "
            "validation split. Can be repeated. Or a TOML file with named candidates."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Train only this candidate of the file given to --sweep. Can be repeated.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of runs of a sweep to train at once, in as many processes.")
    ] = 1,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only print the memory and communication that the run needs on --gpus GPUs.")
    ] = False,
    gpus: Annotated[int, typer.Option(min=1, help="With --plan: the number of GPUs.")] = 1,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, help="With --plan: the memory of one GPU in GB; by default this device's.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Number of data-loading processes; on a CPU, by default one per four cores."),
    ] = None,
) -> None:
    """Train or fine-tune a model on labelled images, and evaluate it. Rerun the same command to resume."""
    from vitrail.training.sessions import Stopped

    changes = [*(changes or ()), *([] if task is None else [f"task={task}"])]
    settings: dict[str, Any] = {
        "recipe": recipe,
        "changes": changes,
        "pretrained": pretrained,
        "overrides": read_overrides(override),
        "keys": keys,
        "teacher": teacher,
        "folder": run,
        "device": device,
        "workers": workers,
    }
    is_main = os.environ.get("RANK", "0") == "0"  # set by torchrun
    source = sweep_source(sweep, only, jobs)
    if plan:
        if source is not None:
            raise vitrail.ConfigError("--plan is for one run; leave out --sweep")
        if gpu_memory is not None and not 0 < gpu_memory < float("inf"):
            raise vitrail.ConfigError(f"--gpu-memory is {gpu_memory:g}; give the memory of one GPU in GB")
        memory = None if gpu_memory is None else max(1, round(1e9 * gpu_memory))
        print_plan(
            vitrail.plan(
                data, gpus=gpus, gpu_memory=memory, recipe=recipe, changes=changes, pretrained=pretrained,
                teacher=teacher, device=device,
            )
        )  # fmt: skip
        return
    if gpus != 1 or gpu_memory is not None:
        raise vitrail.ConfigError(
            "--gpus and --gpu-memory belong to --plan; to train on several GPUs, start the command with torchrun "
            "(docs/guides/several-gpus.md)"
        )
    try:
        if isinstance(source, Path):
            print_candidates(vitrail.sweep(data, candidates=source, only=only or (), jobs=jobs, **settings))
            return
        if source is None:
            done = vitrail.train(data, **settings)
        else:
            swept = vitrail.sweep(data, over=source, jobs=jobs, **settings)
            print_sweep(swept)
            done = replace(swept.best, report=_report(swept.best.folder))
    except Stopped as stopped:
        if is_main:
            echo("stopped; the run is saved, rerun the same command to resume it", err=True)
        raise typer.Exit(128 + stopped.number) from None
    if is_main and not on_one_stream():  # else the log has just shown it
        echo(f"the best model is {done.folder / 'best'}; the run is in {done.folder}")
        echo(done.summary)
        if done.report is not None:
            echo(f"the report is {done.report}")


def _report(folder: Path) -> Path | None:
    """Write the report of the selected run; a failure does not fail the sweep."""
    try:
        path = vitrail.report(folder)
    except vitrail.VitrailError as error:
        echo(f"the report was not written: {error}", err=True)
        return None
    echo(f"the report is {path}", err=True)
    return path
