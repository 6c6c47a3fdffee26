"""`vitrail pretrain`: learn from images without labels."""

import os
from pathlib import Path
from typing import Annotated

import typer

import vitrail
from vitrail.cli.output import echo, on_one_stream

METHODS = ("mae", "masked-patches", "dino", "distill")
"""The methods, listed here because importing them would slow down `--help`."""


def pretrain(
    images: Annotated[
        str,
        typer.Argument(
            help="The images: a folder (with or without subfolders), a manifest, tar shards or Parquet files."
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option(help=f"Method: {', '.join(METHODS)}; by default that of --recipe, or {METHODS[0]}."),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="Model whose features are learned, for --method distill: anything that vitrail inspect opens."
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe: a TOML file with the table of a method, instead of the built-in one.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default runs/DATA-HASH, with a hash of the recipe.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting of the recipe, such as mae.mask_ratio=0.6. Can be repeated."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Number of data-loading processes; on a CPU, by default one per four cores."),
    ] = None,
) -> None:
    """Pretrain a ViT on images without labels; fine-tune it with train --from. Rerun the same command to resume."""
    from vitrail.training.sessions import Stopped

    is_main = os.environ.get("RANK", "0") == "0"  # set by torchrun
    try:
        done = vitrail.pretrain(
            images, method=method, teacher=teacher, recipe=recipe, changes=changes or (), folder=run, device=device,
            workers=workers,
        )  # fmt: skip
    except Stopped as stopped:
        if is_main:
            echo("stopped; the run is saved, rerun the same command to resume it", err=True)
        raise typer.Exit(128 + stopped.number) from None
    if is_main and not on_one_stream():  # else the log has just shown it
        echo(f"the pretrained model is {done.folder / 'best'}; the run is in {done.folder}")
        echo(done.summary)
        if done.report is not None:
            echo(f"the report is {done.report}")
