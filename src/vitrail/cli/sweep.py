"""`vitrail train --sweep`: what to sweep over, and the tables of the results."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.output import echo, print_table
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.training.candidate_results import CandidateResult, CandidateSweep, Estimate
    from vitrail.training.sweep import Sweep


def sweep_source(texts: list[str] | None, only: list[str] | None, jobs: int) -> dict[str, Any] | Path | None:
    """Return the grid or the file of candidates that the options describe; None without a sweep."""
    from vitrail.training.grid import read_sweep

    files = [text for text in texts or [] if text.endswith(".toml") and "=" not in text]
    if not texts and (only or jobs != 1):
        raise ConfigError(f"{'--only' if only else '--jobs'} belongs to a sweep; add --sweep")
    if not files and only:
        raise ConfigError("--only selects candidates of a file; use --sweep FILE.toml")
    if not files:
        return read_sweep(texts) if texts else None
    if len(texts or []) > 1:
        raise ConfigError(f"--sweep {files[0]} names the candidates; it cannot be combined with another --sweep")
    return Path(files[0])


def print_sweep(done: "Sweep") -> None:
    """Print a row per run, and the spread over seeds."""
    from vitrail.training.grid import format_value

    keys = list(done.runs[0].values)
    headline, by = done.task.headline, done.task.criteria[done.criterion]
    shown = [headline, *([by] if by.key not in (headline.key, "val_loss") else [])]
    numbers = (*(f"val {one.name}" for one in shown), "val loss", "best step", "minutes")
    rows = []
    for run in done.runs:
        outcome = run.outcome
        scores = ["–"] * (len(shown) + 2)
        if outcome.metrics:
            reached = [one.show(outcome.metrics[one.key]) for one in shown]
            scores = [*reached, f"{outcome.metrics['val_loss']:.4f}", f"{outcome.best_step:,}"]
        result = "diverged" if outcome.diverged else "best" if run is done.chosen else ""
        values = [format_value(run.values[key]) for key in keys]
        rows.append((*values, *scores, f"{outcome.seconds / 60:.1f}", result))
    print_table((*keys, *numbers, "result"), rows, numbers=(*keys, *numbers))
    for spread in done.seeds:
        which = "".join(f"{key}={format_value(value)}, " for key, value in spread.values.items())
        echo(
            f"{which}{spread.runs} seeds: mean validation {headline.name} {headline.show(spread.mean)}, range "
            f"{headline.show(spread.lowest)} to {headline.show(spread.highest)}"
        )
    if done.seeds:
        echo(
            "The best of several seeds is partly luck: expect the mean from a new run. If the data has no splits, "
            "every seed drew its own."
        )
    echo("")


def print_candidates(done: "CandidateSweep") -> None:
    """Print a row per candidate."""
    from vitrail.training.candidate_results import CHART, chosen_text

    title = done.task.headline.name
    numbers = (f"val {title}", f"test {title}", "95% interval", "minutes")
    rows = []
    for row in done.candidates:
        test = row.test if done.tested else None
        cells = (_mean(row.validation, done), _mean(test, done), _interval(test or row.validation, done))
        rows.append((row.name, chosen_text(row) or "–", *cells, f"{row.seconds / 60:.1f}", _note(row, done)))
    print_table(("candidate", "chosen", *numbers, "note"), rows, numbers=numbers)
    echo("")
    echo(f"the results are in {done.folder / 'sweep.json'}; the chart is {done.folder / CHART}")


def _mean(estimate: "Estimate | None", done: "CandidateSweep") -> str:
    return "–" if estimate is None else done.task.headline.show(estimate.mean)


def _interval(estimate: "Estimate | None", done: "CandidateSweep") -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return "–"
    low, high = done.task.headline.show(estimate.low), done.task.headline.show(estimate.high)
    return f"{low.removesuffix('%')}–{high}"


def _note(row: "CandidateResult", done: "CandidateSweep") -> str:
    """Return what to keep in mind about a row."""
    notes = [f"{key} at the edge of its values" for key in row.at_edge]
    if row.diverged:
        notes.append(f"{len(row.diverged)} diverged")
    if row.values is not None and len(row.seeds) < len(done.seeds):
        notes.append(f"{len(row.seeds)} of {len(done.seeds)} seeds")
    elif row.values is None and not row.diverged:
        notes.append("not all values trained" if row.tried else "not trained")
    return ", ".join(notes)
