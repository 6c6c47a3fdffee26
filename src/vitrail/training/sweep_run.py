"""One run of a sweep: train or resume it in its folder, and record how it did on the validation split."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.sources.in_memory import InMemory
from vitrail.errors import CheckpointError, ConfigError, Diverged
from vitrail.io import ContentError, read_json
from vitrail.tasks.metrics import MetricSpec
from vitrail.tasks.task import Task
from vitrail.text import printable
from vitrail.training.criterion import score
from vitrail.training.grid import Trial
from vitrail.training.recipe import Recipe
from vitrail.training.run_folder import (
    METRICS,
    OUTCOME,
    RECIPE,
    RESULT,
    SWEEP,
    MetricsFile,
    best_row,
    default_folder,
    keep_recipe,
    origin_of,
    write_json,
)
from vitrail.training.sessions import Stopped
from vitrail.training.teacher import Teacher
from vitrail.training.train import Run, train

SweepKind = Literal["runs", "candidates"]
"""The key in sweep.json for the rows of a sweep over all combinations, or over named candidates."""


@dataclass(frozen=True)
class Outcome:
    """Validation metrics of a run's best checkpoint."""

    metrics: dict[str, float]
    """By their keys in the metrics file; empty if the run diverged."""
    best_step: int | None
    steps: int
    seconds: float
    diverged: str | None
    """The error message of a run that diverged."""


@dataclass(frozen=True)
class SweepRun:
    """One of the runs of a sweep."""

    values: dict[str, Any]
    folder: Path
    outcome: Outcome


@dataclass(frozen=True)
class SweepTraining:
    """The arguments of `train` that all runs share."""

    data: str | Path | InMemory
    pretrained: Bundle | None
    device: str
    workers: int | None
    quiet: bool
    teacher: Teacher | None = None
    printed: set[str] = field(default_factory=set)
    """Messages about the data that an earlier run has printed."""

    def run(self, recipe: Recipe, folder: Path, evaluate_on: Literal["test", "val"]) -> Run:
        """Train a recipe in a folder; a run that is already trained is only evaluated."""
        return train(
            self.data,
            recipe=recipe,
            pretrained=self.pretrained,
            teacher=self.teacher,
            folder=folder,
            device=self.device,
            workers=self.workers,
            quiet=self.quiet,
            evaluate_on=evaluate_on,
            printed=self.printed,
        )

    def print(self, text: str) -> None:
        """Print a line about the sweep."""
        if not self.quiet:
            print(printable(text), file=sys.stderr, flush=True)


class PlannedRun(NamedTuple):
    """A run that a sweep has to train."""

    recipe: Recipe
    steps: int
    folder: Path
    title: str
    tested: bool = False
    """Whether it is evaluated on the test split, too."""

    @property
    def compiled_model(self) -> str:
        """The settings that decide what `torch.compile` compiles: runs with the same ones share it."""
        recipe = self.recipe
        return json.dumps(
            [recipe.compile, recipe.model, recipe.batch, recipe.precision, recipe.freeze, recipe.lora.to_json()]
        )

    @property
    def outcome(self) -> Outcome | None:
        """The recorded outcome; None before the run is trained."""
        return recorded_outcome(self.folder)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        outcome = self.outcome
        return outcome is not None and not self._lacks_result(outcome)

    def complete(self, training: SweepTraining) -> None:
        """Train or resume the run; evaluate it on the test split if that is planned."""
        outcome = self.outcome or self._train(training)
        if self._lacks_result(outcome):
            training.run(self.recipe, self.folder, "test")

    def _train(self, training: SweepTraining) -> Outcome:
        """Train, and record the outcome."""
        spent_before = _read(self.folder).get("seconds")
        start = time.monotonic() - (spent_before if isinstance(spent_before, float) else 0.0)
        try:
            training.run(self.recipe, self.folder, "test" if self.tested else "val")
        except Stopped:
            write_json(self.folder / OUTCOME, {"seconds": time.monotonic() - start})
            raise
        except Diverged as error:
            training.print(str(error))
            outcome = Outcome({}, None, self.steps, time.monotonic() - start, str(error))
        else:
            best = _best_row(self.folder, self.recipe.known_task)
            reached = {name: value for name, value in best.items() if name.startswith("val_")}
            outcome = Outcome(reached, best["step"], self.steps, time.monotonic() - start, None)
        write_json(self.folder / OUTCOME, asdict(outcome))
        return outcome

    def _lacks_result(self, outcome: Outcome) -> bool:
        return self.tested and outcome.diverged is None and not (self.folder / RESULT).exists()


def recorded_outcome(folder: Path) -> Outcome | None:
    """Return the recorded outcome of a run; None if there is none, or if it is corrupt."""
    try:
        return TypeAdapter(Outcome).validate_python(_read(folder))
    except ValidationError:
        return None


def best_run(runs: Sequence[SweepRun], criterion: MetricSpec) -> SweepRun | None:
    """Return the run with the best score on the validation split; None if all diverged."""
    done = [run for run in runs if run.outcome.diverged is None]
    scores = {run.folder: score(run.outcome.metrics, criterion) for run in done}
    return max(done, key=lambda run: (scores[run.folder].known, scores[run.folder]), default=None)


def sweep_folder(trials: Sequence[Trial], training: SweepTraining) -> Path:
    """Return the default folder of a sweep: the same command finds the same folder."""
    origin = origin_of(training.data, training.pretrained, training.teacher)
    place = default_folder(origin, [trial.plan.recipe for trial in trials])
    return place.with_name(f"{place.name}-sweep")


def check_folder(place: Path, kind: SweepKind) -> None:
    """Raise if a folder holds a run, or a sweep of the other kind."""
    if (place / RECIPE).exists():
        raise ConfigError(f"{place} holds a run, not a sweep; choose another --run")
    try:
        known = read_json(place / SWEEP)
    except (OSError, ContentError):  # a corrupt record is written again
        return
    other = "candidates" if kind == "runs" else "runs"
    if isinstance(known, dict) and other in known:
        raise ConfigError(f"{place} holds a sweep of another kind (over {other}); choose another --run")


def check_recipe(trial: Trial, folder: Path) -> None:
    """Raise if a folder holds a run with another recipe."""
    auto = trial.plan.recipe.batch == "auto"  # the run has recorded its resolved batch size
    if (folder / RECIPE).exists() and not auto:
        keep_recipe(folder, trial.plan.recipe)


def steps_of_each(trials: Sequence[Trial]) -> str:
    """Return the length of the runs as text."""
    steps = sorted({trial.plan.steps for trial in trials})
    return f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"


def _best_row(folder: Path, task: Task) -> dict[str, Any]:
    """Return the validation row of a finished run's best checkpoint."""
    best = best_row(MetricsFile.read(folder))
    if best is None or not best.keys() >= {criterion.key for criterion in task.criteria.values()}:
        raise CheckpointError(
            f"{folder / METRICS} is corrupt; delete {folder}, and rerun the same command to train it again"
        )
    return best


def _read(folder: Path) -> dict[str, Any]:
    """Read outcome.json; empty if it is corrupt, because the run can restore it."""
    try:
        content = read_json(folder / OUTCOME)
    except (OSError, ContentError):
        return {}
    return content if isinstance(content, dict) else {}
