"""Terminal rendering of a run: a two-line status that fits any width, the resolved defaults, its throughput."""

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vitrail.tasks.lookup import CLASSIFICATION
from vitrail.tasks.metrics import MetricSpec
from vitrail.text import byte_size, number
from vitrail.training.plan import ResolvedDefault

SMOOTH = 0.9
"""Smoothing factor of the displayed loss and metric."""
GAP = "   "
UNKNOWN = "…"
"""Placeholder for a number that is not known yet."""
SHORTEST_BAR, LONGEST_BAR = 6, 60


# ── status ──


class Field(NamedTuple):
    """A number with its label and unit."""

    before: str
    number: str
    after: str
    short_before: str
    priority: int
    """Priority: on a narrow terminal the lowest is dropped first."""

    def text(self, *, short: bool) -> Text:
        """Return the number in bold between its dimmed label and unit."""
        before = self.short_before if short else self.before
        return Text.assemble((before, "dim"), (self.number, "bold"), (self.after, "dim"))


class Status:
    """Current status of a run, as a rich renderable."""

    def __init__(self, metric: MetricSpec = CLASSIFICATION.training_metric, *, compiled: bool = False) -> None:
        """`metric`: the training metric of the task."""
        self.row: dict[str, Any] = {}
        self.loss, self.metric, self.value = 0.0, metric, 0.0
        self.throughput = Throughput(compiled=compiled)

    def update(self, row: dict[str, Any]) -> None:
        """Update with the metrics of a step."""
        keep = SMOOTH if self.row else 0.0
        self.throughput.add(images=row["images"], seconds=row["seconds"], waited=row["waited"])
        self.row = row
        self.loss = keep * self.loss + (1 - keep) * row["loss"]
        self.value = keep * self.value + (1 - keep) * row[self.metric.key]

    @property
    def waiting_fraction(self) -> float:
        """Fraction of the time since the first step spent waiting for data."""
        return self.throughput.total_waiting_fraction

    @property
    def step(self) -> str:
        """Step out of the total."""
        return f"{self.row['step']:,}/{self.row['steps']:,}"

    @property
    def left(self) -> str:
        """Remaining time at the current throughput."""
        images, speed = (self.row["steps"] - self.row["step"]) * self.row["images"], self.throughput.images_per_second
        if speed is None:
            return UNKNOWN if images else _clock(0)
        return _clock(images / max(speed, 1e-9))

    def numbers(self) -> list[Field]:
        """Return the fields shown besides the step and the remaining time."""
        speed, title = self.throughput.images_per_second, self.metric.name
        value = f"{self.value:.1%}" if self.metric.unit == "percent" else number(self.value)
        metric = [Field(f"{title} ", value, "", f"{title[:3]}. ", 4)] if self.metric.key != "loss" else []
        return [
            Field("epoch ", f"{self.row['epoch']:.1f}", "", "epoch ", 1),
            Field("loss ", number(self.loss), "", "loss ", 5),
            *metric,
            Field("", UNKNOWN if speed is None else f"{speed:,.0f}", " images/s", "", 3),
            Field("waiting for data ", f"{self.waiting_fraction:.0%}", "", "waiting ", 2),
            Field("memory ", byte_size(used_memory()), "", "", 0),
        ]

    def __str__(self) -> str:
        """Return everything on one line, for output that is not a terminal."""
        shown = (f"{number.before}{number.number}{number.after}" for number in self.numbers())
        return f"step {self.step}  {'  '.join(shown)}  {self.left} left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield two lines: progress and metrics."""
        if not self.row:
            return
        width = options.max_width
        yield _progress_line(self, width)
        yield _metrics_line(self.numbers(), width)


def _progress_line(status: Status, width: int) -> RenderableType:
    """Return a progress bar with step and remaining time; no bar if it does not fit."""
    step, steps = status.row["step"], status.row["steps"]
    words = [
        Text(f"{step / steps:.0%}", "bold"),
        Text.assemble(("step ", "dim"), (status.step, "bold")),
        Text.assemble((status.left, "bold"), (" left", "dim")),
    ]
    bar_width = width - sum(len(word) + len(GAP) for word in words)
    if bar_width < SHORTEST_BAR:
        line_text = Text(GAP).join(words)
        line_text.truncate(width)
        return line_text
    line = Table.grid(padding=(0, len(GAP), 0, 0))
    for _ in range(4):
        line.add_column(no_wrap=True)
    line.add_row(ProgressBar(total=steps, completed=step, width=min(LONGEST_BAR, bar_width)), *words)
    return line


