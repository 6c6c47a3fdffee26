"""Draw the tables and charts of a study's page from its results.

    python studies/draw.py pooling            # writes docs/studies/pooling.md and docs/studies/*.svg
    python studies/draw.py --check            # is every page up to date?

The results are JSON files in studies/NAME/, most of them the sweep.json of a run folder. On the page, the text
between `<!-- drawn: … -->` and `<!-- end -->` is replaced; everything else is written by hand.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

# Python adds a script's own folder to the path, but not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from studies.pretraining.draw import pretraining
from studies.tables import (
    STUDIES,
    Study,
    by_name,
    cost,
    estimate,
    learning_rate,
    percent,
    read,
    table,
    test_accuracies,
)

from vitrail.charts.dots import DotRow, dot_chart
from vitrail.charts.lines import Series, line_chart
from vitrail.metrics.intervals import t_interval

ROOT = STUDIES.parent
PAGES = ROOT / "docs" / "studies"
TINY_CLASSES, TINY_PER_CLASS = 202, 475
"""Classes of Tiny-ImageNet, and training images of each, without the 5% for validation."""
POSITIONS: dict[str, tuple[str, float | None]] = {
    "none": ("none", 0.61382),
    "learned-1d": ("learned 1-D", 0.64206),
    "learned-1d-every-block": ("learned 1-D, every block", 0.63964),
    "learned-1d-shared": ("learned 1-D, shared", 0.64292),
    "learned-2d": ("learned 2-D", 0.64001),
    "learned-2d-every-block": ("learned 2-D, every block", 0.64046),
    "learned-2d-shared": ("learned 2-D, shared", 0.64022),
    "relative": ("relative", 0.64032),
    "sincos": ("sincos 2-D", None),
    "sincos-shared": ("sincos 2-D, shared", None),
    "rope": ("RoPE 2-D", None),
}
"""The candidates of the positions study as text, and their accuracy in the ViT paper (table 8), if it has them."""
RESOLUTION = {"learned": "learned 1-D", "sincos": "sincos 2-D", "rope": "RoPE 2-D"}
POOLING = {"class-token": "class token", "mean": "mean", "attention": "attention (MAP)"}
DRAWN = re.compile(r"(<!-- drawn: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


# ── studies ──


def subset_size(fraction: float) -> int:
    """Return how many images of Tiny-ImageNet `data.fraction` leaves: it is rounded for every class."""
    return TINY_CLASSES * max(1, math.floor(fraction * TINY_PER_CLASS + 0.5))


def data_size() -> Study:
    """Accuracy against the number of training images, for each model."""
    sweep = read("data-size")
    candidates, models = by_name(sweep), {"vit": "ViT", "vit-conv": "ViT, conv stem", "resnet": "ResNet"}
    percents = [1, 3, 10, 30, 100]
    images = {share: subset_size(share / 100) for share in percents}
    rows, series = [], []
    for colour, (key, title) in enumerate(models.items(), start=1):
        results = {share: test_accuracies(candidates[f"{key}-{share}"]) for share in percents}
        rows.append([title, *(estimate(results[share]) for share in percents)])
        spans = [t_interval(results[share]) or (fmean(results[share]),) * 2 for share in percents]
        means = [fmean(results[share]) for share in percents]
        series.append(Series(title, list(images.values()), means, colour, marks=True, intervals=spans))
    chart = line_chart(
        series, title="Test accuracy against the number of training images", x_label="training images", x_log=True,
        x_unit="integer", y_unit="percent", y_label="accuracy", width=640, height=360,
    )  # fmt: skip
    header = ["test accuracy, %", *(f"{share}%: {images[share]:,}" for share in percents)]
    rates = [
        [title, *(learning_rate(candidates[f"{key}-{share}"]) for share in percents)] for key, title in models.items()
    ]
    pieces = {
        "table": table(header, rows),
        "rates": table(["learning rate", *(f"{share}%" for share in percents)], rates),
        "cost": cost(sweep),
    }
    return Study(pieces, {"data-size.svg": chart})


def positions() -> Study:
    """Accuracy of each kind of position embedding, and on shuffled patches."""
    sweep, shuffled = read("positions"), read("positions", "shuffled.json")
    first = read("positions", "learning-rates.json")
    rows = []
    for one in sweep["candidates"]:
        title, paper = POSITIONS[one["name"]]
        rows.append([title, estimate(test_accuracies(one)), estimate(shuffled[one["name"]]), percent(paper)])
    header = ["positions", "test accuracy, %", "patches shuffled, %", "paper, %"]
    rates = list(next(iter(first.values())))
    tried = [[POSITIONS[name][0], *(percent(values[rate]) for rate in rates)] for name, values in first.items()]
    pieces = {
        "table": table(header, rows),
        "rates": table(["validation accuracy, %", *rates], tried),
        "cost": cost(sweep),
    }
    chart = dots(sweep, {name: title for name, (title, _) in POSITIONS.items()})
    return Study(pieces, {"positions.svg": chart})


def pooling() -> Study:
    """Accuracy of each pooling, and validation accuracy at each learning rate."""
    sweep = read("pooling")
    series = []
    for colour, candidate in enumerate(sweep["candidates"], start=1):
        tried = sorted((run["values"]["optimizer.lr"], run["metrics"].get("val_top1")) for run in candidate["tried"])
        points = [(rate, value) for rate, value in tried if value is not None]
        rates, values = [rate for rate, _ in points], [value for _, value in points]
        series.append(Series(POOLING[candidate["name"]], rates, values, colour, marks=True))
    chart = line_chart(
        series, title="Validation accuracy against the learning rate (one seed)", x_label="learning rate", x_log=True,
        y_unit="percent", y_label="accuracy", width=640, height=340,
    )  # fmt: skip
    rates = [run["values"]["optimizer.lr"] for run in sweep["candidates"][0]["tried"]]
    rows = [
        [
            POOLING[one["name"]],
            estimate(test_accuracies(one)),
            learning_rate(one),
            *(percent(accuracy_at(one, rate)) for rate in rates),
        ]
        for one in sweep["candidates"]
    ]
    header = ["pooling", "test accuracy, %", "learning rate", *(f"val at {rate:g}" for rate in rates)]
    return Study({"table": table(header, rows), "cost": cost(sweep)}, {"pooling.svg": chart})


def accuracy_at(candidate: dict[str, Any], rate: float) -> float | None:
    """Return the validation accuracy at a learning rate; None if the run diverged."""
    for run in candidate["tried"]:
        if run["values"]["optimizer.lr"] == rate:
            value: float | None = run["metrics"].get("val_top1")
            return value
    return None


def resolution() -> Study:
    """Accuracy at other resolutions before and after fine-tuning."""
    sweep, measured = read("resolution"), read("resolution", "resolution.json")
    sizes = sorted({row["size"] for row in measured})
    results: dict[tuple[str, str, str, int], list[float]] = {}
    for row in measured:
        for moment in ("before", "after"):
            results.setdefault((moment, row["candidate"], row["method"], row["size"]), []).append(row[moment])
    methods = {
        name: sorted({method for _, candidate, method, _ in results if candidate == name}) for name in RESOLUTION
    }
    pieces, series = {"cost": f"{cost(sweep).rstrip()} Then {len(measured)} fine-tunings of 200 steps.\n"}, []
    for moment in ("before", "after"):
        rows = []
        for name, title in RESOLUTION.items():
            for method in methods[name]:
                found = [results.get((moment, name, method, size)) for size in sizes]
                cells = [estimate(values) if values else "–" for values in found]
                rows.append([title, method if len(methods[name]) > 1 else "not needed", *cells])
        header = ["positions", "resampling", *(f"{size} pixels" for size in sizes)]
        pieces[moment] = table(header, rows, left=2)
        for colour, (name, title) in enumerate(RESOLUTION.items(), start=1):
            curve = [results[moment, name, "timm", size] for size in sizes]
            spans = [t_interval(values) or (fmean(values),) * 2 for values in curve]
            means = [fmean(values) for values in curve]
            series.append(
                Series(f"{title}, {moment}", sizes, means, colour, dashed=moment == "before", marks=True,
                       intervals=spans)
            )  # fmt: skip
    chart = line_chart(
        series, title="Test accuracy before and after fine-tuning at another size", x_label="image size in pixels",
        x_unit="integer", y_unit="percent", y_label="accuracy", width=640, height=380,
    )  # fmt: skip
    return Study(pieces, {"resolution.svg": chart})


def dots(sweep: dict[str, Any], titles: dict[str, str]) -> str:
    """Return a dot chart of the test accuracies."""
    rows = []
    for one in sweep["candidates"]:
        values = test_accuracies(one)
        rows.append(DotRow(titles[one["name"]], values, fmean(values), t_interval(values)))
    label = "dots: seeds; line: mean and 95% interval"
    return dot_chart(rows, title="Test accuracy", x_label=label, unit="percent", width=680)


STUDIES_BY_NAME: dict[str, Callable[[], Study]] = {
    "data-size": data_size,
    "positions": positions,
    "pooling": pooling,
    "pretraining": pretraining,
    "resolution": resolution,
}


# ── pages ──


def filled(page: str, pieces: dict[str, str]) -> str:
    """Return a page with its drawn pieces replaced."""
    return DRAWN.sub(lambda match: f"{match[1]}{pieces[match[2]]}{match[3]}", page)


def outputs(name: str) -> dict[Path, str]:
    """Return the files of a study's page as they should be."""
    study, page = STUDIES_BY_NAME[name](), PAGES / f"{name}.md"
    charts = {PAGES / file: chart for file, chart in study.charts.items()}
    return {page: filled(page.read_text(encoding="utf-8"), study.pieces), **charts}


def finished() -> list[str]:
    """Return the studies that have results."""
    return [name for name in STUDIES_BY_NAME if any((STUDIES / name).glob("*.json"))]


def main() -> None:
    """Draw or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"studies: {', '.join(STUDIES_BY_NAME)}; by default all with results")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in STUDIES_BY_NAME]
    if unknown:
        parser.error(f"no study is called {unknown[0]!r}; choose from {', '.join(STUDIES_BY_NAME)}")
    for name in args.names or finished():
        for path, content in outputs(name).items():
            if not args.check:
                path.write_text(content, encoding="utf-8")
                print(path.relative_to(ROOT))
            elif not path.exists() or path.read_text(encoding="utf-8") != content:
                sys.exit(f"{path.relative_to(ROOT)} is out of date; run python studies/draw.py {name}")


if __name__ == "__main__":
    main()
