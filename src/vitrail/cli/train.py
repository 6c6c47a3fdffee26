"""`vitrail train`: a folder of pictures in, a measured classifier out."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def train(
    data: Annotated[
        str, typer.Argument(help="A folder with a sub-folder for each class, a manifest, tar shards; or digits.")
    ] = "digits",
    recipe: Annotated[str | None, typer.Option(help="A recipe's name, or a TOML file.")] = None,
    start: Annotated[str | None, typer.Option("--from", help="A model to start from: whatever inspect opens.")] = None,
    run: Annotated[Path | None, typer.Option(help="The folder of the run; by default runs/<data>-<recipe>.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change the recipe: optimizer.lr=3e-4.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, or auto.")] = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes that read pictures.")] = None,
) -> None:
    """Train a classifier; the same command goes on with a run that was stopped."""
    from vitrail.training.signals import Stopped
    from vitrail.training.train import train as run_training

    is_main = os.environ.get("RANK", "0") == "0"  # among the processes that torchrun started
    try:
        done = run_training(
            data, recipe=recipe, changes=changes or (), start=start, folder=run, device=device, workers=workers
        )
    except Stopped as stopped:
        if is_main:
            typer.echo("stopped; the run is saved, and the same command goes on with it", err=True)
        raise typer.Exit(128 + stopped.number) from None
    if is_main and not (sys.stdout.isatty() and sys.stderr.isatty()):  # else it was shown a moment ago
        typer.echo(f"the best model is {done.folder / 'best'}; the run is in {done.folder}")
        typer.echo(done.verdict)
