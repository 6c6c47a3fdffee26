"""`vitrail embed`: write the features of images to a file."""

from pathlib import Path
from typing import Annotated

import typer

import vitrail
from vitrail.cli.output import echo, progress
from vitrail.cli.overrides import Calibrate, Keys, Overrides, read_overrides
from vitrail.cli.ray_options import Chunk, Ray, RayWorkers, ray_options

LISTED = 10
"""Unreadable images listed."""


def embed(
    bundle: Annotated[
        str,
        typer.Argument(
            help="The model: a bundle, a folder or weight file of another library, hf:org/name or timm:name.tag."
        ),
    ],
    data: Annotated[
        str,
        typer.Argument(help="The images: a folder, a manifest (.csv, .tsv, .jsonl, .parquet), tar shards, or digits."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write: .parquet, .npy or .safetensors; with --ray a folder.")
    ] = Path("features.parquet"),
    tokens: Annotated[
        str, typer.Option(help="Tokens to write: pooled (the input of the head), class, patches or registers.")
    ] = "pooled",
    layer: Annotated[
        int | None, typer.Option(help="Layer, counted from 0; -1 is the last. By default the last.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Write the tokens without the final norm.")] = False,
    normalise: Annotated[bool, typer.Option("--normalise", help="Scale every vector to unit length (L2).")] = False,
    dtype: Annotated[str, typer.Option(help="dtype of the output: float32 or float16.")] = "float32",
    split: Annotated[str, typer.Option(help="Split: all, train, val or test.")] = "all",
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 64,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of decoder processes; 0 decodes in the main process. By default one per core."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    precision: Annotated[
        str,
        typer.Option(
            help="Precision: float32, bf16, fp16, int8 (on a CPU, see --calibrate), or auto: bf16 if it is faster and "
            "gives the same results."
        ),
    ] = "auto",
    decode: Annotated[
        str, typer.Option(help="Where JPEGs are decoded: cpu, gpu (nvImageCodec), or auto, which picks the faster.")
    ] = "auto",
    calibrate: Calibrate = None,
    override: Overrides = None,
    keys: Keys = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --ray: resume an interrupted command.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    ray: Ray = None,
    ray_workers: RayWorkers = None,
    chunk: Chunk = None,
) -> None:
    """Write the features of images to a file: pooled vectors or tokens of any layer, one row per image."""
    with progress() as bar:
        done = vitrail.embed(  # type: ignore[call-overload,misc]  # words are checked there
            bundle,
            data,
            output,
            tokens=tokens,
            layer=layer,
            normalise=normalise,
            raw=raw,
            split=split,
            dtype=dtype,
            batch=batch,
            workers=workers,
            decode=decode,
            device=device,
            precision=precision,
            calibrate=calibrate,
            overrides=read_overrides(override),
            keys=keys,
            resume=resume,
            overwrite=overwrite,
            ray=ray_options(ray, ray_workers, chunk),
            on_progress=bar,
            on_plan=bar.say,
        )
    sidecar = "" if done.names is None else f"; names and labels are in {done.names}"
    echo(f"{' × '.join(f'{size:,}' for size in done.shape)} {dtype} in {done.output}{sidecar}")
    if done.bad:
        noun = "image" if len(done.bad) == 1 else "images"
        echo(
            f"{len(done.bad):,} {noun} could not be read and {'was' if len(done.bad) == 1 else 'were'} skipped:",
            err=True,
        )
        for image in done.bad[:LISTED]:
            echo(f"  {image.name}: {image.reason}", err=True)
        if len(done.bad) > LISTED:
            echo(f"  … and {len(done.bad) - LISTED:,} more", err=True)
