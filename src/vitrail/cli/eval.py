"""`vitrail eval`: evaluate a model on labelled images."""

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

import vitrail
from vitrail.cli.output import echo, print_table, progress
from vitrail.cli.overrides import Keys, Overrides, read_overrides

if TYPE_CHECKING:
    from vitrail.tasks.metrics import Metrics, ResultTable

LISTED = 10
"""Unreadable images listed; the JSON has all of them."""


def eval(
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
    split: Annotated[
        str | None,
        typer.Option(
            help="Split: test, val, train or all. By default the test split, else the validation split, else "
            "all images."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 64,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    precision: Annotated[
        str,
        typer.Option(help="Precision: float32, bf16, fp16, or auto: bf16 if it is faster and gives the same results."),
    ] = "auto",
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of decoder processes; 0 decodes in the main process. By default one per core."
        ),
    ] = None,
    decode: Annotated[
        str, typer.Option(help="Where JPEGs are decoded: cpu, gpu (nvImageCodec), or auto, which picks the faster.")
    ] = "auto",
    override: Overrides = None,
    keys: Keys = None,
    by_number: Annotated[bool, typer.Option("--by-number", help="Match classes by index instead of by name.")] = False,
    every_class: Annotated[bool, typer.Option("--all", help="List every class, not only the weakest ones.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Evaluate a model on labelled images: accuracy, per-class metrics, confusions, calibration, confident mistakes."""
    with progress() as bar:
        evaluation = vitrail.evaluate(
            bundle,
            data,
            split=split,  # type: ignore[arg-type]  # checked there
            by_number=by_number,
            device=device,
            precision=precision,  # type: ignore[arg-type]  # checked there
            batch=batch,
            workers=workers,
            decode=decode,
            overrides=read_overrides(override),
            keys=keys,
            on_progress=bar,
            on_plan=bar.say,
        )
    for warning in evaluation.warnings:
        echo(f"WARNING: {warning}", err=True, bold=True)
    if as_json:
        echo(_compact_json(evaluation.as_dict()))
        return
    _print_metrics(evaluation, every_class)


def _print_metrics(metrics: "Metrics", every_row: bool) -> None:
    echo(f"{metrics.summary}.")
    echo("")
    rows = [(metric.name, metric.text, metric.span) for metric in metrics.numbers]
    print_table(("metric", "value", "95% interval"), rows, numbers=("value",))
    for remark in metrics.remarks:
        echo(remark)
    for table in metrics.tables:
        _print_result_table(table, every_row)
    if metrics.bad:
        _heading("Images that could not be read")
        for image in metrics.bad[:LISTED]:
            echo(f"{image.name}: {image.reason}")
        if len(metrics.bad) > LISTED:
            echo(f"… and {len(metrics.bad) - LISTED:,} more")


def _print_result_table(table: "ResultTable", every_row: bool) -> None:
    _heading(table.title)
    rows = table.rows if every_row else table.rows[: table.shown]
    print_table(table.header, rows, numbers=table.numbers)
    if len(table.rows) > len(rows):
        echo(f"… and {len(table.rows) - len(rows):,} more; --all lists them")
    if table.note:
        echo(table.note)


def _heading(text: str) -> None:
    echo(f"\n{text}", bold=True)


def _compact_json(values: dict[str, Any]) -> str:
    """Format JSON with each list of numbers on one line; strings are safe, since JSON escapes their line breaks."""
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[\n([-+.\de,\s]+)\n\s*\]", lambda match: f"[{' '.join(match[1].split())}]", text)
