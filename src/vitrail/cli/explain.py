"""`vitrail explain`: show which patches a prediction depends on."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.output import echo, print_table, progress
from vitrail.cli.overrides import Keys, Overrides, open_model

if TYPE_CHECKING:
    from vitrail.data.inputs import Item
    from vitrail.explanations.explain import Explainer
    from vitrail.explanations.explanation import Explanation, Outputs

TILE = 160
"""The longer side of a tile in a grid, in pixels."""
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
    from vitrail.errors import DataError
    from vitrail.explanations.explain import Explainer, check_grid
    from vitrail.explanations.explanation import ending_of, plan_outputs
    from vitrail.explanations.request import ExplanationRequest
    from vitrail.inference.listing import EMPTY_STDIN, STDIN, list_items, read_stdin
    from vitrail.inference.skipped import SkippedFiles
    from vitrail.text import printable_path, shorten

    request = ExplanationRequest(method, layer, head, query, fuse, discard)  # type: ignore[arg-type]
    if grid is not None:
        check_grid(request, grid)
    skipped = SkippedFiles()
    items = list(list_items(images, stdin=read_stdin(), skipped=skipped))
    for text in skipped.messages():
        echo(f"vitrail: {text}", err=True)
    if not items:
        places = ", ".join(map(printable_path, images))
        raise DataError(EMPTY_STDIN if set(images) == {STDIN} else f"no images in {places}")
    ending = ending_of(request, target, grid)
    planned = plan_outputs([item.name for item in items], out, ending, arrays=arrays, overwrite=overwrite)
    explainer = Explainer(open_model(bundle, override, keys), request, target=target, device=device)
    rows, bad = [], []
    with progress("explaining") as on_explained:
        for number, (item, files) in enumerate(zip(items, planned, strict=True)):
            on_explained(number, len(items))
            name = printable_path(os.fsdecode(item.name))
            try:
                explanation = _write(explainer, item, name, files, grid, opacity, side, overwrite)
            except DataError as error:
                bad.append(error)
                continue
            rows.append((shorten(name), *_class_and_confidence(explanation), str(files.image)))
    if not rows:
        raise bad[0]
    titles = ("image", "class", "confidence", "written") if explainer.request.targeted else ("image", "written")
    print_table(
        titles,
        [row if explainer.request.targeted else (row[0], row[-1]) for row in rows[:LISTED]],
        numbers=("confidence",),
    )
    if len(rows) > LISTED:
        echo(f"… and {len(rows) - LISTED:,} more in {out}")
    for unread in bad[:LISTED]:
        echo(f"skipped: {unread}", err=True)
    if len(bad) > LISTED:
        echo(f"skipped: {len(bad) - LISTED:,} more", err=True)


def _write(
    explainer: "Explainer",
    item: "Item",
    name: str,
    files: "Outputs",
    grid: str | None,
    opacity: float,
    side: int | None,
    overwrite: bool,
) -> "Explanation":
    """Explain one image and write its map."""
    import numpy as np

    from vitrail.explanations.explanation import captioned, save_array, save_image, tiled

    if grid is None:
        explanation = explainer.explain(item, name)
        sheet, array = explanation.side_by_side(opacity, side), explanation.map
    else:
        tiles = explainer.grid(item, grid, name)  # type: ignore[arg-type]
        explanation, array = tiles[0].explanation, np.stack([tile.explanation.map for tile in tiles])
        sheet = tiled([tile.explanation.overlay(opacity, side or TILE) for tile in tiles], [t.label for t in tiles])
    save_image(captioned(sheet, explanation.caption), files.image, notes=explanation.notes, overwrite=overwrite)
    if files.array is not None:
        save_array(array, files.array, overwrite=overwrite)
    return explanation


def _class_and_confidence(explanation: "Explanation") -> tuple[str, str]:
    """Return the explained class and its probability."""
    from vitrail.text import percent

    probability = "" if explanation.probability is None else f"{percent(explanation.probability)}%"
    return "" if explanation.target is None else str(explanation.target), probability
