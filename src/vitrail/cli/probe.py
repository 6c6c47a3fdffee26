"""`vitrail probe`: evaluate a model's frozen features."""

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

import vitrail
from vitrail.cli.output import echo, print_table, progress
from vitrail.cli.overrides import Keys, Overrides, read_overrides

if TYPE_CHECKING:
    from vitrail.inference.probe import ProbeResult, ProbeRow

LISTED = 10
"""Unreadable images listed; the JSON has all of them."""


def probe(
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
    only: Annotated[
        str, typer.Option(help="Probes to run, separated by commas: fewshot, knn, linear.")
    ] = "fewshot,knn,linear",
    shots: Annotated[
        str | None, typer.Option(help="Examples per class for fewshot, separated by commas; by default 1,5,10,25.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many times fewshot draws its examples.")] = 3,
    k: Annotated[
        str | None,
        typer.Option(
            "--k", help="Number of neighbours for knn, or several numbers separated by commas; by default 20."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split to evaluate on: test or val.")] = "test",
    layer: Annotated[
        int | None, typer.Option(help="Layer of the features, counted from 0; -1 is the last. By default the last.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 64,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of decoder processes; 0 decodes in the main process. By default one per core."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    precision: Annotated[str, typer.Option(help="Precision of the features: float32, bf16 or fp16.")] = "float32",
    override: Overrides = None,
    keys: Keys = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure how good a model's frozen features are: few-shot, k-nearest neighbours and linear probe."""
    numbers = _numbers("--shots", shots), _numbers("--k", k)
    with progress() as bar:
        result = vitrail.probe(
            bundle,
            data,
            only=[word.strip() for word in only.split(",") if word.strip()],  # type: ignore[misc]  # checked there
            shots=numbers[0],
            seeds=seeds,
            k=numbers[1],
            split=split,  # type: ignore[arg-type]  # checked there
            layer=layer,
            batch=batch,
            workers=workers,
            device=device,
            precision=precision,  # type: ignore[arg-type]  # checked there
            overrides=read_overrides(override),
            keys=keys,
            on_progress=bar,
        )
    if as_json:
        echo(json.dumps(result.as_dict(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    _print(result)


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Parse comma-separated integers."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", word) for word in words):
        raise typer.BadParameter(f"{text!r} should be integers, such as 1,5,10", param_hint=option)
    return tuple(int(word) for word in words)


def _print(result: "ProbeResult") -> None:
    from vitrail.text import percent

    splits = {
        "recorded": "in the splits of the model's run",
        "given": "in the splits of the dataset",
        "stratified": "in random stratified splits",
    }
    echo(
        f"{result.images:,} {result.split} images and {result.examples:,} train images of {len(result.classes):,} "
        f"classes, {splits[result.split_origin]}."
    )
    rows = []
    for row in result.rows:
        interval = result.interval(row)
        between = "" if interval is None else f"{percent(interval.low)}–{percent(interval.high)}"
        spread = "" if row.spread is None else f"±{100 * row.spread:.1f}"
        rows.append((*_named(row), f"{percent(row.mean)}%", spread, between))
    numbers = ("accuracy", "over seeds", "95% interval")
    print_table(("probe", "setting", *numbers), rows, numbers=numbers)
    for note in result.notes:
        echo(f"{note[0].upper()}{note[1:]}.")
    if result.bad:
        echo(f"{len(result.bad):,} more could not be read:")
        for image in result.bad[:LISTED]:
            echo(f"  {image.name}: {image.reason}")
        if len(result.bad) > LISTED:
            echo(f"  … and {len(result.bad) - LISTED:,} more")


def _named(row: "ProbeRow") -> tuple[str, str]:
    if row.method == "fewshot":
        return "few-shot", f"{row.setting:g} shot{'' if row.setting == 1 else 's'}"
    return ("k-NN", f"k = {row.setting:g}") if row.method == "knn" else ("linear", f"decay {row.setting:g}")
