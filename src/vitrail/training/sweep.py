"""`sweep`: train combinations of settings, select one on the validation split, evaluate only it on the test split.

sweep.json                 the runs and their metrics
lr=0.003/ lr=0.01/ …       the runs, each an ordinary run folder with an outcome.json

With `candidates`, a sweep compares named candidates instead (`candidate_sweep.py`).
"""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Never, overload

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.sources.given import Data, given_data
from vitrail.data.sources.in_memory import InMemory
from vitrail.errors import ConfigError, Diverged
from vitrail.runtime import choose_device
from vitrail.tasks.metrics import MetricSpec
from vitrail.tasks.task import Task
from vitrail.text import plural
from vitrail.training.candidate_results import CandidateSweep
from vitrail.training.candidate_sweep import sweep_candidates
from vitrail.training.candidates import CandidateRecipes, read_candidates
from vitrail.training.criterion import shared_criterion
from vitrail.training.finetune_init import opened_pretrained
from vitrail.training.grid import Trial, TrialPlanner, combine, distinct
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import default_recipe, read_recipe, unknown_setting
from vitrail.training.run_folder import SWEEP, locked, write_json
from vitrail.training.sweep_pool import SweepPool
from vitrail.training.sweep_run import (
    PlannedRun,
    SweepRun,
    SweepTraining,
    best_run,
    check_folder,
    check_recipe,
    steps_of_each,
    sweep_folder,
)
from vitrail.training.teacher import opened_teacher
from vitrail.training.train import Run


class Spread(NamedTuple):
    """The headline validation metric of the same settings over several seeds."""

    values: dict[str, Any]
    """The settings, without the seed."""
    runs: int
    mean: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Sweep:
    """A finished sweep over all combinations of some settings."""

    folder: Path
    runs: list[SweepRun]
    chosen: SweepRun
    best: Run
    """The selected run, evaluated on the test split."""
    task: Task
    criterion: str
    """The metric that selected the run."""

    @property
    def seeds(self) -> list[Spread]:
        """Spread over seeds for each combination of the other settings; empty if the seed is not swept."""
        return _spreads(self.runs, self.task.headline)


@overload
def sweep(
    data: Data = "digits",
    *,
    over: Mapping[str, Sequence[Any]],
    recipe: str | Path | Recipe | None = None,
    changes: Sequence[str] = (),
    pretrained: str | Path | Bundle | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    teacher: str | Path | Bundle | None = None,
    folder: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    jobs: int = 1,
    quiet: bool = False,
) -> Sweep: ...


@overload
def sweep(
    data: Data = "digits",
    *,
    candidates: str | Path | Mapping[str, Any],
    only: Sequence[str] = (),
    recipe: str | Path | Recipe | None = None,
    changes: Sequence[str] = (),
    pretrained: str | Path | Bundle | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    teacher: str | Path | Bundle | None = None,
    folder: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    jobs: int = 1,
    quiet: bool = False,
) -> CandidateSweep: ...


def sweep(
    data: Data = "digits",
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    candidates: str | Path | Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    recipe: str | Path | Recipe | None = None,
    changes: Sequence[str] = (),
    pretrained: str | Path | Bundle | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    teacher: str | Path | Bundle | None = None,
    folder: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    jobs: int = 1,
    quiet: bool = False,
    **unknown: Never,
) -> Sweep | CandidateSweep:
    """Train several settings, select on the validation split, and evaluate what was selected on the test split.

    `over` maps settings to values, {"optimizer.lr": [0.003, 0.01]}, and trains every combination. The best run is
    selected by the recipe's criterion, with the loss as a tie-breaker; only that run is evaluated on the test split.

    `candidates` is a TOML file with named candidates, or a mapping with the same content. Every combination of a
    candidate's grid is trained with the first seed; the best one is trained with the other seeds as well, and all of
    these runs are evaluated on the test split. `only` names the candidates to train.

    `jobs` runs are trained at once, each in its own process. The other arguments are those of `train`. Call it again
    with the same arguments to resume an interrupted sweep.
    """
    for argument in unknown:
        raise unknown_setting(sweep, argument, unknown[argument])
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("a sweep runs in one process; start it without torchrun, or train each candidate by itself")
    if (over is None) == (candidates is None):
        raise ConfigError("a sweep needs either values to try (over) or candidates; pass one of them")
    if type(jobs) is not int or jobs < 1:
        raise ConfigError(f"jobs is {jobs!r}; pass a number of runs, at least 1")
    if only and candidates is None:
        raise ConfigError("only selects candidates of a file; this sweep has none")
    data = given_data(data, labelling=read_recipe(recipe or default_recipe(pretrained), changes).labelling)
    if jobs > 1 and isinstance(data, InMemory):
        raise ConfigError(f"jobs is {jobs}, but {data.title} cannot be sent to other processes; use jobs=1, or files")
    kind = choose_device(device).type  # raises for an invalid device before anything is read
    if candidates is not None:
        file = read_candidates(candidates)
        file.check_selection(only)
        if file.recipe is not None and recipe is not None:
            raise ConfigError(
                f"{file.name} names the recipe {file.recipe}, and --recipe another; leave one of them out"
            )
        recipes = CandidateRecipes(file, recipe or file.recipe or default_recipe(pretrained), changes)
        recipes.check(pretrained, teacher)
        bundle, taught_by = opened_pretrained(pretrained, overrides, keys), opened_teacher(teacher)
        training = SweepTraining(data, bundle, device, workers, quiet, taught_by)
        return sweep_candidates(recipes, training, device=kind, only=only, jobs=jobs, folder=folder)
    tried = [
        (values, read_recipe(recipe or default_recipe(pretrained), changes, values))
        for values in combine(over or {}, changes)
    ]
    for _, one in tried:
        one.check_pretrained(pretrained)
        one.check_teacher(teacher)
    bundle, taught_by = opened_pretrained(pretrained, overrides, keys), opened_teacher(teacher)
    training = SweepTraining(data, bundle, device, workers, quiet, taught_by)
    planner = TrialPlanner(data, bundle, kind, taught_by)
    trials = distinct([planner.trial(values, one) for values, one in tried])
    return _sweep_product(trials, training, jobs, folder, len(tried) - len(trials))


