"""Tables and progress on the terminal, the same for every command."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """Print a table on stdout; the columns named in `numbers` are set to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in header:
        table.add_column(title, justify="right" if title in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def with_progress(items: Sequence[Item], what: str) -> Iterable[Item]:
    """Go through `items` with a progress bar on stderr that leaves no trace."""
    from rich.console import Console
    from rich.progress import track

    return track(items, what, transient=True, console=Console(stderr=True))
