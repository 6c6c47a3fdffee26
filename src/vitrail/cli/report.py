"""`vitrail report`: write a run, or a comparison of two runs, as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.terminal import echo


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run of vitrail train.")],
    other: Annotated[Path | None, typer.Argument(help="Another run to compare with.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write; by default report.html in the run's folder.")
    ] = None,
) -> None:
    """Write a run's report as one self-contained HTML file; with two runs, compare them.

    Unreadable files of the run are named in the report and in a WARNING on stderr.
    """
    from vitrail.reports.report import write_report

    written = write_report(run, other, out)
    for sentence in written.unreadable:
        echo(f"WARNING: {sentence}", err=True, bold=True)
    echo(f"the report is {written.path}")
