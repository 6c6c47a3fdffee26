"""`report`: a run in, one HTML file out."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from vitrail.data.sources.given import Data
from vitrail.errors import ConfigError
from vitrail.reports.classes import calibration, classes, confusion
from vitrail.reports.compare import compare
from vitrail.reports.curves import curves
from vitrail.reports.data import data, unreadable_samples
from vitrail.reports.internals import inside
from vitrail.reports.labels import label_mistakes, labels
from vitrail.reports.masks import mask_classes, masks
from vitrail.reports.mistakes import mistakes
from vitrail.reports.model import model_summary, reproduce
from vitrail.reports.page import GENERATOR, Section, page, warnings
from vitrail.reports.pretraining import chosen_settings, next_steps
from vitrail.reports.previews import previews, unreadable_previews
from vitrail.reports.result import head, result, tables
from vitrail.reports.run_artifacts import RunArtifacts, open_artifacts
from vitrail.reports.run_record import Record, read_run
from vitrail.reports.test_predictions import unreadable_predictions
from vitrail.reports.values import errors, predictions
from vitrail.text import shorten
from vitrail.training.run_folder import write_text

REPORT = "report.html"
SECTIONS: dict[str, Callable[[RunArtifacts], Section]] = {
    "tables": lambda artifacts: tables(artifacts.run),
    "mistakes": mistakes,
    "label_mistakes": label_mistakes,
    "labels": labels,
    "predictions": predictions,
    "errors": errors,
    "masks": masks,
    "mask_classes": mask_classes,
    "previews": lambda artifacts: previews(artifacts.run),
    "use": lambda artifacts: next_steps(artifacts.run),
    "settings": lambda artifacts: chosen_settings(artifacts.run),
    "classes": lambda artifacts: classes(artifacts.run),
    "confusion": lambda artifacts: confusion(artifacts.run),
    "calibration": lambda artifacts: calibration(artifacts.run),
    "curves": lambda artifacts: curves(artifacts.run),
    "model": model_summary,
    "inside": inside,
    "data": lambda artifacts: data(artifacts.run),
    "reproduce": lambda artifacts: reproduce(artifacts.run),
}
"""The sections that a report can have; the run chooses."""
_log = logging.getLogger("vitrail")


class WrittenReport(NamedTuple):
    """A written report and what is missing from it."""

    path: Path
    unreadable: tuple[str, ...]
    """A sentence for each file of the run that exists but cannot be read; the report shows them, too."""


def report(
    run: str | Path, other: str | Path | None = None, out: str | Path | None = None, *, data: Data | None = None
) -> Path:
    """Write a self-contained HTML report of a run, and return its path.

    With `other`, compare the two runs. By default the report is written to the folder of the first run. `data` is the
    data of the run if it was in memory; without it, such a report shows no images. Files of the run that cannot be read
    are listed in the report and logged as warnings (logger "vitrail"). A folder without recipe.toml is not a run and
    raises `ConfigError`.
    """
    written = write_report(run, other, out, data)
    for sentence in written.unreadable:
        _log.warning("%s", sentence)
    return written.path


def write_report(
    run: str | Path, other: str | Path | None = None, out: str | Path | None = None, data: Data | None = None
) -> WrittenReport:
    """Write a report like `report`, but return the unreadable files instead of logging them."""
    one = read_run(run)
    two = None if other is None else read_run(other)
    target = Path(out) if out is not None else one.folder / _default_name(two)
    _check_target(target)
    if two is None:
        artifacts = open_artifacts(one, data)
        unreadable = (*one.unreadable, *artifacts.unreadable, *unreadable_samples(one), *unreadable_previews(one))
        text = _single(artifacts, unreadable)
    else:
        unreadable = (*one.unreadable, *two.unreadable, *unreadable_predictions(one), *unreadable_predictions(two))
        text = compare(one, two, unreadable)
    write_text(target, text)
    return WrittenReport(target, unreadable)


def _single(artifacts: RunArtifacts, unreadable: Sequence[str]) -> str:
    run = artifacts.run
    sections = [result(run), *(SECTIONS[name](artifacts) for name in run.sections)]
    return page(title=f"{run.name}: report", head=head(run) + warnings(unreadable), sections=sections)


def _default_name(other: Record | None) -> str:
    return REPORT if other is None else f"report-and-{shorten(other.name, 50)}.html"


def _check_target(target: Path) -> None:
    """Raise before overwriting anything that is not a report."""
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; name a file for the report, such as {target / 'page.html'}")
    if not target.parent.is_dir():
        raise ConfigError(f"the folder {target.parent} for the report does not exist; create it first")
    if target.exists() and not target.is_file():  # reading a pipe might never end
        raise ConfigError(f"{target} is not a regular file; name one for the report, such as {REPORT}")
    if target.exists():
        with target.open("rb") as file:
            if f'content="{GENERATOR} '.encode() not in file.read(4096):
                raise ConfigError(f"{target} exists and is not a report; choose another --out")


def report_of_finished(folder: Path, data: Data | None = None) -> tuple[Path | None, str]:
    """Write the report of a run that has just finished; return its path, or None, and a message.

    Errors are returned as the message and not raised, because the run itself is complete.
    """
    try:
        path = report(folder, data=data)
    except Exception as error:
        again = f"vitrail report {folder}"
        return (
            None,
            f"the report was not written: {error or type(error).__name__}; the run is complete, retry with {again}",
        )
    return path, f"the report is {path}"
