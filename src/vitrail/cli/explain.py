"""`vitrail explain`: show which patches a prediction depends on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import vitrail
from vitrail.cli.output import echo, print_table, progress
from vitrail.cli.overrides import Keys, Overrides, read_overrides
from vitrail.text import percent, shorten

if TYPE_CHECKING:
    from vitrail.explanations.files import ExplainedFile

LISTED = 20
"""Rows in the table, and unreadable images listed below it."""


def explain(
    bundle: Annotated[
        str,
        typer.Argument(
            help="The model: a bundle, a folder or weight file of another library, hf:org/name or timm:name.tag."
        ),
    ],
    images: Annotated[
        list[str],
        typer.Argument(
            help="The images: files, folders, quoted patterns, manifests, tar shards, or digits; - reads "
            "paths from stdin."
        ),
    ],
    method: Annotated[str, typer.Option(help="Method: relevance, gradcam, attention, rollout or pca.")] = "relevance",
    target: Annotated[
        str | None,
        typer.Option("--class", help="Class to explain, by name or index; by default the predicted class."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer, counted from 0; -1 is the last. By default the last.")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Attention head, counted from 0; by default the mean over heads.")
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(
            help="Query token: class, distillation, register:N, mean, pool, or a patch as ROW,COLUMN. By "
            "default the token that the head reads."
        ),
    ] = None,
    fuse: Annotated[str, typer.Option(help="How rollout combines the heads: mean, max or min.")] = "mean",
    discard: Annotated[float, typer.Option(help="Fraction of the lowest attention weights that rollout drops.")] = 0.0,
    grid: Annotated[
        str | None, typer.Option(help="Show all heads or all layers in one image: heads or layers.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("explanations"),
    arrays: Annotated[bool, typer.Option("--arrays", help="Also write the maps as .npy files.")] = False,
    opacity: Annotated[float, typer.Option(min=0, max=1, help="Opacity of the map over the image.")] = 0.6,
    side: Annotated[
        int | None, typer.Option(min=16, max=8192, help="Longer side of an image in the output, in pixels.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    override: Overrides = None,
    keys: Keys = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Show which patches support a prediction, or what a model attends to: write a PNG per image."""
    with progress() as bar:
        done = vitrail.explain_files(
            bundle,
            images,
            method=method,  # type: ignore[arg-type]  # checked there
            target=target,
            layer=layer,
            head=head,
            query=query,
            fuse=fuse,  # type: ignore[arg-type]  # checked there
            discard=discard,
            grid=grid,  # type: ignore[arg-type]  # checked there
            out=out,
            arrays=arrays,
            opacity=opacity,
            side=side,
            device=device,
            overrides=read_overrides(override),
            keys=keys,
            overwrite=overwrite,
            on_progress=bar,
        )
    for text in done.skipped:
        echo(f"vitrail: {text}", err=True)
    rows = [_row(file, targeted=done.targeted) for file in done.files[:LISTED]]
    about = ("output", "value") if any(file.value for file in done.files) else ("class", "confidence")
    titles = ("image", *about, "written") if done.targeted else ("image", "written")
    print_table(titles, rows, numbers=about[1:])
    if len(done.files) > LISTED:
        echo(f"… and {len(done.files) - LISTED:,} more in {out}")
    for text in done.bad[:LISTED]:
        echo(f"skipped: {text}", err=True)
    if len(done.bad) > LISTED:
        echo(f"skipped: {len(done.bad) - LISTED:,} more", err=True)


def _row(file: "ExplainedFile", *, targeted: bool) -> tuple[str, ...]:
    if not targeted:
        return shorten(file.name), str(file.image)
    probability = file.value or ("" if file.probability is None else f"{percent(file.probability)}%")
    return shorten(file.name), "" if file.target is None else str(file.target), probability, str(file.image)
