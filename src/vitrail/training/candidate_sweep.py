"""A sweep of named candidates: select each one's settings on the validation split, repeat them with more seeds, test.

sweep.json sweep.svg                           the results
baseline/lr=0.001,seed=0/ baseline/…           the runs of each candidate, ordinary run folders with an outcome.json
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import ConfigError, Diverged
from vitrail.tasks.task import Task
from vitrail.text import plural
from vitrail.training.candidate_results import (
    CandidateResult,
    CandidateRuns,
    CandidateSweep,
    SeedResult,
    candidate_result,
    chosen_text,
    read_result,
)
from vitrail.training.candidates import Candidate, CandidateRecipes
from vitrail.training.criterion import shared_criterion
from vitrail.training.grid import Trial, TrialPlanner, distinct
from vitrail.training.run_folder import locked
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


class _Combination(NamedTuple):
    """A combination of a candidate's grid: its trials, one per seed."""

    values: dict[str, Any]
    trials: list[Trial]


@dataclass(frozen=True)
class _CandidatePlan:
    """Everything that may have to be trained for a candidate."""

    candidate: Candidate
    combinations: list[_Combination]
    folder: Path
    has_test: bool

    @property
    def trials(self) -> list[Trial]:
        return [trial for one in self.combinations for trial in one.trials]

    def place(self, trial: Trial) -> Path:
        return self.folder / trial.folder_name

    def _planned(self, trial: Trial, *, tested: bool) -> PlannedRun:
        title = f"{self.candidate.name}, {trial.title}"
        return PlannedRun(trial.recipe, trial.plan.steps, self.place(trial), title, tested and self.has_test)

    def selection(self) -> list[PlannedRun]:
        """Return the runs that select the settings; a single one is tested at once, as there is nothing to select."""
        alone = len(self.combinations) == 1
        return [self._planned(one.trials[0], tested=alone) for one in self.combinations]

    def repetition(self, chosen: SweepRun) -> list[PlannedRun]:
        """Return the runs of the selected settings: one per seed, all of them tested."""
        selected = next(one for one in self.combinations if one.values == chosen.values)
        return [self._planned(trial, tested=True) for trial in selected.trials]

    def recorded(self, task: Task, criterion: str) -> CandidateRuns:
        """Return what is known so far. The settings are selected once all of them have been tried."""
        tried = [
            SweepRun(one.values, run.folder, run.outcome)
            for one, run in zip(self.combinations, self.selection(), strict=True)
            if run.outcome is not None
        ]
        complete = len(tried) == len(self.combinations)
        chosen = best_run(tried, task.criteria[criterion]) if complete else None
        if chosen is None:
            return CandidateRuns(tried, [], None)
        seeds = [
            SeedResult(run.recipe.seed, run.folder, run.outcome, read_result(run.folder, task))
            for run in self.repetition(chosen)
            if run.outcome is not None
        ]
        return CandidateRuns(tried, seeds, chosen)


def sweep_candidates(
    recipes: CandidateRecipes,
    training: SweepTraining,
    *,
    device: str,
    only: Sequence[str],
    jobs: int,
    folder: str | Path | None,
) -> CandidateSweep:
    """Train the candidates (those named in `only`, or all); see `sweep`. `device` is the type of the device."""
    planner = TrialPlanner(training.data, training.pretrained, device, training.teacher)
    seeds, combinations = _plan(recipes, planner)
    all_trials = [trial for found in combinations.values() for one in found for trial in one.trials]
    place = Path(folder) if folder is not None else sweep_folder(all_trials, training)
    has_test = all(splits.test is not None for splits, _ in planner.opened.values())
    plans = [
        _CandidatePlan(candidate, combinations[candidate.name], place / candidate.name, has_test)
        for candidate in recipes.file.candidates
    ]
    check_folder(place, "candidates")
    for plan in plans:
        for trial in plan.trials:
            check_recipe(trial, plan.place(trial))
    task = all_trials[0].plan.task
    criterion = shared_criterion(task, (trial.plan.recipe.resolved_criterion() for trial in all_trials))
    running = _RunningSweep(plans, place, seeds, recipes.shared, task, criterion)
    selected = [plan for plan in plans if not only or plan.candidate.name in only]
    with locked(place):
        _print_plan(selected, seeds, place, planner, training)
        running.write()
        running.train(selected, training, jobs)
        return running.finished(selected)


