"""curves.png: the training curves of a run in one image."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.training.run_folder import atomic_file

# The Okabe-Ito palette, safe for colour-blind readers; text and lines are softer than black.
TRAIN, VAL, LEARNING_RATE, GRADIENT = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
INK, QUIET, GRID = "#222222", "#666666", "#E6E6E6"
NOTE_SIZE = 8.5
DRAWN_POINTS = 4000
"""Points to draw per curve; more cannot be seen."""
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the image is the same everywhere
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": "#BBBBBB",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.9,
    "xtick.color": "#BBBBBB",
    "ytick.color": "#BBBBBB",
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "legend.fontsize": 10,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


class Curve(NamedTuple):
    """A metric over the steps."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def smooth(self) -> "Curve":
        """Return a centred moving average over a twentieth of the run, which does not lag."""
        half = len(self) // 40
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        first = np.maximum(np.arange(len(self)) - half, 0)
        behind = np.minimum(np.arange(len(self)) + half + 1, len(self))
        return Curve(self.steps, (sums[behind] - sums[first]) / (behind - first))

    def thinned(self) -> "Curve":
        """Return at most DRAWN_POINTS points, including the last one."""
        every = -(-len(self) // DRAWN_POINTS) or 1
        return Curve(self.steps[::-1][::every][::-1], self.values[::-1][::every][::-1])

    def later(self) -> NDArray[np.float64]:
        """Return the values without the first tenth of the run, which would stretch the axis."""
        return self.values[self.steps >= self.steps[-1] / 10] if len(self) else self.values


def curve(rows: Sequence[dict[str, Any]], name: str) -> Curve:
    """Return a metric over the steps, skipping missing and non-finite values."""
    finite = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
    points = np.array(finite, np.float64).reshape(-1, 2)
    return Curve(points[:, 0], points[:, 1])


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, note: Sequence[str] = ()) -> None:
    """Draw the rows of a metrics file; `note` says how the two losses differ. Without rows, draw nothing."""
    if rows:
        with atomic_file(path) as temporary:
            curves_figure(rows, path.parent.name, note).savefig(temporary, format="png")


