"""best/ of a run: whether it still is what the state says, and what becomes of one that is not."""

import shutil
from pathlib import Path

from vitrail.checkpoints.bundle import CONFIG, check_weights, is_bundle
from vitrail.checkpoints.files import read_json
from vitrail.errors import CheckpointError
from vitrail.io import file_digest
from vitrail.training.state import Progress

BEST, ASIDE = "best", "damaged-best"


def best_fault(place: Path, progress: Progress) -> str | None:
    """Say what is wrong with best/, None where it is what the state has written down."""
    if not place.is_dir():
        return f"{place} is missing"
    try:
        config = read_json(place / CONFIG)
        if not is_bundle(config):
            return f"{place / CONFIG} is not that of a bundle"
        check_weights(place, config["vitrail"])
        known = file_digest(place / CONFIG) == progress.best_digest
    except (OSError, CheckpointError) as error:
        return f"{place} cannot be used ({error})"
    if known or _is_of_later(config["vitrail"], progress):
        return None
    return f"{place} is not what the run wrote there: {CONFIG} has changed"


def _is_of_later(ours: dict[str, object], progress: Progress) -> bool:
    """Tell whether a run was killed after it wrote best/ and before its state: resumed, it writes the same again."""
    provenance = ours.get("provenance")
    trained = provenance.get("trained") if isinstance(provenance, dict) else None
    step = trained.get("step") if isinstance(trained, dict) else None
    return not progress.finished and isinstance(step, int) and step > progress.step


def put_aside(place: Path) -> None:
    """Keep what cannot be used under another name, because somebody may have changed it on purpose."""
    aside = place.with_name(ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        if place.exists() or place.is_symlink():
            place.rename(aside)
    except OSError as error:
        raise CheckpointError(f"{place} could not be put aside: {error.strerror or error}") from None
