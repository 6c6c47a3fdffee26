"""`vitrail eval`: evaluate a model on labelled images."""

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.output import echo, print_table, progress
from vitrail.cli.overrides import Keys, Overrides, open_model
from vitrail.text import as_percent

if TYPE_CHECKING:
    from vitrail.evaluation import Evaluation
    from vitrail.metrics.intervals import Interval

MAX_CLASSES = 20
LISTED = 10
"""Confusions and images listed; the JSON has more."""


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
    precision: Annotated[str, typer.Option(help="Precision: float32, bf16 or fp16.")] = "float32",
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of decoder processes; 0 decodes in the main process. By default one per core."
        ),
    ] = None,
    override: Overrides = None,
    keys: Keys = None,
    by_number: Annotated[bool, typer.Option("--by-number", help="Match classes by index instead of by name.")] = False,
    every_class: Annotated[bool, typer.Option("--all", help="List every class, not only the weakest ones.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Evaluate a model on labelled images: accuracy, per-class metrics, confusions, calibration, confident mistakes."""
    from vitrail.data.sources.selection import choose_images, recorded_split
    from vitrail.evaluation import evaluate_chosen
    from vitrail.runtime import autocast, choose_device

    autocast(choose_device(device), precision)  # type: ignore[arg-type]  # fail early on a wrong value
    model = open_model(bundle, override, keys)
    record = recorded_split(model.origin)
    with progress("listing") as on_listed:
        chosen = choose_images(data, split, record=record, on_progress=lambda count: on_listed(count, None))
    with progress("evaluating") as on_evaluated:
        evaluation = evaluate_chosen(
            model,
            chosen,
            record,
            device=device,
            precision=precision,  # type: ignore[arg-type]
            batch=batch,
            workers=workers,
            by_number=by_number,
            on_progress=on_evaluated,
        )
    for warning in evaluation.warnings:
        echo(f"WARNING: {warning}", err=True, bold=True)
    if as_json:
        echo(_compact_json(evaluation.as_dict()))
        return
    _print_evaluation(evaluation, every_class)


def _print_evaluation(evaluation: "Evaluation", every_class: bool) -> None:
    from vitrail.text import percent

    echo(f"{evaluation.summary}.")
    echo("")
    loss, base = evaluation.loss_interval, evaluation.baselines
    rows = [
        ("top-1", f"{percent(evaluation.top1)}%", _span(evaluation.top1_interval)),
        *(
            []
            if evaluation.top5 is None
            else [("top-5", f"{percent(evaluation.top5)}%", _span(evaluation.top5_interval))]
        ),
        (
            "balanced accuracy",
            f"{percent(evaluation.balanced_accuracy)}%",
            _span(evaluation.balanced_accuracy_interval),
        ),
        ("macro-F1", f"{percent(evaluation.macro_f1)}%", _span(evaluation.macro_f1_interval)),
        (f"always {evaluation.classes[base.majority_class]!r}", f"{percent(base.majority)}%", ""),
        ("chance", f"{percent(base.chance)}%", ""),
        ("log loss", f"{evaluation.loss:.4f}", f"{loss.low:.4f}–{loss.high:.4f}"),
        ("calibration error", f"{percent(evaluation.ece)}%", ""),
    ]
    print_table(("metric", "value", "95% interval"), rows, numbers=("value",))
    echo(_calibration(evaluation))
    _print_classes(evaluation, every_class)
    confusions = evaluation.most_confused(LISTED)
    if confusions:
        _heading("Confusions")
        names = evaluation.classes
        print_table(
            ("images", "true class", "predicted"),
            [(f"{row.images:,}", names[row.true], names[row.predicted]) for row in confusions],
            numbers=("images",),
        )
        _heading("The most confident mistakes")
        print_table(
            ("confidence", "true class", "predicted", "image"),
            [(f"{percent(m.confidence)}%", m.true, m.predicted, m.name) for m in evaluation.worst[:LISTED]],
            numbers=("confidence",),
        )
    if evaluation.bad:
        _heading("Images that could not be read")
        for image in evaluation.bad[:LISTED]:
            echo(f"{image.name}: {image.reason}")
        if len(evaluation.bad) > LISTED:
            echo(f"… and {len(evaluation.bad) - LISTED:,} more")


def _calibration(evaluation: "Evaluation") -> str:
    """Compare the mean confidence with the accuracy, in words."""
    from vitrail.text import percent

    full = [row for row in evaluation.reliability if row.confidence is not None]
    confidence = sum(row.images * (row.confidence or 0) for row in full) / evaluation.images
    return f"The mean confidence is {percent(confidence)}%; the accuracy is {percent(evaluation.top1)}%."


def _print_classes(evaluation: "Evaluation", every_class: bool) -> None:
    """Print a row per class, the weakest first."""
    rows = evaluation.weakest_first
    listed = rows if every_class else rows[:MAX_CLASSES]
    _heading("Classes, the weakest first")
    print_table(
        ("class", "images", "recall", "precision", "F1"),
        [(r.name, f"{r.images:,}", as_percent(r.recall), as_percent(r.precision), as_percent(r.f1)) for r in listed],
        numbers=("images", "recall", "precision", "F1"),
    )
    if len(rows) > len(listed):
        echo(f"… and {len(rows) - len(listed):,} more; --all lists them")
    without = len(evaluation.per_class) - len(rows)
    if without:
        echo(f"The model has {without:,} more {'class' if without == 1 else 'classes'} without images here.")


def _span(interval: "Interval | None") -> str:
    from vitrail.text import percent

    return "" if interval is None else f"{percent(interval.low)}–{percent(interval.high)}"


def _heading(text: str) -> None:
    echo(f"\n{text}", bold=True)


def _compact_json(values: dict[str, Any]) -> str:
    """Format JSON with each list of numbers on one line; strings are safe, since JSON escapes their line breaks."""
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[\n([-+.\de,\s]+)\n\s*\]", lambda match: f"[{' '.join(match[1].split())}]", text)
