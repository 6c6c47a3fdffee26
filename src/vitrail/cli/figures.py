"""`vitrail figures`: draw the figures of the ViT paper for a model."""

from pathlib import Path
from typing import Annotated

import typer

import vitrail
from vitrail.cli.output import echo, progress
from vitrail.cli.overrides import Keys, Overrides, read_overrides

LISTED = 10
"""Unreadable images listed."""


def figures(
    bundle: Annotated[
        str,
        typer.Argument(
            help="The model: a bundle, a folder or weight file of another library, hf:org/name or timm:name.tag."
        ),
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            help="Images for distance and rollout: files, folders or quoted patterns. At most 128 are sampled."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")] = Path("figures"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Figure to draw: filters, positions, distance or rollout. Can be repeated; by default all, "
            "or without images the first two."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    override: Overrides = None,
    keys: Keys = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing figures.")] = False,
) -> None:
    """Draw the figures of the ViT paper: filters, position similarity, attention distance, attention rollout."""
    with progress() as bar:
        done = vitrail.figures(
            bundle,
            images or (),
            out=out,
            only=only,
            device=device,
            overrides=read_overrides(override),
            keys=keys,
            overwrite=overwrite,
            on_progress=bar,
        )
    for text in done.bad[:LISTED]:
        echo(f"skipped: {text}", err=True)
    if len(done.bad) > LISTED:
        echo(f"skipped: {len(done.bad) - LISTED:,} more", err=True)
    for figure in done.figures:
        echo(f"{figure.name}: {f'not drawn, because {figure.text}' if figure.path is None else figure.path}")
    echo(f"captions: {done.captions}")
    if done.left_out:
        echo(f"not drawn: {' and '.join(done.left_out)}, which need images; pass some after the model", err=True)
