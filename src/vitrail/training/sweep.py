"""`sweep`: train combinations of settings, select one on the validation split, evaluate only it on the test split.

sweep.json                 the candidates and their metrics
lr=0.003/ lr=0.01/ …       the runs, each an ordinary run folder with a candidate.json
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Never

from pydantic import TypeAdapter, ValidationError

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.sources.source import place_of
from vitrail.errors import CheckpointError, ConfigError, Diverged
from vitrail.io import ContentError, read_json
from vitrail.runtime import choose_device
from vitrail.tasks.metrics import MetricSpec
from vitrail.tasks.task import Task
from vitrail.text import printable
from vitrail.training.criterion import score, shared_criterion
from vitrail.training.finetune_init import opened_pretrained
from vitrail.training.grid import Trial, combine, plan_trials
from vitrail.training.recipe import Recipe, default_recipe, read_recipe, unknown_setting
from vitrail.training.run_folder import (
    METRICS,
    RECIPE,
    SWEEP,
    MetricsFile,
    best_row,
    default_folder,
    keep_recipe,
    locked,
    origin_of,
    write_json,
)
from vitrail.training.sessions import Stopped
from vitrail.training.train import Run, train

CANDIDATE = "candidate.json"


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
class Candidate:
    """One of the runs of a sweep."""

    values: dict[str, Any]
    folder: Path
    outcome: Outcome


class Spread(NamedTuple):
    """The headline validation metric of the same settings over several seeds."""

    values: dict[str, Any]
    """The settings, without the seed."""
    runs: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Sweep:
    """A finished sweep."""

    folder: Path
    candidates: list[Candidate]
    chosen: Candidate
    best: Run
    """The run of the selected candidate, evaluated on the test split."""
    task: Task
    criterion: str
    """The metric that selected the candidate."""

    @property
    def seeds(self) -> list[Spread]:
        """Spread over seeds for each combination of the other settings; empty if the seed is not swept."""
        return _spreads(self.candidates, self.task.headline)


@dataclass(frozen=True)
class _Training:
    """The arguments that all candidates share."""

    data: str | Path
    pretrained: str | Path | Bundle | None
    device: str
    workers: int | None
    quiet: bool
    printed: set[str] = field(default_factory=set)
    """Messages about the data that an earlier candidate has printed."""

    def run(self, trial: Trial, folder: Path, evaluate_on: Literal["test", "val"]) -> Run:
        return train(
            self.data,
            recipe=trial.recipe,
            pretrained=self.pretrained,
            folder=folder,
            device=self.device,
            workers=self.workers,
            quiet=self.quiet,
            evaluate_on=evaluate_on,
            printed=self.printed,
        )

    def print(self, text: str) -> None:
        if not self.quiet:
            print(printable(text), file=sys.stderr, flush=True)


def sweep(
    data: str | Path = "digits",
    *,
    over: Mapping[str, Sequence[Any]],
    recipe: str | Path | Recipe | None = None,
    changes: Sequence[str] = (),
    pretrained: str | Path | Bundle | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    folder: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    quiet: bool = False,
    **unknown: Never,
) -> Sweep:
    """Train every combination of some settings; return their validation metrics and the best run.

    `over` maps settings to values: {"optimizer.lr": [0.003, 0.01]}; the other arguments are those of `train`. The best
    run is selected on the validation split by the recipe's criterion, with the loss as a tie-breaker; only that run is
    evaluated on the test split. Call it again with the same arguments to resume an interrupted sweep.
    """
    for argument in unknown:
        raise unknown_setting(sweep, argument, unknown[argument])
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("a sweep runs in one process; start it without torchrun, or train each candidate by itself")
    data = place_of(data)
    kind = choose_device(device).type  # raises for an invalid device before anything is read
    recipes = [
        (values, read_recipe(recipe or default_recipe(pretrained), changes, values))
        for values in combine(over, changes)
    ]
    for _, tried in recipes:
        tried.check_pretrained(pretrained)
    bundle = opened_pretrained(pretrained, overrides, keys)
    training = _Training(data, bundle, device, workers, quiet)
    trials = plan_trials(recipes, data, bundle, kind)
    place = Path(folder) if folder is not None else _default_folder(trials, data, bundle)
    if (place / RECIPE).exists():
        raise ConfigError(f"{place} holds a run, not a sweep; choose another --run")
    for trial in trials:
        auto = trial.plan.recipe.batch == "auto"  # the run has recorded its resolved batch size
        if (place / trial.folder_name / RECIPE).exists() and not auto:
            keep_recipe(place / trial.folder_name, trial.plan.recipe)  # raises for a different recipe
    with locked(place):
        candidates = _try_all(trials, place, training, len(recipes) - len(trials))
        task = trials[0].plan.task
        name = shared_criterion(task, (trial.plan.recipe.resolved_criterion() for trial in trials))
        criterion = task.criteria[name]
        chosen = _best(candidates, place, criterion)
        training.print(
            f"{trials[candidates.index(chosen)].title} has the best {criterion.name} on the validation split"
            f"{_tie(candidates, chosen, criterion)}; it is already trained, so only the evaluation on the test split "
            "is left"
        )
        best = training.run(trials[candidates.index(chosen)], chosen.folder, "test")
        _write(place, candidates, task.headline, chosen)
    return Sweep(place, candidates, chosen, best, task, name)


def _default_folder(trials: Sequence[Trial], data: str | Path, pretrained: Bundle | None) -> Path:
    place = default_folder(origin_of(data, pretrained), [trial.plan.recipe for trial in trials])
    return place.with_name(f"{place.name}-sweep")


def _try_all(trials: Sequence[Trial], place: Path, training: _Training, dropped: int) -> list[Candidate]:
    """Train every unfinished candidate; update sweep.json after each."""
    steps = sorted({trial.plan.steps for trial in trials})
    each = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    training.print(
        f"the sweep is in {place}: {len(trials)} {'run' if len(trials) == 1 else 'runs'}, each trained in full for "
        f"{each} steps (shorten them with --set epochs=…)"
    )
    if dropped:
        training.print(f"{dropped} {'duplicate is' if dropped == 1 else 'duplicates are'} dropped")
    candidates: list[Candidate] = []
    headline = trials[0].plan.task.headline
    if not (place / SWEEP).exists():
        _write(place, candidates, headline)  # marks the folder as a sweep
    for number, trial in enumerate(trials, 1):
        folder = place / trial.folder_name
        outcome = _recorded(folder)
        training.print(f"{number} of {len(trials)}: {trial.title}{' is already finished' if outcome else ''}")
        candidates.append(Candidate(trial.values, folder, outcome or _try(trial, folder, training)))
        _write(place, candidates, headline)
    return candidates


def _try(trial: Trial, folder: Path, training: _Training) -> Outcome:
    """Train or resume a candidate, without touching the test split."""
    spent_before = _read(folder).get("seconds")
    start = time.monotonic() - (spent_before if isinstance(spent_before, float) else 0.0)
    try:
        training.run(trial, folder, "val")
    except Stopped:
        write_json(folder / CANDIDATE, {"seconds": time.monotonic() - start})
        raise
    except Diverged as error:
        training.print(str(error))
        outcome = Outcome({}, None, trial.plan.steps, time.monotonic() - start, str(error))
    else:
        best = _best_row(folder, trial.plan.task)
        reached = {name: value for name, value in best.items() if name.startswith("val_")}
        outcome = Outcome(reached, best["step"], trial.plan.steps, time.monotonic() - start, None)
    write_json(folder / CANDIDATE, asdict(outcome))
    return outcome


def _best_row(folder: Path, task: Task) -> dict[str, Any]:
    """Return the validation row of a finished candidate's best checkpoint."""
    best = best_row(MetricsFile.read(folder))
    if best is None or not best.keys() >= {criterion.key for criterion in task.criteria.values()}:
        raise CheckpointError(
            f"{folder / METRICS} is corrupt; delete {folder}, and rerun the same command to train it again"
        )
    return best


