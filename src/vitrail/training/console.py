"""Watching a run: two lines that keep themselves up to date on a terminal, plain lines elsewhere; notes in log.txt."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from vitrail.terminal import printable
from vitrail.training.criterion import COLUMNS, TITLES, Criterion
from vitrail.training.defaults import ResolvedDefault
from vitrail.training.display import Status, defaults_lines, defaults_table

EVERY = 15.0
"""Seconds between two plain lines."""
REFRESHED = 0.1
"""Seconds between two changes of the display."""
WITHIN_ERROR = "kept: within one standard error of the best, and trained for longer"


class RunConsole:
    """Shows a run to a person."""

    def __init__(
        self, folder: Path, *, quiet: bool = False, compiled: bool = False, said: set[str] | None = None
    ) -> None:
        """`said`: what earlier runs on the same data have shown, which this one only logs; it is added to."""
        self.log = (folder / "log.txt").open("a", encoding="utf-8")
        self.quiet = quiet
        self.said = set() if said is None else said
        self.console = Console(stderr=True, highlight=False)
        self.status = Status(compiled=compiled)
        # It has no thread of its own: processes that read images are forked while it shows.
        self.live = Live(self.status, console=self.console, auto_refresh=False, transient=True)
        self.on_terminal = self.console.is_terminal and not quiet
        self.shown = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()
        self.log.close()

    def note(self, text: str) -> None:
        """Say something once."""
        text = printable(text)
        self._say(text, Text(text), wrap=False)  # a path that is broken into lines cannot be copied

    def of_data(self, text: str, *, loud: bool = False) -> None:
        """Say something that is true of the data, whatever the settings: once, however many runs a sweep has."""
        text = printable(f"WARNING: {text}" if loud else text)
        self._say(text, Text(text, "bold yellow" if loud else ""), wrap=False, shown=text not in self.said)
        self.said.add(text)

    def defaults(self, defaults: Sequence[ResolvedDefault]) -> None:
        """Say what was chosen and why."""
        if defaults:
            self._say("\n".join(defaults_lines(defaults)), defaults_table(defaults))

    def warning(self, text: str) -> None:
        """Say loudly, on a line of its own, what must not be overlooked."""
        text = printable(f"WARNING: {text}")
        self._say(text, Text(text, "bold yellow"), wrap=False)

    def result(self, text: str) -> None:
        """Say how good the model is; nothing comes after it."""
        self.live.stop()
        text = printable(text)
        self._say(text, Text(text, "bold"))

    def step(self, row: dict[str, Any]) -> None:
        """Move on by a step."""
        self.status.update(row)
        since = time.monotonic() - self.shown
        if self.quiet or since < (REFRESHED if self.on_terminal else EVERY):
            return
        self.shown = time.monotonic()
        if self.on_terminal:
            self.live.start()
            self.live.refresh()
        else:
            print(self.status, file=sys.stderr, flush=True)

    def measured(self, row: dict[str, Any]) -> None:
        """Say what the validation split came to."""
        criterion: Criterion = row["criterion"]
        star = ""
        if row["best"] == row["step"]:
            star = "  (best so far)" if row["highest"] else f"  ({WITHIN_ERROR})"
        by = f", {TITLES[criterion]} {row[COLUMNS[criterion]]:.1%}" if criterion not in ("accuracy", "loss") else ""
        said = f"{row['val_top1']:.1%} on the validation split{by}, loss {row['val_loss']:.3f}"
        self.note(f"step {row['step']:,}: {said}{star}")

    @property
    def waited_share(self) -> float | None:
        """The share of the time that was spent waiting for images; None where nothing was trained."""
        return self.status.waited_share if self.status.row else None

    def _say(self, plain: str, fine: RenderableType, *, wrap: bool = True, shown: bool = True) -> None:
        self.log.write(f"{plain}\n")
        self.log.flush()
        if not shown:
            return
        if self.on_terminal:
            self.console.print(fine, soft_wrap=not wrap)
        elif not self.quiet:
            self.console.print(plain, markup=False, soft_wrap=True)


class SilentConsole:
    """Shows nothing: what a process has that is not the main one."""

    waited_share = None

    def note(self, text: str) -> None:
        """Say nothing."""

    def step(self, row: dict[str, Any]) -> None:
        """Say nothing."""

    def measured(self, row: dict[str, Any]) -> None:
        """Say nothing."""

    def warning(self, text: str) -> None:
        """Say nothing."""

    def result(self, text: str) -> None:
        """Say nothing."""
