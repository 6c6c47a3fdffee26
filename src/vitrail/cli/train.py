"""`vitrail train`: a folder of images in, a measured classifier out."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.overrides import Keys, Overrides, read_overrides
from vitrail.cli.tables import print_table
from vitrail.cli.terminal import echo

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
"""The recipes that come with the package; reading their folder would cost `--help` time."""


def train(
    data: Annotated[
        str, typer.Argument(help="A folder with a sub-folder for each class, a manifest, tar shards; or digits.")
    ] = "digits",
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"A recipe's name, or a TOML file. There are {', '.join(RECIPES)}; by default the first, and with "
            "--from the second."
        ),
    ] = None,
    pretrained: Annotated[
        str | None, typer.Option("--from", help="A model to start from: whatever inspect opens.")
    ] = None,
    override: Overrides = None,
    keys: Keys = None,
    run: Annotated[Path | None, typer.Option(help="The folder of the run; by default runs/<data>-<recipe>.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change the recipe: optimizer.lr=3e-4.")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Try each of some values, and keep the best on the validation split: optimizer.lr=.003,.01,.03."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, or auto.")] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that read images; on a CPU one for each four cores.")
    ] = None,
) -> None:
    """Train a classifier; the same command goes on with a run that was stopped."""
    from vitrail.training.signals import Stopped
    from vitrail.training.train import train as run_training

    said = read_overrides(override)
    is_main = os.environ.get("RANK", "0") == "0"  # among the processes that torchrun started
    try:
        if sweep:
            done = _sweep(data, sweep, recipe, changes or [], pretrained, said, keys, run, device, workers)
        else:
            done = run_training(
                data,
                recipe=recipe,
                changes=changes or (),
                pretrained=pretrained,
                overrides=said,
                keys=keys,
                folder=run,
                device=device,
                workers=workers,
            )
    except Stopped as stopped:
        if is_main:
            echo("stopped; the run is saved, and the same command goes on with it", err=True)
        raise typer.Exit(128 + stopped.number) from None
    if is_main and not _shown_together():  # else it was shown a moment ago
        echo(f"the best model is {done.folder / 'best'}; the run is in {done.folder}")
        echo(done.summary)
    if is_main:
        _report(done.folder)


def _report(folder: Path) -> None:
    """Write the report; a run is not less finished for lack of one."""
    from vitrail.reports.report import report_of_finished

    path, said = report_of_finished(folder)
    echo(said, err=path is None)


def _shown_together() -> bool:
    """Say whether what is printed and what is reported go to the same place."""
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
    """Run a sweep, print what came of it, and return the best run."""
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
    from vitrail.evaluation import percent
    from vitrail.training.criterion import COLUMNS, TITLES
    from vitrail.training.grid import format_value

    by = done.criterion if done.criterion in ("balanced_accuracy", "macro_f1") else None
    numbers = ("val accuracy", *((f"val {TITLES[by]}",) if by else ()), "val loss", "best step", "minutes")
    rows = []
    for candidate in done.candidates:
        outcome = candidate.outcome
        measured = ["–"] * (4 if by else 3)
        if outcome.val_top1 is not None and outcome.val_loss is not None:
            reached = [f"{percent(getattr(outcome, COLUMNS[by]))}%"] if by else []
            measured = [f"{percent(outcome.val_top1)}%", *reached, f"{outcome.val_loss:.4f}", f"{outcome.best_step:,}"]
        result = "diverged" if outcome.diverged else "best" if candidate is done.chosen else ""
        values = [format_value(candidate.values[key]) for key in keys]
        rows.append((*values, *measured, f"{outcome.seconds / 60:.1f}", result))
    print_table((*keys, *numbers, "result"), rows, numbers=(*keys, *numbers))
    for spread in done.seeds:
        which = "".join(f"{key}={format_value(value)}, " for key, value in spread.values.items())
        echo(
            f"{which}{spread.runs} seeds: {percent(spread.mean)}% of the validation split on average, "
            f"{percent(spread.low)}–{percent(spread.high)}"
        )
    if done.seeds:
        echo(
            "The best of several seeds is partly luck: expect the average of a new run. Where the data names no "
            "splits, every seed has drawn its own."
        )
    echo("")