def _read(folder: Path) -> dict[str, Any]:
    """Read candidate.json; empty if it is corrupt, because the run can restore it."""
    try:
        content = read_json(folder / CANDIDATE)
    except (OSError, ContentError):
        return {}
    return content if isinstance(content, dict) else {}


def _recorded(folder: Path) -> Outcome | None:
    content = _read(folder)
    try:
        return TypeAdapter(Outcome).validate_python(content)
    except ValidationError:
        return None


def _best(candidates: Sequence[Candidate], place: Path, criterion: MetricSpec) -> Candidate:
    done = [candidate for candidate in candidates if candidate.outcome.diverged is None]
    if not done:
        raise Diverged(f"every run of the sweep in {place} diverged; the first: {candidates[0].outcome.diverged}")
    scores = {candidate.folder: score(candidate.outcome.metrics, criterion) for candidate in done}
    return max(done, key=lambda candidate: (scores[candidate.folder].known, scores[candidate.folder]))


def _tie(candidates: Sequence[Candidate], chosen: Candidate, criterion: MetricSpec) -> str:
    """Mention that the loss broke a tie, if it did."""
    values = [one.outcome.metrics.get(criterion.key) for one in candidates]
    equal = values.count(chosen.outcome.metrics[criterion.key]) - 1
    if criterion.key == "val_loss" or not equal:
        return ""
    return f" (tied with {equal} {'other' if equal == 1 else 'others'}, and has the lowest loss of them)"


def _spreads(candidates: Sequence[Candidate], headline: MetricSpec) -> list[Spread]:
    """Group candidates that differ only in the seed."""
    if not candidates or "seed" not in candidates[0].values:
        return []
    groups: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for candidate in candidates:
        rest = {key: value for key, value in candidate.values.items() if key != "seed"}
        _, scores = groups.setdefault(json.dumps(rest), (rest, []))
        if headline.key in candidate.outcome.metrics:
            scores.append(candidate.outcome.metrics[headline.key])
    return [
        Spread(rest, len(scores), statistics.fmean(scores), min(scores), max(scores))
        for rest, scores in groups.values()
        if len(scores) > 1
    ]


def _write(place: Path, candidates: Sequence[Candidate], headline: MetricSpec, chosen: Candidate | None = None) -> None:
    rows = [{"values": c.values, "folder": c.folder.name, **asdict(c.outcome)} for c in candidates]
    seeds = [spread._asdict() for spread in _spreads(candidates, headline)]
    write_json(place / SWEEP, {"candidates": rows, "best": chosen.folder.name if chosen else None, "seeds": seeds})
