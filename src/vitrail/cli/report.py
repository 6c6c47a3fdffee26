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
    """Write what a run came to as one HTML file that opens anywhere; with two runs, compare them.

    A file of the run that cannot be read is named in the report and in a line WARNING on stderr.
    """
    from vitrail.reports.report import write_report

    written = write_report(run, other, out)
    for sentence in written.unreadable:
        echo(f"WARNING: {sentence}", err=True, bold=True)
    echo(f"the report is {written.path}")
