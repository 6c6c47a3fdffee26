"""Terminal output of all commands: escaped text, tables and progress bars."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import typer

from vitrail.io import writing_to_stdout
from vitrail.text import printable

Item = TypeVar("Item")


def echo(text: str = "", *, err: bool = False, bold: bool = False) -> None:
    """Print text on stdout or stderr, with control characters escaped."""
    safe = printable(text)
    with nullcontext() if err else writing_to_stdout():
        typer.echo(typer.style(safe, bold=True) if bold else safe, err=err)


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


def with_progress(items: Sequence[Item], what: str) -> Iterable[Item]:
    """Iterate over `items` with a transient progress bar on stderr."""
    from rich.console import Console
    from rich.progress import track

    return track(items, what, transient=True, console=Console(stderr=True))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function that updates a transient progress bar on stderr; without a terminal it does nothing."""
    if not sys.stderr.isatty():
        yield _show_nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, transient=True, console=Console(stderr=True))
    task = bar.add_task(what, total=None)

    def move(done: int, total: int | None) -> None:
        bar.update(task, completed=done, total=total)
        bar.start()  # only now: its thread must not exist yet when the worker processes are forked

    try:
        yield move
    finally:
        bar.stop()


def _show_nothing(done: int, total: int | None) -> None:
    del done, total