@dataclass(frozen=True)
class _RunningSweep:
    plans: list[_CandidatePlan]
    place: Path
    seeds: list[int]
    settings: dict[str, Any]
    task: Task
    criterion: str

    def train(self, selected: Sequence[_CandidatePlan], training: SweepTraining, jobs: int) -> None:
        """Train what is missing: first every combination with the first seed, then the best one with all seeds."""
        with SweepPool(training, jobs, _count(selected, self.seeds)) as pool:
            pool.complete([run for plan in selected for run in plan.selection()], self.write)
            repeated: list[PlannedRun] = []
            for plan in selected:
                row = self._row(plan)
                if row.values is None:
                    training.print(f"{plan.candidate.name}: every run diverged, so it is not trained with other seeds")
                    pool.total -= len(self.seeds) - 1
                    continue
                _print_selection(row, training)
                chosen = next(run for run in row.tried if run.values == row.values)
                repeated += plan.repetition(chosen)
            pool.complete(repeated, self.write)

    def finished(self, selected: Sequence[_CandidatePlan]) -> CandidateSweep:
        """Return the results; raise if there are none."""
        names = [plan.candidate.name for plan in selected]
        done = self.write()
        runs = [run for row in done.candidates if row.name in names for run in row.tried]
        if all(run.outcome.diverged is not None for run in runs):
            raise Diverged(f"every run of the sweep in {self.place} diverged; the first: {runs[0].outcome.diverged}")
        return done

    def write(self) -> CandidateSweep:
        """Write what is known so far."""
        rows = [self._row(plan) for plan in self.plans]
        known = CandidateSweep(self.place, rows, self.seeds, self.settings, self.task, self.criterion)
        known.write()
        return known

    def _row(self, plan: _CandidatePlan) -> CandidateResult:
        runs = plan.recorded(self.task, self.criterion)
        return candidate_result(plan.candidate.name, plan.candidate.settings, runs, self.task)


# ── planning ──


def _plan(recipes: CandidateRecipes, planner: TrialPlanner) -> tuple[list[int], dict[str, list[_Combination]]]:
    """Validate every run that may have to be trained; return the seeds, and the combinations of each candidate."""
    file, plans = recipes.file, {}
    seeds = file.seeds or [recipes.recipe(file.candidates[0], {}).seed]
    for candidate in file.candidates:
        combinations = []
        first = [_trial(recipes, planner, candidate, values, seeds[0]) for values in candidate.combinations()]
        for trial in distinct(first):
            values = {key: value for key, value in trial.values.items() if key != "seed"}
            others = [_trial(recipes, planner, candidate, values, seed) for seed in seeds[1:]]
            combinations.append(_Combination(values, [trial, *others]))
        plans[candidate.name] = combinations
    _check_different(recipes, plans)
    return seeds, plans


def _trial(
    recipes: CandidateRecipes, planner: TrialPlanner, candidate: Candidate, values: dict[str, Any], seed: int
) -> Trial:
    """Validate a combination of a candidate with a seed; an error names its table."""
    values = {**values, "seed": seed}
    recipe = recipes.recipe(candidate, values)
    planner.splits(recipe)  # its errors are not the candidate's
    try:
        return planner.trial(values, recipe)
    except ConfigError as error:
        raise recipes.blamed(error, candidate, values) from None


def _check_different(recipes: CandidateRecipes, plans: dict[str, list[_Combination]]) -> None:
    """Raise if two candidates are the same, so that their runs would be, too."""
    known: dict[frozenset[str], str] = {}
    for name, combinations in plans.items():
        key = frozenset(trial.plan.recipe.to_json() for one in combinations for trial in one.trials)
        if key in known:
            raise recipes.file.error(f"candidate.{name}", f"its runs are those of candidate {known[key]!r}; remove one")
        known[key] = name


def _count(plans: Sequence[_CandidatePlan], seeds: Sequence[int]) -> int:
    """Return how many runs are trained, if nothing diverges."""
    return sum(len(plan.combinations) + len(seeds) - 1 for plan in plans)


# ── messages ──


def _print_plan(
    plans: Sequence[_CandidatePlan], seeds: Sequence[int], place: Path, planner: TrialPlanner, training: SweepTraining
) -> None:
    steps = steps_of_each([trial for plan in plans for trial in plan.trials])
    training.print(
        f"the sweep is in {place}: {plural(len(plans), 'candidate')}, {plural(_count(plans, seeds), 'run')}, each "
        f"trained in full for {steps} steps"
    )
    if len(seeds) > 1 and any(splits.record["seed"] is not None for splits, _ in planner.opened.values()):
        training.print("the data does not define all splits, so every seed draws its own")
    if not plans[0].has_test:
        training.print("the data has no test split, so the candidates are compared on the validation split")


def _print_selection(row: CandidateResult, training: SweepTraining) -> None:
    if row.values:
        training.print(f"{row.name}: {chosen_text(row)} is the best on the validation split")
    for key in row.at_edge:
        training.print(f"{row.name}: the best {key} is the lowest or highest that was tried; try more values there")
