"""`vitrail report`: write a run, or a comparison of two runs, as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

import vitrail
from vitrail.cli.output import echo, warnings_on_stderr


def report(
    run: Annotated[Path, typer.Argument(help="Run folder, as printed by vitrail train or pretrain.")],
    other: Annotated[Path | None, typer.Argument(help="Second run folder, to compare with the first.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="File to write; by default report.html in RUN, or report-and-OTHER.html for two runs."
        ),
    ] = None,
) -> None:
    """Write the report of a run, or a comparison of two runs, as one self-contained HTML file.

    If files of the run are unreadable, the report and a WARNING on stderr name them.
    """
    with warnings_on_stderr():
        path = vitrail.report(run, other, out)
    echo(f"the report is {path}")
