"""`vitrail predict`: classify images."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import vitrail
from vitrail.cli.output import echo, progress
from vitrail.cli.overrides import Calibrate, Keys, Overrides, read_overrides
from vitrail.cli.ray_options import Chunk, Ray, RayWorkers, ray_options

if TYPE_CHECKING:
    from vitrail.inference.bulk_prediction import Summary


def predict(
    bundle: Annotated[
        str,
        typer.Argument(
            help="The model: a bundle, a folder or weight file of another library, hf:org/name or timm:name.tag."
        ),
    ],
    paths: Annotated[
        list[str],
        typer.Argument(
            help="The images: files, folders, quoted patterns, manifests, tar shards, or digits; - reads "
            "paths from stdin."
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Number of classes per image.")] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write, or with --ray a folder; by default stdout.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="Format: table, jsonl, csv or parquet. By default that of the file name; on stdout, a table "
            "on a terminal and jsonl in a pipe."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 64,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of decoder processes; 0 decodes in the main process. The default depends on the "
            "device and the engine.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    engine: Annotated[str, typer.Option(help="Engine: torch, onnx or openvino.")] = "torch",
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
    null: Annotated[
        bool,
        typer.Option("--null", "-0", help="Paths on stdin are separated by NUL bytes, as find -print0 writes them."),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume an interrupted command; if there is none, start from the beginning."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    masks: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the masks of a segmentation model: masks/….png with class indices, and overlays/….jpg to "
            "look at, named like the images."
        ),
    ] = None,
    window: Annotated[
        float | None,
        typer.Option(
            metavar="SCALE",
            help="For segmentation of large images: use overlapping windows of the image at this scale (1: every "
            "pixel), instead of resizing it to the model's input.",
        ),
    ] = None,
    ray: Ray = None,
    ray_workers: RayWorkers = None,
    chunk: Chunk = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary on stderr.")] = False,
) -> None:
    """Predict images: print or write the prediction for each, such as the most probable classes, in input order."""
    # A progress bar would interleave with the rows on the terminal.
    hidden = quiet or (output is None and sys.stdout.isatty())
    try:
        with progress() as bar:
            done = vitrail.predict(
                bundle,
                paths,
                output="-" if output is None else output,
                format=format,
                top=top,
                batch=batch,
                workers=workers,
                decode=decode,
                device=device,
                engine=engine,
                precision=precision,
                calibrate=calibrate,
                overrides=read_overrides(override),
                keys=keys,
                null=null,
                resume=resume,
                overwrite=overwrite,
                masks=masks,
                window=window,
                ray=ray_options(ray, ray_workers, chunk),
                on_progress=None if hidden else bar,
                on_plan=None if quiet else bar.say,
            )
    except KeyboardInterrupt as stop:
        for note in () if quiet else getattr(stop, "__notes__", ()):
            echo(f"vitrail: stopped; {note}", err=True)
        raise
    if not quiet:
        for text in done.skipped.messages():
            echo(f"vitrail: {text}", err=True)
        echo(_summary(done, output, masks), err=True)


def _summary(done: "Summary", output: Path | None, masks: Path | None) -> str:
    """Return a one-line summary of the job."""
    new = done.images - done.earlier
    words = [f"{done.images:,} {'image' if done.images == 1 else 'images'}"]
    if done.earlier:
        words.append("all predicted earlier" if not new else f"{done.earlier:,} predicted earlier")
    if done.bad:
        words.append(f"{done.bad:,} could not be read")
    if not new:
        words.append("nothing left to do (use --overwrite to predict them again)")
        return "; ".join(words) + f"; the rows are in {output}"
    words.append(f"{new / max(done.seconds, 1e-9):,.1f} images/s, {done.precision}")
    words += [] if output is None else [f"written to {output}"]
    words += [] if masks is None else [f"masks in {masks}"]
    return "; ".join(words)
