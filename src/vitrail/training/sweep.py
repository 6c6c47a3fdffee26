"""`sweep`: several runs that differ in a few settings; the val split chooses one, and it alone meets the test split.

sweep.json                 what was tried, and what came of it
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
from vitrail.terminal import printable
from vitrail.training.criterion import COLUMNS, TITLES, Criterion, score, shared_criterion
from vitrail.training.finetune_init import opened_pretrained
from vitrail.training.grid import Trial, combine, plan_trials
from vitrail.training.recipe import Recipe, default_recipe, read_recipe, unknown_setting
from vitrail.training.run_folder import (
    METRICS,
    RECIPE,
    SWEEP,
    MetricsFile,
    best_row,
    claimed,
    default_folder,
    keep_recipe,
    origin_of,
    write_json,
)
from vitrail.training.signals import Stopped
from vitrail.training.train import Run, train

CANDIDATE = "candidate.json"


@dataclass(frozen=True)
class Outcome:
    """What came of a run; the val numbers are those of its best moment, and None where it diverged."""

    val_top1: float | None
    val_loss: float | None
    val_balanced_accuracy: float | None
    val_macro_f1: float | None
    best_step: int | None
    steps: int
    seconds: float
    diverged: str | None
    """Why it ended before its time."""


@dataclass(frozen=True)
class Candidate:
    """One of the runs of a sweep."""

    values: dict[str, Any]
    folder: Path
    outcome: Outcome


class Spread(NamedTuple):
    """How far the same settings come with different seeds, on the validation split."""

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
    """The run of the chosen candidate, measured on the test split."""
    criterion: Criterion
    """By what the candidate was chosen."""

    @property
    def seeds(self) -> list[Spread]:
        """The spread over the seeds for each of the other settings; empty where the seed was not swept."""
        return _spreads(self.candidates)


@dataclass(frozen=True)
class _Training:
    """What all candidates are trained with."""

    data: str | Path
    pretrained: str | Path | Bundle | None
    device: str
    workers: int | None
    quiet: bool
    said: set[str] = field(default_factory=set)
    """What a candidate has shown of the data, which the others need not repeat."""

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
            said=self.said,
        )

    def say(self, text: str) -> None:
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
    """Train with every combination of some settings, and return what came of each, and the best run.

    `over` is such as {"optimizer.lr": [0.003, 0.01]}; the other arguments are those of `train`. The validation split
    chooses, by the criterion of the recipe and among equals by the loss; only the chosen run is measured on the test
    split. The same call goes on with a sweep that was stopped, and repeats nothing that is finished.
    """
    for argument in unknown:
        raise unknown_setting(sweep, argument, unknown[argument])
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("a sweep runs in one process; start it without torchrun, or train each candidate by itself")
    data = place_of(data)
    kind = choose_device(device).type  # refuses a wrong one before anything is read
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
        auto = trial.plan.recipe.batch == "auto"  # the run itself knows what it settled on
        if (place / trial.folder_name / RECIPE).exists() and not auto:
            keep_recipe(place / trial.folder_name, trial.plan.recipe)  # refuses another one
    with claimed(place):
        candidates = _try_all(trials, place, training, len(recipes) - len(trials))
        criterion = shared_criterion(trial.plan.recipe.settled_criterion() for trial in trials)
        chosen = _best(candidates, place, criterion)
        training.say(
            f"{trials[candidates.index(chosen)].title} has the best {TITLES[criterion]} on the validation split"
            f"{_tie(candidates, chosen, criterion)}; its run is the training with these settings, so "
            "that only its result on the test split is missing"
        )
        best = training.run(trials[candidates.index(chosen)], chosen.folder, "test")
        _write(place, candidates, chosen)
    return Sweep(place, candidates, chosen, best, criterion)


def _default_folder(trials: Sequence[Trial], data: str | Path, pretrained: Bundle | None) -> Path:
    place = default_folder(origin_of(data, pretrained), [trial.plan.recipe for trial in trials])
    return place.with_name(f"{place.name}-sweep")


def _try_all(trials: Sequence[Trial], place: Path, training: _Training, dropped: int) -> list[Candidate]:
    """Train every candidate that is not finished; write down after each what is known."""
    steps = sorted({trial.plan.steps for trial in trials})
    each = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    training.say(
        f"the sweep is in {place}: {len(trials)} {'run' if len(trials) == 1 else 'runs'}, each of them in full, "
        f"{each} steps (--set epochs=… makes them shorter)"
    )
    if dropped:
        training.say(
            f"{dropped} more would be the same as one of these, and {'is' if dropped == 1 else 'are'} left out"
        )
    candidates: list[Candidate] = []
    if not (place / SWEEP).exists():
        _write(place, candidates)  # from now on the folder is known for what it is
    for number, trial in enumerate(trials, 1):
        folder = place / trial.folder_name
        outcome = _recorded(folder)
        training.say(f"{number} of {len(trials)}: {trial.title}{' was finished before' if outcome else ''}")
        candidates.append(Candidate(trial.values, folder, outcome or _try(trial, folder, training)))
        _write(place, candidates)
    return candidates


def _try(trial: Trial, folder: Path, training: _Training) -> Outcome:
    """Train a candidate, or go on with it, without a look at the test split."""
    spent_before = _read(folder).get("seconds")
    began = time.monotonic() - (spent_before if isinstance(spent_before, float) else 0.0)
    try:
        training.run(trial, folder, "val")
    except Stopped:
        write_json(folder / CANDIDATE, {"seconds": time.monotonic() - began})
        raise
    except Diverged as error:
        training.say(str(error))
        outcome = Outcome(None, None, None, None, None, trial.plan.steps, time.monotonic() - began, str(error))
    else:
        best = _best_row(folder)
        spent = time.monotonic() - began
        reached = (best["val_top1"], best["val_loss"], best["val_balanced_accuracy"], best["val_macro_f1"])
        outcome = Outcome(*reached, best["step"], trial.plan.steps, spent, None)
    write_json(folder / CANDIDATE, asdict(outcome))
    return outcome


def _best_row(folder: Path) -> dict[str, Any]:
    """Return what the journal of a finished candidate says of its best moment."""
    best = best_row(MetricsFile.read(folder))
    if best is None or not best.keys() >= set(COLUMNS.values()):
        raise CheckpointError(f"{folder / METRICS} is damaged; delete {folder}, and the same command trains it again")
    return best


def _read(folder: Path) -> dict[str, Any]:
    """Return what is written down of a candidate; nothing where it is damaged, because the run knows it again."""
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


def _best(candidates: Sequence[Candidate], place: Path, criterion: Criterion) -> Candidate:
    done = [candidate for candidate in candidates if candidate.outcome.diverged is None]
    if not done:
        raise Diverged(f"every run of the sweep in {place} diverged; the first: {candidates[0].outcome.diverged}")
    return max(done, key=lambda candidate: score(asdict(candidate.outcome), criterion))


def _tie(candidates: Sequence[Candidate], chosen: Candidate, criterion: Criterion) -> str:
    """Say that the loss decided, where others are as good by the criterion."""
    column = COLUMNS[criterion]
    equal = sum(getattr(one.outcome, column) == getattr(chosen.outcome, column) for one in candidates) - 1
    if criterion == "loss" or not equal:
        return ""
    return f" (the same as {equal} {'other' if equal == 1 else 'others'}, and the lowest loss of these)"


def _spreads(candidates: Sequence[Candidate]) -> list[Spread]:
    """Put candidates together that differ only in the seed."""
    if not candidates or "seed" not in candidates[0].values:
        return []
    groups: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for candidate in candidates:
        rest = {key: value for key, value in candidate.values.items() if key != "seed"}
        _, scores = groups.setdefault(json.dumps(rest), (rest, []))
        if candidate.outcome.val_top1 is not None:
            scores.append(candidate.outcome.val_top1)
    return [
        Spread(rest, len(scores), statistics.fmean(scores), min(scores), max(scores))
        for rest, scores in groups.values()
        if len(scores) > 1
    ]


def _write(place: Path, candidates: Sequence[Candidate], chosen: Candidate | None = None) -> None:
    rows = [{"values": c.values, "folder": c.folder.name, **asdict(c.outcome)} for c in candidates]
    seeds = [spread._asdict() for spread in _spreads(candidates)]
    write_json(place / SWEEP, {"candidates": rows, "best": chosen.folder.name if chosen else None, "seeds": seeds})
