"""`report`: a run in, one HTML file out."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitrail.errors import ConfigError
from vitrail.reports.classes import calibration, classes, confusion
from vitrail.reports.compare import compare
from vitrail.reports.curves import curves
from vitrail.reports.data import data, unreadable_samples
from vitrail.reports.formatting import cut
from vitrail.reports.internals import inside
from vitrail.reports.mistakes import mistakes
from vitrail.reports.model import model_summary
from vitrail.reports.page import GENERATOR, page, warnings
from vitrail.reports.predictions import unreadable_answers
from vitrail.reports.reproduce import reproduce
from vitrail.reports.result import head, result
from vitrail.reports.run_artifacts import RunArtifacts, open_artifacts
from vitrail.reports.run_record import Record, read_run
from vitrail.training.run_folder import write_text

REPORT = "report.html"
_log = logging.getLogger("vitrail")


class Written(NamedTuple):
    """A report, and what it lacks."""

    path: Path
    unreadable: tuple[str, ...]
    """A sentence for each file of the run that is there and cannot be read; the report has them, too."""


def report(run: str | Path, other: str | Path | None = None, out: str | Path | None = None) -> Path:
    """Write what a run came to as one HTML file that needs nothing else, and return its path.

    With `other`, the two runs are compared. Without `out`, the file lies in the folder of the first run. A file of the
    run that cannot be read is named in the report and logged as a warning (logger "vitrail"), which without a handler
    goes to stderr; without its recipe a folder is not a run, and a `ConfigError` says so.
    """
    written = write_report(run, other, out)
    for sentence in written.unreadable:
        _log.warning("%s", sentence)
    return written.path


def write_report(run: str | Path, other: str | Path | None = None, out: str | Path | None = None) -> Written:
    """Write a report as `report` does, and leave it to the caller to say what it lacks."""
    one = read_run(run)
    two = None if other is None else read_run(other)
    target = Path(out) if out is not None else one.folder / _default_name(two)
    _check_target(target)
    if two is None:
        sight = open_artifacts(one)
        unreadable = (*one.unreadable, *sight.unreadable, *unreadable_samples(one))
        text = _single(sight, unreadable)
    else:
        unreadable = (*one.unreadable, *two.unreadable, *unreadable_answers(one), *unreadable_answers(two))
        text = compare(one, two, unreadable)
    write_text(target, text)
    return Written(target, unreadable)


def _single(sight: RunArtifacts, unreadable: Sequence[str]) -> str:
    run = sight.run
    sections = [
        result(run),
        mistakes(sight),
        classes(run),
        confusion(run),
        calibration(run),
        curves(run),
        model_summary(sight),
        inside(sight),
        data(run),
        reproduce(run),
    ]
    return page(title=f"{run.name}: report", head=head(run) + warnings(unreadable), sections=sections)


def _default_name(other: Record | None) -> str:
    return REPORT if other is None else f"report-and-{cut(other.name, 50)}.html"


def _check_target(target: Path) -> None:
    """Refuse to write over what is no report, before anything is computed."""
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; name a file for the report, such as {target / 'page.html'}")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent} to write the report to; make it first")
    if target.exists() and not target.is_file():  # reading a pipe might never end
        raise ConfigError(f"{target} is no file; name one for the report, such as {REPORT}")
    if target.exists():
        with target.open("rb") as file:
            if f'content="{GENERATOR} '.encode() not in file.read(4096):
                raise ConfigError(f"{target} is there already and is no report; choose another --out")


def report_of_finished(folder: Path) -> tuple[Path | None, str]:
    """Write the report of a run that has just ended; return its path, if there is one, and a sentence about it.

    Whatever goes wrong is told and not raised: the run itself is done and safe.
    """
    try:
        path = report(folder)
    except Exception as error:
        again = f"vitrail report {folder}"
        return (
            None,
            f"there is no report, because {error or type(error).__name__}; the run is whole, and {again} tries again",
        )
    return path, f"the report is {path}"