def _sweep_product(
    trials: Sequence[Trial], training: SweepTraining, jobs: int, folder: str | Path | None, dropped: int
) -> Sweep:
    """Train all combinations, select one, and evaluate it on the test split."""
    place = Path(folder) if folder is not None else sweep_folder(trials, training)
    runs = [PlannedRun(one.recipe, one.plan.steps, place / one.folder_name, one.title) for one in trials]
    check_folder(place, "runs")
    for trial, run in zip(trials, runs, strict=True):
        check_recipe(trial, run.folder)
    task = trials[0].plan.task
    name = shared_criterion(task, (trial.plan.recipe.resolved_criterion() for trial in trials))
    criterion = task.criteria[name]

    def known() -> list[SweepRun]:
        pairs = [(trial, run, run.outcome) for trial, run in zip(trials, runs, strict=True)]
        return [SweepRun(trial.values, run.folder, outcome) for trial, run, outcome in pairs if outcome is not None]

    with locked(place):
        training.print(
            f"the sweep is in {place}: {plural(len(trials), 'run')}, each trained in full for "
            f"{steps_of_each(trials)} steps (shorten them with --set epochs=…)"
        )
        if dropped:
            training.print(f"{dropped} {'duplicate is' if dropped == 1 else 'duplicates are'} dropped")
        if not (place / SWEEP).exists():
            _write(place, [], task.headline)  # marks the folder as a sweep
        with SweepPool(training, jobs, len(runs)) as pool:
            pool.complete(runs, lambda: _write(place, known(), task.headline))
        done = known()
        chosen = best_run(done, criterion)
        if chosen is None:
            raise Diverged(f"every run of the sweep in {place} diverged; the first: {done[0].outcome.diverged}")
        selected = next(run for run in runs if run.folder == chosen.folder)
        training.print(
            f"{selected.title} has the best {criterion.name} on the validation split"
            f"{_tie(done, chosen, criterion)}; it is already trained, so only the evaluation on the test split "
            "is left"
        )
        best = training.run(selected.recipe, selected.folder, "test")
        _write(place, done, task.headline, chosen)
    return Sweep(place, done, chosen, best, task, name)


def _tie(runs: Sequence[SweepRun], chosen: SweepRun, criterion: MetricSpec) -> str:
    """Mention that the loss broke a tie, if it did."""
    values = [one.outcome.metrics.get(criterion.key) for one in runs]
    equal = values.count(chosen.outcome.metrics[criterion.key]) - 1
    if criterion.key == "val_loss" or not equal:
        return ""
    return f" (tied with {equal} {'other' if equal == 1 else 'others'}, and has the lowest loss of them)"


def _spreads(runs: Sequence[SweepRun], headline: MetricSpec) -> list[Spread]:
    """Group runs that differ only in the seed."""
    if not runs or "seed" not in runs[0].values:
        return []
    groups: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for run in runs:
        rest = {key: value for key, value in run.values.items() if key != "seed"}
        _, scores = groups.setdefault(json.dumps(rest), (rest, []))
        if headline.key in run.outcome.metrics:
            scores.append(run.outcome.metrics[headline.key])
    return [
        Spread(rest, len(scores), statistics.fmean(scores), min(scores), max(scores))
        for rest, scores in groups.values()
        if len(scores) > 1
    ]


def _write(place: Path, runs: Sequence[SweepRun], headline: MetricSpec, chosen: SweepRun | None = None) -> None:
    rows = [{"values": run.values, "folder": run.folder.name, **asdict(run.outcome)} for run in runs]
    seeds = [spread._asdict() for spread in _spreads(runs, headline)]
    write_json(place / SWEEP, {"runs": rows, "best": chosen.folder.name if chosen else None, "seeds": seeds})
