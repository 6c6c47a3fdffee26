"""The criterion that selects the best checkpoint, and that checkpoint: writing it, verifying it, recovering it."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

from torch import nn

from vitrail.checkpoints.bundle import CONFIG, Bundle, check_weights, is_bundle
from vitrail.checkpoints.files import read_json
from vitrail.checkpoints.load import load
from vitrail.checkpoints.writing import atomic_folder
from vitrail.data.sources.contents import carry_contents
from vitrail.errors import CheckpointError
from vitrail.io import file_digest
from vitrail.tasks.metrics import MetricSpec
from vitrail.tasks.task import Task
from vitrail.training.distributed import Ranks
from vitrail.training.state import Progress, Score, State
from vitrail.training.state_files import weights_at


def score(row: Mapping[str, Any], criterion: MetricSpec) -> Score:
    """Return the score of a row of the metrics file: the criterion, and the loss, which breaks ties."""
    value, loss = float(row[criterion.key]), float(row["val_loss"])
    return Score(-value if criterion.lower_is_better else value, -loss if math.isfinite(loss) else -math.inf)


def as_good(reached: Score, highest: Score, standard_error: float | None) -> bool:
    """Whether a score is as good as the highest: lower by at most its standard error.

    A small validation split cannot separate checkpoints that differ by less, and then the one trained longer is the
    better choice. Without a standard error only the highest counts: the loss does rise when a run is too long.
    """
    return reached > highest if standard_error is None else reached.value >= highest.value - standard_error


def shared_criterion(task: Task, criteria: Iterable[str]) -> str:
    """Return the one criterion to compare several runs by.

    They differ only if some of the runs weight classes; then all are compared by the criterion of those.
    """
    distinct = set(criteria)
    return distinct.pop() if len(distinct) == 1 else task.default_criterion(class_balanced=True)


# ── best checkpoint ──

BEST, ASIDE, STATES = "best", "corrupt-best", "state"
BestStatus = Literal["intact", "recovered", "lost"]


@dataclass(frozen=True, eq=False)
class Best:
    """The best model of a run. Only the main process touches the folder; it broadcasts what the others need."""

    run: Path
    state: State
    ranks: Ranks
    note: Callable[[str], None]
    bundle_of: Callable[[nn.Module, int], Bundle]
    """Builds a bundle from a model and its step, with the constants of the task that do not depend on the model."""

    @property
    def folder(self) -> Path:
        """The folder of the best checkpoint."""
        return self.run / BEST

    def save(self, bundle: Bundle) -> None:
        """Write the best model, and record its digest in the training state."""
        save_in_run(bundle, self.folder)
        self.state.progress.best_digest = file_digest(self.folder / CONFIG)

    def write_card(self, bundle: Bundle) -> None:
        """Rewrite the model card; failing to write it is not an error."""
        with suppress(OSError):
            bundle.write_card(self.folder)

    def load(self) -> Bundle:
        """Return the best model, on every rank."""
        with self.ranks.together():
            best = (
                load(self.folder) if self.ranks.is_main else self.bundle_of(self.state.plain, self.state.progress.step)
            )
        weights = self.ranks.tensors_from_main(best.model.state_dict() if self.ranks.is_main else None)
        provenance = self.ranks.from_main(best.provenance)
        if not self.ranks.is_main:
            best.model.load_state_dict(weights)
            best = replace(best, model=best.model.eval(), provenance=provenance)
        best.task_constants = self.ranks.from_main(best.task_constants)
        return best

    def check(self) -> BestStatus:
        """Check that best/ is what the training state recorded, and log what is wrong.

        If a saved state still has its weights, best/ is rewritten from them. Otherwise they are lost, and the caller
        has to choose another best model.
        """
        progress = self.state.progress
        if not progress.best_step:
            return "intact"
        with self.ranks.together():
            outcome = self._recovered() if self.ranks.is_main else None
        status, message = self.ranks.from_main(outcome) or ("intact", "")
        if message:
            self.note(message)
        if status == "lost":
            progress.best_step = 0  # the next validated model becomes the best, whatever its score
        return status

    def _recovered(self) -> tuple[BestStatus, str] | None:
        """Return None if best/ is intact; else its status after recovery and a message."""
        progress = self.state.progress
        fault = best_fault(self.folder, progress)
        if fault is None:
            return None
        aside = move_aside(self.folder)
        message = fault if aside is None else f"{fault}, so it was moved to {aside.name}/"
        averaged = self.state.average is not None
        weights = weights_at(self.run / STATES, progress.best_step, averaged=averaged)
        if weights is None:
            return "lost", (
                f"{message}; the best weights, from step {progress.best_step:,}, are lost and replaced by the "
                f"{'averaged ' if averaged else ''}weights of step {progress.step:,}"
            )
        model = copy.deepcopy(self.state.plain).cpu()
        model.load_state_dict(weights)
        self.save(self.bundle_of(model, progress.best_step))
        return (
            "recovered",
            f"{message}; restored from the training state of step {progress.best_step:,}: nothing is lost",
        )


def save_in_run(bundle: Bundle, folder: Path) -> None:
    """Write a bundle into its run folder, together with the digests of the training images."""
    with atomic_folder(folder, overwrite=True) as temporary:
        bundle.write(temporary)
        carry_contents(folder.parent, temporary)


def best_fault(place: Path, progress: Progress) -> str | None:
    """Return what is wrong with best/, or None if it matches the training state."""
    if not place.is_dir():
        return f"{place} is missing"
    try:
        config = read_json(place / CONFIG)
        if not is_bundle(config):
            return f"{place / CONFIG} is not the config of a bundle"
        check_weights(place, config["vitrail"])
        unchanged = file_digest(place / CONFIG) == progress.best_digest
    except (OSError, CheckpointError) as error:
        return f"{place} cannot be used ({error})"
    if unchanged or _is_newer(config["vitrail"], progress):
        return None
    return f"{place} is not what the run wrote: {CONFIG} has changed"


def move_aside(place: Path) -> Path | None:
    """Rename an unusable folder instead of deleting it: someone may have changed it on purpose; None if absent."""
    if not (place.exists() or place.is_symlink()):
        return None
    names = (place.with_name(ASIDE if number == 1 else f"{ASIDE}-{number}") for number in count(1))
    aside = next(name for name in names if not (name.exists() or name.is_symlink()))
    try:
        return place.rename(aside)
    except OSError as error:
        raise CheckpointError(f"{place} could not be moved aside: {error.strerror or error}") from None


def _is_newer(ours: dict[str, object], progress: Progress) -> bool:
    """Whether the run was killed between writing best/ and its state; a resumed run writes the same best/ again."""
    provenance = ours.get("provenance")
    trained = provenance.get("trained") if isinstance(provenance, dict) else None
    step = trained.get("step") if isinstance(trained, dict) else None
    return not progress.finished and isinstance(step, int) and step > progress.step
