"""`vitrail check`: problems in a dataset, and how fast it loads."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import vitrail
from vitrail.cli.output import echo, print_table, progress
from vitrail.text import byte_size, number

if TYPE_CHECKING:
    from vitrail.data.checking.check import Report
    from vitrail.data.checking.full_check import DataCheck
    from vitrail.data.checking.speed import Bound, Speed

LISTED = 5
"""Images listed per finding; the JSON has all of them. Errors are always listed in full."""
MAX_CLASSES = 20
BAR = 30
HELP = {
    "reading": "more cores, a faster disk, or tar shards",
    "decoding": "more cores, or resizing the files once",
    "augmenting": "more cores, or a lighter augmentation",
}


def check(
    data: Annotated[
        str,
        typer.Argument(help="The images: a folder, a manifest (.csv, .tsv, .jsonl, .parquet), tar shards, or digits."),
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="Task: classification, multilabel, regression or segmentation; by default what the labels are."
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(help="Column of a manifest that holds labels. Can be repeated; by default by its name."),
    ] = None,
    ignore: Annotated[
        list[int] | None,
        typer.Option(help="Value in masks of pixels without a class, besides 255. Can be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    sheet: Annotated[
        Path | None, typer.Option(help="Write a contact sheet to this PNG file: a few images per class.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of decoder processes; 0 decodes in the main process. By default one per core."
        ),
    ] = None,
    images_per_second: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e9,
            help="Training speed of your device, in images/s; check reports how many workers it needs.",
        ),
    ] = None,
    size: Annotated[
        int,
        typer.Option(
            min=1,
            max=4096,
            help="Image size of your model, to measure the speed and to find images that are too small.",
        ),
    ] = 224,
) -> None:
    """Find unreadable files, duplicates, class imbalance and outliers in a dataset, and measure how fast it loads."""
    with progress() as bar:
        result = vitrail.check(
            data, task=task, labels=labels or (), ignore=ignore or (), size=size,
            images_per_second=images_per_second, sheet=sheet, workers=workers, on_progress=bar,
        )  # fmt: skip
    if as_json:
        echo(json.dumps(result.as_dict(), indent=2, ensure_ascii=False))
    else:
        _print_check(result, size)
    # Unreadable images are an error that scripts should see.
    raise typer.Exit(0 if result.passed else 2)


def _print_check(result: "DataCheck", size: int) -> None:
    _print_report(result.report)
    _heading("Speed")
    if result.speed is not None:
        _print_speed(result.speed, result.bounds, result.cores, size)
    else:
        echo("No image of the sample could be loaded, so the speed was not measured.")
    if result.sheet is not None:
        echo(f"\nThe contact sheet is {result.sheet}.")


def _print_report(report: "Report") -> None:
    _print_wrapped(report.summary + ".")
    if report.findings:
        _heading("Findings")
    for finding in report.findings:
        sentences = f"{_sentence(finding.text)} {_sentence(finding.advice)}"
        _print_wrapped(f"{'!' if finding.serious else '·'} {sentences}", inner=2)
        listed = len(finding.details) if finding.kind == "faults" else LISTED
        for line in finding.details[:listed]:
            _print_wrapped(line, indent=4, inner=6)
        if len(finding.details) > listed:
            echo(f"    … and {len(finding.details) - listed:,} more")
    _print_labels(report)
    _heading("Sizes: the shorter side, in pixels")
    _print_sizes(report)
    _heading("Files")
    _print_wrapped(f"{byte_size(report.bytes)} in all; {_listed(report.formats)}; {_listed(report.modes)}")
    _print_wrapped(f"Not checked: {'; '.join(report.not_checked)}.")


def _print_sizes(report: "Report") -> None:
    """Print a bar per bin; runs of empty bins become one "…"."""
    most = max(span.images for span in report.short_sides)
    gap = False
    for span in report.short_sides:
        if span.images:
            name = f"{span.low}–{span.high - 1}" if span.high is not None else f"from {span.low}"
            length = -(-BAR * span.images // most)
            echo(f"{name:>9}  {'█' * length:<{BAR}}  {span.images:>9,}")
        elif not gap:
            echo(f"{'…':>9}")
        gap = not span.images


def _print_labels(report: "Report") -> None:
    """Print how many images have each class or label; of numbers, their ranges."""
    facts = report.targets
    if facts is None:
        _heading("Classes")
        _print_classes(report, "class", None)
        return
    _heading({"labels": "Labels", "values": "Numbers", "masks": "Masks"}[facts.kind])
    if facts.reason:
        _print_wrapped(f"Detected: {facts.reason}.")
    for line in facts.lines:
        _print_wrapped(_sentence(line))
    if facts.columns:
        heads = ("minimum", "mean", "maximum", "missing")
        rows = [
            (
                one.name,
                *(number(value, one.scale) for value in (one.minimum, one.mean, one.maximum)),
                f"{one.missing:,}",
            )
            for one in facts.columns
        ]
        print_table(("column", *heads), rows, numbers=heads)
        echo()
        _print_classes(report, facts.columns[0].name, facts.images)
    else:
        _print_classes(report, "class" if facts.pixels else "label", facts.images)


def _print_classes(report: "Report", what: str, images: dict[str, int] | None) -> None:
    """Print the counts per class, largest first; of many classes, only the largest and the smallest.

    Ranges of numbers stay in order; classes of masks are sorted by their share of the pixels. `images` are those of
    each split, unless they are the sum of the counts.
    """
    splits = list(report.counts)
    ranges = report.targets is not None and report.targets.kind == "values"
    names = sorted(report.classes, key=lambda name: 0 if ranges else -report.counts["train"][name])
    pixels = () if report.targets is None else report.targets.pixels
    shares = {one.name: f"{100 * one.fraction:.2f}%" for one in pixels}
    names = sorted(names, key=lambda name: -next((one.fraction for one in pixels if one.name == name), 0))
    rows = [
        (name, *([shares[name]] if shares else []), *(f"{report.counts[split][name]:,}" for split in splits))
        for name in names
    ]
    if len(rows) > MAX_CLASSES:
        half = MAX_CLASSES // 2
        left_out = (f"… {len(rows) - 2 * half:,} more …", *("" for _ in rows[0][1:]))
        rows = [*rows[:half], left_out, *rows[-half:]]
    all_of = {split: sum(report.counts[split].values()) for split in splits} if images is None else images
    heads = [*(["pixels"] if shares else []), *splits]
    total = ("all", *([""] if shares else []), *(f"{all_of[split]:,}" for split in splits))
    print_table((what, *heads), [*rows, total], numbers=heads)


def _print_speed(speed: "Speed", bounds: "tuple[Bound, ...]", cores: int, size: int) -> None:
    _print_wrapped(
        f"One image takes {speed.reading:.2f} ms to read, {speed.decoding:.2f} ms to decode "
        f"({speed.decoding_full_size:.2f} ms full size) and {speed.augmenting:.2f} ms to crop and flip to "
        f"{size}×{size}: {_rate(speed.images_per_second)} images/s per worker. (Mean of {speed.images} images, on one "
        "core; with the page cache in its current state.)"
    )
    here = "1 core" if cores == 1 else f"{cores} cores"
    echo(f"\nOn this machine ({here}):")
    print_table(
        ("compute, images/s", "workers needed", "bound by", "images/s reached"),
        [(_rate(bound.images_per_second), f"{bound.workers:,}", bound.by, _rate(bound.reached)) for bound in bounds],
        numbers=("compute, images/s", "workers needed", "images/s reached"),
    )
    if any(bound.by != "compute" for bound in bounds):
        echo(f"Where the device waits for images, this helps: {HELP[speed.slowest]}.")


def _rate(images: float) -> str:
    return f"{images:,.0f}" if images >= 100 else f"{images:.3g}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _heading(text: str) -> None:
    echo(f"\n{text}", bold=True)


def _print_wrapped(text: str, indent: int = 0, inner: int = 0) -> None:
    """Print text wrapped to the terminal; `inner` indents the lines after the first."""
    import shutil
    import textwrap

    if not sys.stdout.isatty():  # do not wrap when piped
        echo(" " * indent + text)
        return
    width = max(40, shutil.get_terminal_size().columns)
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * inner,
        break_on_hyphens=False,
        break_long_words=False,
    )
    echo("\n".join(lines))


def _listed(counts: dict[str, int]) -> str:
    if len(counts) == 1:
        return f"all {next(iter(counts))}"
    return ", ".join(f"{count:,} {word}" for word, count in counts.items())
