"""`vitrail report`: a run as one HTML file, or two of them compared."""

from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.terminal import echo


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, as vitrail train makes it.")],
    other: Annotated[Path | None, typer.Argument(help="Another run, to compare with.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write; by default report.html in the run's folder.")
    ] = None,
) -> None:
    """Write what a run came to as one HTML file that opens anywhere; with two runs, compare them."""
    from vitrail.reports.report import report as write_report

    echo(f"the report is {write_report(run, other, out)}")
