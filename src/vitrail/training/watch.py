"""Watching a run: a line that keeps itself up to date on a terminal, plain lines elsewhere; all of it in log.txt."""

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

EVERY = 15.0
"""Seconds between two plain lines."""
SMOOTH = 0.9


class Screen:
    """Shows a run to a person."""

    def __init__(self, folder: Path, *, quiet: bool = False) -> None:
        self.log = (folder / "log.txt").open("a", encoding="utf-8")
        self.quiet = quiet
        self.console = Console(stderr=True, highlight=False)
        self.live = self.console.is_terminal and not quiet
        self.bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=self.console,
            transient=True,
        )
        self.task = self.bar.add_task("", total=1) if self.live else None
        self.loss, self.accuracy, self.rate, self.waiting = 0.0, 0.0, 0.0, 0.0
        self.total_waited, self.total = 0.0, 0.0
        self.printed = time.monotonic()

    def __enter__(self) -> Self:
        if self.live:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.bar.stop()
        self.log.close()

    def note(self, text: str) -> None:
        """Say something once."""
        self.log.write(f"{text}\n")
        self.log.flush()
        if not self.quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    def step(self, row: dict[str, Any]) -> None:
        """Move on by a step."""
        keep = SMOOTH if self.loss else 0.0
        took = row["seconds"] + row["waited"]
        self.loss = keep * self.loss + (1 - keep) * row["loss"]
        self.accuracy = keep * self.accuracy + (1 - keep) * row["accuracy"]
        self.rate = keep * self.rate + (1 - keep) * row["pictures"] / max(took, 1e-9)
        self.total_waited += row["waited"]
        self.total += took
        left = (row["steps"] - row["step"]) * row["pictures"] / max(self.rate, 1e-9)
        line = (
            f"step {row['step']:,}/{row['steps']:,}  epoch {row['epoch']:.1f}  loss {self.loss:.3f}  accuracy "
            f"{self.accuracy:.1%}  {self.rate:.0f} images/s  waiting for data {self.waited_share:.0%}  "
            f"{_clock(left)} left"
        )
        if self.task is not None:
            self.bar.update(self.task, completed=row["step"], total=row["steps"], description=line)
        elif time.monotonic() - self.printed > EVERY and not self.quiet:
            self.printed = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def measured(self, row: dict[str, Any]) -> None:
        """Say what the val part came to."""
        star = "  (best so far)" if row["best"] == row["step"] else ""
        self.note(f"step {row['step']:,}: {row['val_top1']:.1%} on the val part, loss {row['val_loss']:.3f}{star}")

    @property
    def waited_share(self) -> float:
        """The share of the time that was spent waiting for pictures."""
        return self.total_waited / self.total if self.total else 0.0


class Silence:
    """Shows nothing: what a process has that is not the main one."""

    waited_share = 0.0

    def note(self, text: str) -> None:
        """Say nothing."""

    def step(self, row: dict[str, Any]) -> None:
        """Say nothing."""

    def measured(self, row: dict[str, Any]) -> None:
        """Say nothing."""


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
