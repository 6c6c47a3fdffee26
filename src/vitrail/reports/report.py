"""`report`: a run in, one HTML file out."""

from pathlib import Path

from vitrail.errors import ConfigError
from vitrail.reports.classes import calibration, classes, confusion
from vitrail.reports.compare import compare
from vitrail.reports.curves import curves
from vitrail.reports.data import data
from vitrail.reports.inside import inside
from vitrail.reports.mistakes import mistakes
from vitrail.reports.model import model_summary
from vitrail.reports.page import GENERATOR, page
from vitrail.reports.record import Record, read_run
from vitrail.reports.reproduce import reproduce
from vitrail.reports.result import head, result
from vitrail.reports.sight import look_into
from vitrail.reports.words import cut
from vitrail.training.folder import write_text

REPORT = "report.html"


def report(run: str | Path, other: str | Path | None = None, out: str | Path | None = None) -> Path:
    """Write what a run came to as one HTML file that needs nothing else, and return its path.

    With `other`, the two runs are compared. Without `out`, the file lies in the folder of the first run.
    """
    one = read_run(run)
    two = None if other is None else read_run(other)
    target = Path(out) if out is not None else one.folder / _default_name(two)
    _check_target(target)
    write_text(target, _single(one) if two is None else compare(one, two))
    return target


def _single(run: Record) -> str:
    sight = look_into(run)
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
    return page(title=f"{run.name}: report", head=head(run), sections=sections)


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
