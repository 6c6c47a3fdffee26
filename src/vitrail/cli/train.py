"""`vitrail train`: train a classifier on a folder of images, and evaluate it."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.output import echo, print_table
from vitrail.cli.overrides import Keys, Overrides, read_overrides

if TYPE_CHECKING:
    from vitrail.training.sweep import Sweep
    from vitrail.training.train import Run

RECIPES = (
    "scratch-small",
    "finetune",
    "linear-probe",
    "finetune-paper",
    "pretrain-paper",
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
    override: Overrides = None,
    keys: Keys = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default runs/DATA-HASH, with a hash of the recipe.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting of the recipe, such as optimizer.lr=3e-4. Can be repeated."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Train with several values, such as optimizer.lr=.003,.01,.03, and keep the best on the "
            "validation split. Can be repeated."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Number of data-loading processes; on a CPU, by default one per four cores."),
    ] = None,
) -> None:
    """Train or fine-tune an image classifier, and evaluate it. Rerun the same command to resume."""
    from vitrail.training.sessions import Stopped
    from vitrail.training.train import train as run_training

    overrides = read_overrides(override)
    is_main = os.environ.get("RANK", "0") == "0"  # set by torchrun
    try:
        if sweep:
            done = _sweep(data, sweep, recipe, changes or [], pretrained, overrides, keys, run, device, workers)
        else:
            done = run_training(
                data,
                recipe=recipe,
                changes=changes or (),
                pretrained=pretrained,
                overrides=overrides,
                keys=keys,
                folder=run,
                device=device,
                workers=workers,
            )
    except Stopped as stopped:
        if is_main:
            echo("stopped; the run is saved, rerun the same command to resume it", err=True)
        raise typer.Exit(128 + stopped.number) from None
    if is_main and not _same_stream():  # else the log has just shown it
        echo(f"the best model is {done.folder / 'best'}; the run is in {done.folder}")
        echo(done.summary)
    if is_main:
        _report(done.folder)


def _report(folder: Path) -> None:
    """Write the report; a failure does not fail the run."""
    from vitrail.reports.report import report_of_finished

    path, message = report_of_finished(folder)
    echo(message, err=path is None)


def _same_stream() -> bool:
    """Return whether stdout and stderr go to the same place."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:
        return False


def _sweep(
    data: str,
    texts: list[str],
    recipe: str | None,
    changes: list[str],
    pretrained: str | None,
    overrides: dict[str, Any],
    keys: Path | None,
    folder: Path | None,
    device: str,
    workers: int | None,
) -> "Run":
    """Run a sweep, print its results, and return the best run."""
    from vitrail.training.grid import read_sweep
    from vitrail.training.sweep import sweep

    over = read_sweep(texts)
    done = sweep(
        data,
        over=over,
        recipe=recipe,
        changes=changes,
        pretrained=pretrained,
        overrides=overrides,
        keys=keys,
        folder=folder,
        device=device,
        workers=workers,
    )
    _print_sweep(done, list(over))
    return done.best


def _print_sweep(done: "Sweep", keys: list[str]) -> None:
    from vitrail.training.grid import format_value

    headline, by = done.task.headline, done.task.criteria[done.criterion]
    shown = [headline, *([by] if by.key not in (headline.key, "val_loss") else [])]
    numbers = (*(f"val {one.name}" for one in shown), "val loss", "best step", "minutes")
    rows = []
    for candidate in done.candidates:
        outcome = candidate.outcome
        scores = ["–"] * (len(shown) + 2)
        if outcome.metrics:
            reached = [one.show(outcome.metrics[one.key]) for one in shown]
            scores = [*reached, f"{outcome.metrics['val_loss']:.4f}", f"{outcome.best_step:,}"]
        result = "diverged" if outcome.diverged else "best" if candidate is done.chosen else ""
        values = [format_value(candidate.values[key]) for key in keys]
        rows.append((*values, *scores, f"{outcome.seconds / 60:.1f}", result))
    print_table((*keys, *numbers, "result"), rows, numbers=(*keys, *numbers))
    for spread in done.seeds:
        which = "".join(f"{key}={format_value(value)}, " for key, value in spread.values.items())
        echo(
            f"{which}{spread.runs} seeds: mean validation {headline.name} {headline.show(spread.mean)}, range "
            f"{headline.show(spread.low)} to {headline.show(spread.high)}"
        )
    if done.seeds:
        echo(
            "The best of several seeds is partly luck: expect the mean from a new run. If the data has no splits, "
            "every seed drew its own."
        )
    echo("")
