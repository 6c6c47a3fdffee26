"""What a run looks like on a terminal: two lines that fit any width, and the table of what was chosen."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vitrail.training.defaults import ResolvedDefault
from vitrail.training.throughput import Throughput

SMOOTH = 0.9
"""How much of a shown number is the one before."""
GAP = "   "
UNKNOWN = "…"
"""Stands where a number cannot be told yet."""
SHORTEST_BAR, LONGEST_BAR = 6, 60


class Shown(NamedTuple):
    """A number with what stands around it."""

    before: str
    number: str
    after: str
    short_before: str
    keep: int
    """What is dropped last on a narrow terminal has the largest."""

    def text(self, *, short: bool) -> Text:
        """Return the number, emphasised among its words."""
        before = self.short_before if short else self.before
        return Text.assemble((before, "dim"), (self.number, "bold"), (self.after, "dim"))


class Status:
    """How a run stands; rich can print it."""

    def __init__(self, *, compiled: bool = False) -> None:
        self.row: dict[str, Any] = {}
        self.loss, self.accuracy = 0.0, 0.0
        self.throughput = Throughput(compiled=compiled)

    def update(self, row: dict[str, Any]) -> None:
        """Take in a step."""
        keep = SMOOTH if self.row else 0.0
        self.throughput.add(images=row["images"], seconds=row["seconds"], waited=row["waited"])
        self.row = row
        self.loss = keep * self.loss + (1 - keep) * row["loss"]
        self.accuracy = keep * self.accuracy + (1 - keep) * row["accuracy"]

    @property
    def waited_share(self) -> float:
        """The share of the time since the first step that was spent waiting for data."""
        return self.throughput.whole_waiting_share

    @property
    def step(self) -> str:
        """How far it is."""
        return f"{self.row['step']:,}/{self.row['steps']:,}"

    @property
    def left(self) -> str:
        """How long the steps will still take, at the present pace."""
        images, rate = (self.row["steps"] - self.row["step"]) * self.row["images"], self.throughput.rate
        if rate is None:
            return UNKNOWN if images else _clock(0)
        return _clock(images / max(rate, 1e-9))

    def numbers(self) -> list[Shown]:
        """Return what is shown beside the step and the time left."""
        rate = self.throughput.rate
        return [
            Shown("epoch ", f"{self.row['epoch']:.1f}", "", "epoch ", 1),
            Shown("loss ", f"{self.loss:.3f}", "", "loss ", 5),
            Shown("accuracy ", f"{self.accuracy:.1%}", "", "acc. ", 4),
            Shown("", UNKNOWN if rate is None else f"{rate:,.0f}", " images/s", "", 3),
            Shown("waiting for data ", f"{self.waited_share:.0%}", "", "waiting ", 2),
            Shown("memory ", _bytes(used_memory()), "", "", 0),
        ]

    def __str__(self) -> str:
        """Return everything on one line, for where there is no terminal."""
        shown = (f"{number.before}{number.number}{number.after}" for number in self.numbers())
        return f"step {self.step}  {'  '.join(shown)}  {self.left} left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give two lines: how far it is, and how well it goes."""
        if not self.row:
            return
        width = options.max_width
        yield _progress_line(self, width)
        yield _fitting(self.numbers(), width)


def _progress_line(status: Status, width: int) -> RenderableType:
    """Return a bar and how far it is; without the bar where there is no room for one."""
    step, steps = status.row["step"], status.row["steps"]
    words = [
        Text(f"{step / steps:.0%}", "bold"),
        Text.assemble(("step ", "dim"), (status.step, "bold")),
        Text.assemble((status.left, "bold"), (" left", "dim")),
    ]
    memory_limit = width - sum(len(word) + len(GAP) for word in words)
    if memory_limit < SHORTEST_BAR:
        alone = Text(GAP).join(words)
        alone.truncate(width)
        return alone
    line = Table.grid(padding=(0, len(GAP), 0, 0))
    for _ in range(4):
        line.add_column(no_wrap=True)
    line.add_row(ProgressBar(total=steps, completed=step, width=min(LONGEST_BAR, memory_limit)), *words)
    return line


def _fitting(numbers: Sequence[Shown], width: int) -> Text:
    """Return the numbers on one line: in full, in short, or without the least important."""
    line = Text(GAP).join(number.text(short=False) for number in numbers)
    while len(line) > width and numbers:
        line = Text(GAP).join(number.text(short=True) for number in numbers)
        least = min(number.keep for number in numbers)
        numbers = [number for number in numbers if number.keep > least]
    line.truncate(width)
    return line


def defaults_table(defaults: Iterable[ResolvedDefault]) -> Table:
    """Return what was chosen and why; only the reasons wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("chosen", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("because")
    for choice in defaults:
        table.add_row(Text(choice.field), Text(value_shown(choice.value), "bold"), Text(choice.reason, "dim"))
    return table


def defaults_lines(defaults: Sequence[ResolvedDefault]) -> list[str]:
    """Return the same as plain lines."""
    field = max((len(choice.field) for choice in defaults), default=0)
    value = max((len(value_shown(choice.value)) for choice in defaults), default=0)
    return [f"{choice.field:<{field}}  {value_shown(choice.value):<{value}}  {choice.reason}" for choice in defaults]


def value_shown(value: Any) -> str:
    """Write a setting: (8, 8) is 8×8."""
    return "×".join(map(str, value)) if isinstance(value, tuple) else str(value)


def used_memory() -> int:
    """Return the most bytes that were in use at once: on the GPU where one is used, else by this process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        # Not getrusage's number first: it begins with the memory of the process that started this one.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _bytes(count: float) -> str:
    """Write an amount of memory as a person would: 412 MB, 3.4 GB."""
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
