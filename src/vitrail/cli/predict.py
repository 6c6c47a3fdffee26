"""`vitrail predict`: classify images."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.overrides import Keys, Overrides, open_model
from vitrail.cli.tables import progress
from vitrail.cli.terminal import echo

if TYPE_CHECKING:
    from vitrail.inference.predict import Summary


def predict(
    bundle: Annotated[str, typer.Argument(help="A folder, a weight file of any family, or hf:org/name.")],
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Files, folders, patterns, manifests (.csv, .jsonl, .parquet), tar shards; - reads paths from stdin."
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="How many classes to list.")] = 5,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write; by default stdout.")] = None,
    format: Annotated[
        str | None,
        typer.Option(help="table, jsonl, csv or parquet; by default from the file name, or a table on a terminal."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 64,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Decoder processes; 0 decodes in this process. By default it depends on device and engine."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    engine: Annotated[str, typer.Option(help="torch, onnx or openvino.")] = "torch",
    precision: Annotated[str, typer.Option(help="float32, bf16, fp16 or auto.")] = "float32",
    override: Overrides = None,
    keys: Keys = None,
    null: Annotated[
        bool, typer.Option("--null", "-0", help="Paths on stdin are separated by NUL, not by newlines.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted job, if there is one.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary on stderr.")] = False,
) -> None:
    """Classify images: the most likely classes of each, in input order."""
    from vitrail.inference.predict import predict_files
    from vitrail.inference.writing import choose_format

    model = open_model(bundle, override, keys)
    # A progress bar would interleave with the rows on the terminal.
    hidden = quiet or (output is None and sys.stdout.isatty())
    try:
        with progress("predicting") as on_predicted:
            done = predict_files(
                model,
                paths,
                output=output,
                format=format,
                top=top,
                batch=batch,
                workers=workers,
                device=device,
                engine=engine,
                precision=precision,
                null=null,
                resume=resume,
                overwrite=overwrite,
                on_progress=None if hidden else on_predicted,
            )
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
    except KeyboardInterrupt:
        if output is not None and not quiet and choose_format(format, output, interactive=False) != "table":
            echo(f"vitrail: stopped; rerun the same command with --resume to resume {output}", err=True)
        raise
    if not quiet:
        for text in done.skipped.messages():
            echo(f"vitrail: {text}", err=True)
        echo(_summary(done, output), err=True)


def _summary(done: "Summary", output: Path | None) -> str:
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
    return "; ".join(words) + ("" if output is None else f"; written to {output}")
