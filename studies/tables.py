"""What the pages of the studies share: the results of sweeps, and their numbers as text and tables."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from vitrail.metrics.intervals import t_interval

STUDIES = Path(__file__).resolve().parent


class Study(NamedTuple):
    """The pieces of a page, by the names of their markers, and its charts, by file name."""

    pieces: dict[str, str]
    charts: dict[str, str]


# ── results ──


def read(name: str, file: str = "sweep.json") -> Any:
    """Read a result of a study."""
    return json.loads((STUDIES / name / file).read_text(encoding="utf-8"))


def by_name(sweep: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the candidates by their names."""
    return {candidate["name"]: candidate for candidate in sweep["candidates"]}


def test_accuracies(candidate: dict[str, Any]) -> list[float]:
    """Return the test accuracy of each seed."""
    return [run["test"]["top1"] for run in candidate["seeds"] if run["test"] is not None]


# ── text ──


def percent(value: float | None) -> str:
    """Format a fraction with one decimal."""
    return "–" if value is None else f"{100 * value:.1f}"


def between(value: float, low: float, high: float) -> str:
    """Format an estimate and its interval: 71.3 (70.8–71.8)."""
    return f"{percent(value)} ({percent(max(0.0, low))}–{percent(min(1.0, high))})"


def estimate(values: list[float]) -> str:
    """Format the mean and the 95% t-interval of some fractions."""
    interval = t_interval(values)
    return f"{percent(fmean(values))} (one seed)" if interval is None else between(fmean(values), *interval)


def table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Return a Markdown table; the first `left` columns are text."""
    ruler = ["---" if index < left else "---:" for index in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ruler, *rows]) + "\n"


def learning_rate(candidate: dict[str, Any]) -> str:
    """Return the selected learning rate, marked if it is the lowest or highest that was tried."""
    rate = (candidate["values"] or {}).get("optimizer.lr")
    if rate is None:
        return "–"
    return f"{rate:g}{' (edge)' if 'optimizer.lr' in candidate['at_edge'] else ''}"


def cost(*sweeps: dict[str, Any]) -> str:
    """Return on what the sweeps ran, and how many runs they had."""
    runs = sum(len(folders(sweep)) for sweep in sweeps)
    minutes = sum(sweep["seconds"] for sweep in sweeps) / 60 / runs
    first = sweeps[0]
    return (
        f"{runs} runs on one {first['device']}, several at once: each took {minutes:.1f} minutes, "
        f"with startup and evaluation. torch {first['torch']}, vitrail {first['vitrail']}.\n"
    )


def folders(sweep: dict[str, Any]) -> set[str]:
    """Return the folders of the runs of a sweep."""
    return {run["folder"] for candidate in sweep["candidates"] for run in candidate["seeds"] + candidate["tried"]}
