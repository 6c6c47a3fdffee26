"""`check`: everything that `vitrail check` finds in a dataset, and how fast it loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.batches import default_workers
from vitrail.data.checking.check import Report, check_data, open_to_check
from vitrail.data.checking.contact_sheet import contact_sheet, save_sheet
from vitrail.data.checking.speed import Bound, Speed, measure_speed
from vitrail.data.sources.given import Data, given_data
from vitrail.data.sources.in_memory import InMemory
from vitrail.data.sources.labels import report_faults
from vitrail.data.sources.opening import title_of
from vitrail.data.sources.targets import AUTOMATIC, Labelling
from vitrail.errors import ConfigError
from vitrail.runtime import OnProgress, available_cores, on_stage

SPEEDS = (100.0, 1000.0, 5000.0)
"""The images/s of compute compared by default: a CPU, a small GPU, a large GPU."""


@dataclass(frozen=True)
class DataCheck:
    """The result of `check`."""

    report: Report
    """The findings, and counts by class, size, format and mode."""
    speed: Speed | None
    """How fast one core loads the images; None if no image of the sample could be loaded."""
    bounds: tuple[Bound, ...]
    """What limits training on this machine, for devices of several speeds."""
    cores: int
    """The cores available to workers."""
    sheet: Path | None = None
    """The contact sheet, if one was written."""

    @property
    def passed(self) -> bool:
        """Whether every image can be read and the layout has no faults, so that training can start."""
        return not self.report.unreadable and not self.report.faults

    @property
    def summary(self) -> str:
        """A one-line summary."""
        return self.report.summary

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values."""
        return {
            **self.report.as_dict(),
            "speed": None if self.speed is None else self.speed.as_dict(),
            "bounds": [bound._asdict() for bound in self.bounds],
            "sheet": None if self.sheet is None else str(self.sheet),
        }


def check(
    data: Data,
    *,
    size: int = 224,
    images_per_second: float | None = None,
    sheet: str | Path | None = None,
    workers: int | None = None,
    labelling: Labelling = AUTOMATIC,
    on_progress: OnProgress | None = None,
) -> DataCheck:
    """Find unreadable files, duplicates, class imbalance and outliers in a dataset, and measure how fast it loads.

    Every image is decoded, by `workers` processes (by default one per core). `size` is the image size of your model.
    With `images_per_second`, the training speed of your device, `bounds` says how many workers it needs. `sheet` is a
    PNG file to write: a few images of each class. `labelling` tells what the images are labelled with, and in which
    columns; by default, whatever the labels look like. Raises `DataError` if no image can be read.
    """
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"size is {size!r}; it should be the image size in pixels, such as 224")
    target = None if sheet is None else _check_sheet(Path(sheet))
    opened = given_data(data, on_stage(on_progress, "listing"), labelling=labelling)
    splits, faults = open_to_check(opened, labelling=labelling, on_progress=on_stage(on_progress, "listing"))
    # Before the check, which reads every file into the page cache.
    speed = measure_speed(splits.train, size=(size, size), on_progress=on_stage(on_progress, "measuring"))
    workers = default_workers() if workers is None else workers
    report = check_data(
        splits, size=size, workers=workers, on_progress=on_stage(on_progress, "decoding"), faults=faults
    )
    if not report.usable:
        first = report.unreadable[0]
        none = f"none of the {report.images:,} images can be read; the first, {first.image.name}: {first.reason}"
        report_faults([*faults, none], title_of(opened), None, listed=len(faults) + 1)
    if target is not None:
        save_sheet(contact_sheet(splits.train, title=f"{_short_title(opened)}, training split"), target)
    cores = available_cores()
    speeds = SPEEDS if images_per_second is None else (images_per_second,)
    bounds = () if speed is None else tuple(speed.bound(compute, cores) for compute in speeds)
    return DataCheck(report, speed, bounds, cores, target)


def _short_title(data: str | InMemory) -> str:
    return title_of(data) if isinstance(data, InMemory) else Path(data).name or data


def _check_sheet(sheet: Path) -> Path:
    """Reject a wrong target before decoding every image."""
    reason = None
    if sheet.suffix.lower() != ".png":
        reason = "does not end with .png"
    elif sheet.is_dir():
        reason = "is a folder"
    elif not sheet.absolute().parent.is_dir():
        reason = "is in a folder that does not exist"
    if reason is not None:
        raise ConfigError(f"the contact sheet {str(sheet)!r} {reason}")
    return sheet
