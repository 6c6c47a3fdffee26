"""Prepare the run folder before training: recipe, origin, data check, split, samples, stamps."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitrail.data.batches import BadFiles
from vitrail.data.checking.check import Report, quick_check
from vitrail.data.checking.findings import Unreadable, them
from vitrail.data.sources.contents import CONTENTS
from vitrail.data.sources.splits import Splits
from vitrail.errors import DataError
from vitrail.io import read_json, read_text
from vitrail.training.display import format_value
from vitrail.training.plan import TrainingPlan
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import write_toml
from vitrail.training.run_folder import (
    CHECK,
    DEFAULTS,
    METRICS,
    ORIGIN,
    RECIPE,
    SPLIT,
    Origin,
    keep_origin,
    keep_recipe,
    read_in_run,
    write_json,
)
from vitrail.training.samples import SAMPLES, keep_samples
from vitrail.training.stamps import STAMPS, check_stamps


class PreparedFolder(NamedTuple):
    """What preparing a run folder has found."""

    check: Report | None
    """The data check of a new run; None if the run is resumed."""
    moved: tuple[str, ...]
    """Messages about data that was moved or rewritten since the run started."""


def prepare_folder(folder: Path, plan: TrainingPlan, splits: Splits, origin: Origin) -> PreparedFolder:
    """Write the files of a new run, and check that a resumed one has the same recipe, weights and data."""
    _forget_unstarted(folder, plan.recipe)
    keep_recipe(folder, plan.recipe)
    if not (folder / DEFAULTS).exists():
        rows = [default._replace(value=format_value(default.value))._asdict() for default in plan.defaults]
        write_json(folder / DEFAULTS, rows)
    moved = keep_origin(folder, origin)
    check = None
    if (folder / SPLIT).exists():
        _check_split(folder, splits)
    else:
        recipe = plan.recipe
        check = check_images(
            folder, splits, plan.model.image_size[0], recipe.data.bad_files, labels=recipe.method is None
        )
        write_json(folder / SPLIT, splits.record)
    keep_samples(folder, splits.train)
    rewritten = check_stamps(folder, splits)
    return PreparedFolder(check, tuple(text for text in (moved, rewritten) if text is not None))


def _forget_unstarted(folder: Path, recipe: Recipe) -> None:
    """Clear the folder of a run with another recipe that never took a step, so that the recipe can be corrected."""
    path = folder / RECIPE
    metrics, state = folder / METRICS, folder / "state"
    if not path.exists() or read_in_run(path, read_text) == write_toml(recipe.identity()):
        return
    if (metrics.exists() and metrics.stat().st_size) or (state.exists() and any(state.iterdir())):
        return
    for name in (RECIPE, DEFAULTS, ORIGIN, SPLIT, CHECK, STAMPS, CONTENTS):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / SAMPLES, ignore_errors=True)


def check_images(folder: Path, splits: Splits, size: int, bad_files: BadFiles, *, labels: bool = True) -> Report:
    """Run the quick data check and save its report; with `bad_files = "refuse"`, raise for an unreadable image."""
    report = quick_check(splits, size=size, labels=labels)
    write_json(folder / CHECK, report.as_dict())
    if bad_files == "refuse" and report.unreadable:
        raise _refused(report.unreadable)
    if report.contents is not None:
        report.contents.save(folder)
    return report


def _check_split(folder: Path, splits: Splits) -> None:
    """Raise if a resumed run has other images than before."""
    if read_in_run(folder / SPLIT, read_json) != json.loads(json.dumps(splits.record)):
        raise DataError(
            f"the data has changed since the run in {folder} started: images were added, removed or renamed; choose "
            f"another --run, or restore them"
        )


def _refused(unreadable: Sequence[Unreadable]) -> DataError:
    """Return the error for unreadable images with `bad_files = "refuse"`."""
    first, count = unreadable[0], len(unreadable)
    more = "" if count == 1 else f", the first of {count:,} such images"
    return DataError(
        f"{first.image.name} cannot be read: {first.reason}{more}; fix or remove {them(count)}, or train with --set "
        f"data.bad_files=skip"
    )
