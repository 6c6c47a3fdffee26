"""`vitrail train`: a folder of pictures in, a measured classifier out."""

from pathlib import Path
from typing import Annotated

import typer

RECIPES = (
    "scratch-small",
    "finetune",
    "linear-probe",
    "finetune-paper",
    "pretrain-paper",
    "augreg",
    "plain-baseline",
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
    start: Annotated[str | None, typer.Option("--from", help="A model to start from: whatever inspect opens.")] = None,
    run: Annotated[Path | None, typer.Option(help="The folder of the run; by default runs/<data>-<recipe>.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change the recipe: optimizer.lr=3e-4.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, or auto.")] = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes that read pictures.")] = None,
) -> None:
    """Train a classifier; the same command goes on with a run that was stopped."""
    from vitrail.training.loop import Stopped
    from vitrail.training.train import train as run_training

    try:
        done = run_training(
            data, recipe=recipe, changes=changes or (), start=start, folder=run, device=device, workers=workers
        )
    except Stopped as stopped:
        typer.echo("stopped; the run is saved, and the same command goes on with it", err=True)
        raise typer.Exit(128 + stopped.number) from None
    typer.echo(done.verdict)
    typer.echo(f"the best model is {done.folder / 'best'}; the run is in {done.folder}")
