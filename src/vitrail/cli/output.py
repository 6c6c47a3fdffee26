"""Terminal output of all commands: escaped text, tables and progress bars."""

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import typer

from vitrail.io import writing_to_stdout
from vitrail.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress

INTERVAL = 0.1
"""Seconds between two drawings of a progress bar."""


def echo(text: str = "", *, err: bool = False, bold: bool = False) -> None:
    """Print text on stdout or stderr, with control characters escaped."""
    safe = printable(text)
    with nullcontext() if err else writing_to_stdout():
        typer.echo(typer.style(safe, bold=True) if bold else safe, err=err)


class _Warnings(logging.Handler):
    """Prints log records like other warnings of a command."""

    def emit(self, record: logging.LogRecord) -> None:
        echo(f"WARNING: {record.getMessage()}", err=True, bold=True)


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Print the warnings that a function logs (logger "vitrail") on stderr."""
    log, handler = logging.getLogger("vitrail"), _Warnings(logging.WARNING)
    log.addHandler(handler)
    log.propagate = False  # printed once, also if the root logger has a handler
    try:
        yield
    finally:
        log.removeHandler(handler)
        # Another thread may still be inside.
        log.propagate = not any(isinstance(other, _Warnings) for other in log.handlers)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """Print a table on stdout; the columns named in `numbers` are right-aligned. Only the last column wraps."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = [[printable(cell, line=True) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *lines]) for i in range(len(header))]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for i, title in enumerate(header):
        last = i == len(header) - 1
        table.add_column(
            title,
            justify="right" if title in numbers else "left",
            no_wrap=not last or title in numbers,
            min_width=min(widths[i], 24) if last else widths[i],
        )
    for line in lines:
        table.add_row(*map(Text, line))  # literally: "[bold]" in a name is not markup
    # Overflow a narrow terminal rather than break names and numbers; never wrap when piped.
    least = sum(widths[:-1]) + 2 * len(widths) + min(widths[-1], 24)
    on_terminal = sys.stdout.isatty()
    width = max(Console().width, least) if on_terminal else max(least, sum(widths) + 2 * len(widths))
    with writing_to_stdout():
        Console(width=width).print(table)


class ProgressBar:
    """A transient progress bar on stderr, one stage after the other; without a terminal it shows nothing."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._stage = ""
        self._bar: Progress | None = None
        self._drawn = 0.0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Show how many are done in a stage, and the total if it is known."""
        if not self._on_terminal:
            return
        if self._bar is None or stage != self._stage:
            self.stop()
            self._bar, self._stage = _new_bar(stage), stage
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)
        if time.monotonic() - self._drawn >= INTERVAL:
            self._bar.refresh()
            self._drawn = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line on stderr; a bar that is shown is removed first."""
        self.stop()
        echo(text, err=True)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


@contextmanager
def progress() -> Iterator[ProgressBar]:
    """Yield a progress bar, and remove it at the end."""
    bar = ProgressBar()
    try:
        yield bar
    finally:
        bar.stop()


def _new_bar(stage: str) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Without a thread that refreshes it: worker processes may be forked while the bar is shown.
    bar = Progress(*columns, transient=True, console=Console(stderr=True), auto_refresh=False)
    bar.add_task(stage, total=None)
    bar.start()
    return bar


def on_one_stream() -> bool:
    """Return whether stdout and stderr go to the same place."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:
        return False
