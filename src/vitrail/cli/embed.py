"""`vitrail embed`: what a model makes of images, as numbers in a file."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.overrides import Keys, Overrides, open_model
from vitrail.cli.tables import progress
from vitrail.cli.terminal import echo

LISTED = 10
"""Unreadable images listed."""


def embed(
    bundle: Annotated[str, typer.Argument(help="A folder, a weight file of any family, or hf:org/name.")],
    data: Annotated[str, typer.Argument(help="A folder, a manifest (.csv, .jsonl, .parquet), tar shards, or digits.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write: .parquet, .npy or .safetensors.")
    ] = Path("features.parquet"),
    tokens: Annotated[
        str, typer.Option(help="pooled (what the head sees), class, patches or registers (tokens).")
    ] = "pooled",
    layer: Annotated[int | None, typer.Option(help="After which layer, from 0; -1 is the last, as by default.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Tokens as they leave the layer, without the model's final norm.")
    ] = False,
    normalise: Annotated[bool, typer.Option("--normalise", help="Scale every vector to length 1.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or float16: how the numbers are written.")] = "float32",
    split: Annotated[str, typer.Option(help="all, train, val or test.")] = "all",
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 64,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that decode; 0 uses none. As a rule one for each core.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, bf16 or fp16.")] = "float32",
    override: Overrides = None,
    keys: Keys = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
) -> None:
    """Write features of images to a file: pooled vectors or tokens, of any layer, a row for each image."""
    from vitrail.inference.embed import check_output, embed_source
    from vitrail.inference.feature_files import check_dtype
    from vitrail.inference.features import ComputeOptions, FeatureRequest

    check_output(output, overwrite=overwrite)
    check_dtype(dtype)
    from vitrail.data.sources.selection import choose_images, recorded_split

    how = ComputeOptions(device, precision, batch, workers)  # type: ignore[arg-type]
    how.check()  # before anything is read
    model, request = open_model(bundle, override, keys), FeatureRequest(tokens, layer, normalise, raw)  # type: ignore[arg-type]
    request.check(model.model.config)
    with progress("listing") as on_found:
        chosen = choose_images(
            data, split, record=recorded_split(model.origin), on_progress=lambda found: on_found(found, None)
        )
    with progress("embedding") as on_embedded:
        done = embed_source(
            model,
            chosen.source,
            output,
            request,
            replace(how, on_progress=on_embedded),
            dtype=dtype,  # type: ignore[arg-type]
            overwrite=overwrite,
        )
    beside = "" if done.names is None else f"; names and labels are in {done.names}"
    echo(f"{' × '.join(f'{size:,}' for size in done.shape)} {dtype} in {done.output}{beside}")
    if done.bad:
        noun = "image" if len(done.bad) == 1 else "images"
        echo(f"{len(done.bad):,} {noun} could not be read and left out:", err=True)
        for image in done.bad[:LISTED]:
            echo(f"  {image.name}: {image.reason}", err=True)
        if len(done.bad) > LISTED:
            echo(f"  … and {len(done.bad) - LISTED:,} more", err=True)