def _metrics_line(numbers: Sequence[Field], width: int) -> Text:
    """Fit the numbers on one line: in full, abbreviated, or without the least important."""
    line = Text(GAP).join(number.text(short=False) for number in numbers)
    while len(line) > width and numbers:
        line = Text(GAP).join(number.text(short=True) for number in numbers)
        least = min(number.priority for number in numbers)
        numbers = [number for number in numbers if number.priority > least]
    line.truncate(width)
    return line


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


# ── resolved defaults ──


def defaults_table(defaults: Iterable[ResolvedDefault]) -> Table:
    """Return the resolved defaults and their reasons as a table; only the reasons wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("default", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_column("reason")
    for default in defaults:
        table.add_row(Text(default.field), Text(format_value(default.value), "bold"), Text(default.reason, "dim"))
    return table


def defaults_lines(defaults: Sequence[ResolvedDefault]) -> list[str]:
    """Return the same table as plain lines."""
    field = max((len(default.field) for default in defaults), default=0)
    value = max((len(format_value(default.value)) for default in defaults), default=0)
    return [
        f"{default.field:<{field}}  {format_value(default.value):<{value}}  {default.reason}" for default in defaults
    ]


def format_value(value: Any) -> str:
    """Format a value: (8, 8) is 8×8, the range (0.7, 1.0) is 0.7 to 1.0."""
    if not isinstance(value, tuple):
        return str(value)
    return (" to " if any(isinstance(one, float) for one in value) else "×").join(map(str, value))


# ── throughput and memory ──

WINDOW = 60.0
"""Seconds of training to average over, if they hold enough steps."""
FEWEST_STEPS = 100
"""Average over at least this many steps: waits for data come in bursts."""
COMPILED_STEPS = 3
"""Slow first steps of a compiled model: compilation, CUDA graph warm-up and capture."""


class Timed(NamedTuple):
    """Images and time of a step."""

    images: int
    seconds: float
    """Total, including the wait for data."""
    waited: float


class Throughput:
    """Counts images and seconds. Averaging each step's images/s would give short steps too much weight.

    >>> throughput = Throughput()
    >>> for seconds in (9.0, 0.1, 0.3):
    ...     throughput.add(images=10, seconds=seconds, waited=0.0)
    >>> throughput.images_per_second  # without the first step: 20 images in 0.4 seconds
    50.0
    """

    def __init__(self, *, compiled: bool = False) -> None:
        self.warmup_steps = COMPILED_STEPS if compiled else 1
        """First steps to ignore: they load libraries and compile kernels."""
        self.recent: deque[Timed] = deque()
        self.images, self.seconds, self.waited = 0, 0.0, 0.0
        """Totals of the recent steps."""
        self.all_seconds, self.all_waited = 0.0, 0.0

    def add(self, *, images: int, seconds: float, waited: float) -> None:
        """Add a step that computed for `seconds` after it `waited` for data."""
        if self.warmup_steps:
            self.warmup_steps -= 1
            return
        self._count(Timed(images, seconds + waited, waited), 1)
        self.all_seconds += seconds + waited
        self.all_waited += waited
        while len(self.recent) > FEWEST_STEPS and self.seconds - self.recent[0].seconds >= WINDOW:
            self._count(self.recent[0], -1)

    def _count(self, step: Timed, times: int) -> None:
        if times > 0:
            self.recent.append(step)
        else:
            self.recent.popleft()
        self.images += times * step.images
        self.seconds += times * step.seconds
        self.waited += times * step.waited

    @property
    def images_per_second(self) -> float | None:
        """Images/s including waits for data; None before the first counted step."""
        return self.images / max(self.seconds, 1e-9) if self.recent else None

    @property
    def waiting_fraction(self) -> float:
        """Fraction of the recent time spent waiting for data."""
        return min(1.0, max(0.0, self.waited / self.seconds)) if self.seconds > 0 else 0.0

    @property
    def total_waiting_fraction(self) -> float:
        """Fraction of all time since the first steps spent waiting for data."""
        return self.all_waited / self.all_seconds if self.all_seconds else 0.0


def used_memory() -> int:
    """Return the peak memory in bytes: of the GPU if one is used, else of this process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        # Preferred over getrusage, whose peak includes the parent process's memory.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
