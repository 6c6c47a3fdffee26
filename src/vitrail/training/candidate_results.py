"""The results of a sweep of named candidates, read from the folders of its runs; sweep.json and sweep.svg."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from vitrail.charts.dots import DotRow, dot_chart
from vitrail.errors import CheckpointError
from vitrail.io import ContentError, read_json
from vitrail.metrics.intervals import t_interval
from vitrail.tasks.metrics import Metrics, MetricSpec
from vitrail.tasks.task import Task
from vitrail.training.grid import format_value
from vitrail.training.run_folder import RESULT, SWEEP, write_json, write_text
from vitrail.training.sessions import read_sessions
from vitrail.training.sweep_run import Outcome, SweepRun

CHART = "sweep.svg"
KEPT_LISTS = ("_interval", "warnings")
"""Endings of the keys of a result whose lists sweep.json repeats; all others are in the run's result.json only."""


class Estimate(NamedTuple):
    """The mean of a metric over the seeds of a candidate, without the runs that diverged."""

    runs: int
    mean: float
    low: float | None
    """The 95% t-interval; None for a single run. A fraction stays between 0 and 1."""
    high: float | None


@dataclass(frozen=True)
class SeedResult:
    """A candidate's run with one seed."""

    seed: int
    folder: Path
    outcome: Outcome
    """Validation metrics, seconds, and whether it diverged."""
    test: dict[str, Any] | None
    """Its metrics on the test split, as of `Metrics.as_dict`; None if it diverged, or without a test split."""


@dataclass(frozen=True)
class CandidateResult:
    """A row of a sweep: one candidate."""

    name: str
    settings: dict[str, Any]
    """Its own settings."""
    tried: list[SweepRun]
    """Every combination of its grid, trained with the first seed."""
    values: dict[str, Any] | None
    """The selected values of its grid; None if every combination diverged, or while they are being tried."""
    at_edge: list[str]
    """The settings whose selected value is the lowest or highest that was tried: a better one may be outside."""
    seeds: list[SeedResult]
    """The selected settings, with every seed."""
    validation: Estimate | None
    """The headline metric on the validation split."""
    test: Estimate | None
    """The headline metric on the test split."""

    @property
    def outcomes(self) -> dict[Path, Outcome]:
        """The outcome of every run, by its folder."""
        return {run.folder: run.outcome for run in self.tried} | {run.folder: run.outcome for run in self.seeds}

    @property
    def diverged(self) -> list[Path]:
        """The folders of the runs that diverged."""
        return [folder for folder, outcome in self.outcomes.items() if outcome.diverged is not None]

    @property
    def seconds(self) -> float:
        """How long all its runs took together."""
        return sum(outcome.seconds for outcome in self.outcomes.values())

    def row(self, place: Path) -> dict[str, Any]:
        """Return the row of sweep.json; paths are relative to the sweep."""
        return {
            "name": self.name,
            "settings": self.settings,
            "values": self.values,
            "at_edge": self.at_edge,
            "validation": self.validation and self.validation._asdict(),
            "test": self.test and self.test._asdict(),
            "seconds": self.seconds,
            "diverged": [_inside(folder, place) for folder in self.diverged],
            "seeds": [
                {"seed": run.seed, **_run(run, place), "test": run.test and _short(run.test)} for run in self.seeds
            ],
            "tried": [{"values": run.values, **_run(run, place)} for run in self.tried],
        }


def _run(run: SeedResult | SweepRun, place: Path) -> dict[str, Any]:
    outcome = asdict(run.outcome)
    if run.outcome.diverged is not None:
        outcome["diverged"] = run.outcome.diverged.replace(str(run.folder), _inside(run.folder, place))
    return {"folder": _inside(run.folder, place), **outcome}


def _inside(folder: Path, place: Path) -> str:
    return folder.relative_to(place).as_posix()