def curves_figure(rows: Sequence[dict[str, Any]], name: str, note: Sequence[str] = ()) -> Any:
    """Return the curves as a matplotlib figure; `name` is the run's name, `note` is printed next to the loss."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(11, 7), dpi=120, facecolor="white")
        loss, accuracy, lr, gradient = figure.subplots(
            2, 2, sharex=True, height_ratios=(3, 1), gridspec_kw={"hspace": 0.28, "wspace": 0.16}
        ).flat
        figure.subplots_adjust(left=0.065, right=0.965, top=0.835, bottom=0.085)
        head, below = headlines(rows, name)
        figure.text(0.065, 0.95, head, fontsize=17, fontweight="bold", va="center")
        figure.text(0.065, 0.91, below, fontsize=11, color=QUIET, va="center")
        _draw_loss(loss, rows)
        loss.set_title("\n".join(note), loc="right", fontsize=NOTE_SIZE, fontweight="normal", color=QUIET)
        _draw_accuracy(accuracy, rows)
        _draw_small(lr, curve(rows, "lr"), "Learning rate", LEARNING_RATE, noisy=False)
        _draw_small(gradient, curve(rows, "gradient_norm"), "Gradient norm", GRADIENT, noisy=True)
        _steps_axis((lr, gradient), max(row["step"] for row in rows))
    return figure


def headlines(rows: Sequence[dict[str, Any]], name: str) -> tuple[str, str]:
    """Return the title (accuracy of the best checkpoint) and the subtitle (final numbers)."""
    top1, steps = curve(rows, "val_top1"), max(row["step"] for row in rows)
    if len(top1):
        step, accuracy = _best(rows, top1)
        head = f"Validation accuracy {accuracy:.1%}, step {step:,} of {steps:,} kept"
    else:
        head = f"Step {steps:,}, not yet validated"
    facts = [name if len(name) <= 40 else f"{name[:39]}…"]
    epochs, losses, val = curve(rows, "epoch"), curve(rows, "loss"), curve(rows, "val_loss")
    facts += [f"{epochs.values[-1]:.1f} epochs"] if len(epochs) else []
    facts += [f"training loss {losses.smooth().values[-1]:.3f} at the end"] if len(losses) else []
    facts += [f"validation loss {val.values[-1]:.3f} at the end"] if len(val) else []
    return head, "   ·   ".join(facts)


def _best(rows: Sequence[dict[str, Any]], top1: Curve) -> tuple[int, float]:
    """Return the step of the best checkpoint and its accuracy."""
    kept = next((row["best"] for row in reversed(rows) if "best" in row), None)
    at = np.flatnonzero(top1.steps == kept)
    place = int(at[-1]) if len(at) else int(top1.values.argmax())
    return int(top1.steps[place]), float(top1.values[place])


def _draw_loss(panel: Any, rows: Sequence[dict[str, Any]]) -> None:
    loss, val = curve(rows, "loss"), curve(rows, "val_loss")
    smooth = loss.smooth()
    _line(panel, loss, TRAIN, width=0.8, alpha=0.25)
    _line(panel, smooth, TRAIN, label="training")
    _line(panel, val, VAL, label="validation split", marks=True)
    panel.set_title("Loss")
    shown = np.concatenate([smooth.values, val.values])
    positive = shown[shown > 0]
    if len(positive) == len(shown) and len(shown) and shown.max() > 8 * shown.min():
        _logarithmic(panel, shown)
    elif len(shown):
        low, high = shown.min(), max(shown.max(), np.quantile(loss.values, 0.99) if len(loss) else -math.inf)
        margin = 0.06 * (high - low) or 0.5
        panel.set_ylim(max(0.0, low - margin) if low >= 0 else low - margin, high + margin)
    _legend(panel, "upper right")


def _draw_accuracy(panel: Any, rows: Sequence[dict[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    training, val = curve(rows, "accuracy").smooth(), curve(rows, "val_top1")
    _line(panel, training, TRAIN, label="training, as augmented")
    _line(panel, val, VAL, label="validation split", marks=True)
    if len(val):
        step, best = _best(rows, val)
        panel.vlines(step, 0, best, color=VAL, linewidth=1, linestyle=(0, (2, 3)), zorder=1)
        panel.plot(
            [step], [best], marker="*", markersize=17, color=VAL, markeredgecolor="white", linestyle="none",
            label=f"kept: {best:.1%} at step {step:,}", zorder=5, clip_on=False,
        )  # fmt: skip
    panel.set_title("Accuracy")
    later = np.concatenate([training.later(), val.later()])
    lowest = float(later.min()) if len(later) else 0.0
    panel.set_ylim(max(0.0, math.floor(10 * (lowest - 0.05)) / 10), 1.0)
    panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(panel, "lower right")


def _draw_small(panel: Any, values: Curve, title: str, colour: str, *, noisy: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    smooth = values.smooth() if noisy else values
    if noisy:
        _line(panel, values, colour, width=0.8, alpha=0.3)
    _line(panel, smooth, colour)
    panel.set_title(title)
    high = max(smooth.values.max(), np.quantile(values.values, 0.98)) if len(values) else 1.0
    panel.set_ylim(0, 1.12 * high or 1.0)
    panel.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    panel.yaxis.set_major_formatter(lambda value, _: _short(value))


def _line(
    panel: Any,
    points: Curve,
    colour: str,
    *,
    label: str | None = None,
    width: float = 2.2,
    alpha: float = 1.0,
    marks: bool = False,
) -> None:
    """Draw a curve; single points and sparse curves get markers."""
    if not len(points):
        return
    marked = len(points) == 1 or (marks and len(points) <= 60)
    drawn = points.thinned()
    panel.plot(
        drawn.steps, drawn.values, color=colour, linewidth=width, alpha=alpha, label=label,
        marker="o" if marked else None, markersize=5.5, markeredgecolor="white", markeredgewidth=0.8,
        zorder=3 if marks else 2,
    )  # fmt: skip


def _logarithmic(panel: Any, shown: NDArray[np.float64]) -> None:
    """Use a logarithmic axis with round ticks: 0.1, 0.2, 0.5, 1."""
    from matplotlib.ticker import FixedLocator, NullLocator

    panel.set_yscale("log")
    low, high = shown.min() * 0.85, shown.max() * 1.2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in ((1, 2, 5) if len(powers) < 6 else (1,))]
    panel.set_ylim(low, high)
    panel.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _steps_axis(panels: Sequence[Any], last: int) -> None:
    from matplotlib.ticker import MaxNLocator

    for panel in panels:
        panel.set_xlim(0, max(last, 2) * 1.01)
        panel.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.set_xlabel("step", color=QUIET, labelpad=4)


def _legend(panel: Any, place: str) -> None:
    if panel.get_legend_handles_labels()[0]:
        panel.legend(loc=place, handlelength=1.6, borderaxespad=0.3)


def _short(number: float) -> str:
    """Format a number briefly: 0.5, but 5e-4."""
    if not number or 0.01 <= abs(number) < 10_000:
        return f"{number:g}"
    digits, _, power = f"{number:.2e}".partition("e")
    return f"{float(digits):g}e{int(power)}"