def _short(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without its tables, such as the confusion matrix."""
    return {
        key: value
        for key, value in result.items()
        if not isinstance(value, list | dict) or (isinstance(value, list) and key.endswith(KEPT_LISTS))
    }


@dataclass(frozen=True)
class CandidateSweep:
    """A sweep of named candidates."""

    folder: Path
    candidates: list[CandidateResult]
    seeds: list[int]
    settings: dict[str, Any]
    """The settings of every candidate."""
    task: Task
    criterion: str
    """The validation metric that selected the settings."""

    @property
    def seconds(self) -> float:
        """How long all runs took together."""
        return sum(candidate.seconds for candidate in self.candidates)

    @property
    def tested(self) -> bool:
        """Whether there are results on the test split."""
        return any(candidate.test is not None for candidate in self.candidates)

    def write(self) -> None:
        """Write sweep.json and sweep.svg."""
        folders = [folder for candidate in self.candidates for folder in candidate.outcomes]
        sessions = [session for folder in folders for session in read_sessions(folder)]
        write_json(
            self.folder / SWEEP,
            {
                "headline": self.task.headline.name,
                "criterion": self.criterion,
                "seeds": self.seeds,
                "settings": self.settings,
                "device": _joined(session.device for session in sessions),
                "torch": _joined(session.torch for session in sessions),
                "vitrail": _joined(session.vitrail for session in sessions),
                "seconds": self.seconds,
                "candidates": [candidate.row(self.folder) for candidate in self.candidates],
            },
        )
        write_text(self.folder / CHART, self.chart())

    def chart(self) -> str:
        """Return the results as an SVG: a row per candidate, with a dot per seed, the mean and its interval."""
        headline, split = self.task.headline, "test" if self.tested else "validation"
        rows = []
        for candidate in self.candidates:
            estimate = candidate.test if self.tested else candidate.validation
            values = [reached for run in candidate.seeds if (reached := _headline(run, self.task, split)) is not None]
            if estimate is None:
                rows.append(DotRow(candidate.name, (), None, note="diverged" if candidate.diverged else "not finished"))
                continue
            interval = None if estimate.low is None or estimate.high is None else (estimate.low, estimate.high)
            rows.append(DotRow(candidate.name, values, estimate.mean, interval, chosen_text(candidate)))
        title = f"{headline.name.capitalize()} on the {split} split"
        what = "dots: seeds; line: mean and 95% interval" if len(self.seeds) > 1 else "one seed"
        return dot_chart(rows, title=title, x_label=what, unit=headline.unit)


def _joined(values: Iterable[str]) -> str | None:
    """Join the distinct values; None if there are none."""
    return "; ".join(sorted(set(values))) or None


def chosen_text(candidate: CandidateResult) -> str:
    """Return the selected values as text."""
    return ", ".join(f"{key}={format_value(value)}" for key, value in (candidate.values or {}).items())


# ── from the folders of the runs ──


class CandidateRuns(NamedTuple):
    """The outcomes of a candidate, as far as they are recorded."""

    tried: Sequence[SweepRun]
    seeds: Sequence[SeedResult]
    chosen: SweepRun | None


def candidate_result(name: str, settings: dict[str, Any], runs: CandidateRuns, task: Task) -> CandidateResult:
    """Return the row of a candidate."""
    return CandidateResult(
        name,
        settings,
        list(runs.tried),
        None if runs.chosen is None else runs.chosen.values,
        [] if runs.chosen is None else _at_edge(runs.chosen, runs.tried),
        list(runs.seeds),
        _estimate([_headline(run, task, "validation") for run in runs.seeds], task.headline),
        _estimate([_headline(run, task, "test") for run in runs.seeds], task.headline),
    )


def read_result(folder: Path, task: Task) -> dict[str, Any] | None:
    """Return the test metrics of a run; None if it has none."""
    path = folder / RESULT
    try:
        content: dict[str, Any] = read_json(path)
        _metrics(content, task)
    except FileNotFoundError:
        return None
    except (OSError, ContentError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); delete it, and rerun the same command to evaluate the run again"
        ) from None
    return content


def _metrics(result: dict[str, Any], task: Task) -> Metrics:
    return task.metrics.from_dict(result)


def _headline(run: SeedResult, task: Task, split: str) -> float | None:
    if split == "validation":
        return run.outcome.metrics.get(task.headline.key)
    return None if run.test is None else _metrics(run.test, task).headline.value


def _estimate(values: Sequence[float | None], headline: MetricSpec) -> Estimate | None:
    reached = [value for value in values if value is not None]
    if not reached:
        return None
    interval = t_interval(reached)
    if interval is None:
        return Estimate(1, reached[0], None, None)
    low, high = interval
    if headline.unit == "percent":
        low, high = max(0.0, low), min(1.0, high)
    return Estimate(len(reached), fmean(reached), low, high)


def _at_edge(chosen: SweepRun, tried: Sequence[SweepRun]) -> list[str]:
    """Return the settings with a number that is the lowest or highest of those tried."""
    edges = []
    for key, value in chosen.values.items():
        values = {run.values[key] for run in tried if type(run.values[key]) in (int, float)}
        if len(values) > 1 and value in (min(values), max(values)):
            edges.append(key)
    return edges
