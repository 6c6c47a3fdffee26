"""Console output of a run: a two-line live display on a terminal, plain lines elsewhere; messages go to log.txt."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from vitrail.data.checking.check import Report
from vitrail.tasks.lookup import CLASSIFICATION
from vitrail.text import number, printable
from vitrail.training.display import Status, defaults_lines, defaults_table
from vitrail.training.learner import ShownMetrics
from vitrail.training.plan import ResolvedDefault
from vitrail.training.run_folder import not_written

LOG = "log.txt"
PLAIN_INTERVAL = 15.0
"""Seconds between plain progress lines."""
REFRESH_INTERVAL = 0.1
"""Seconds between refreshes of the live display."""
WITHIN_ERROR = "kept: within one standard error"


class RunConsole:
    """Prints the progress of a run and keeps its log."""

    def __init__(
        self,
        folder: Path,
        *,
        shown: ShownMetrics = CLASSIFICATION,
        quiet: bool = False,
        compiled: bool = False,
        printed: set[str] | None = None,
    ) -> None:
        """`printed`: messages about the data that earlier runs printed; this run only logs those, and adds its own."""
        self.log_file = folder / LOG
        self.log = self.log_file.open("a", encoding="utf-8")
        self.quiet, self.metrics = quiet, shown
        self.printed = set() if printed is None else printed
        self.console = Console(stderr=True, highlight=False)
        self.status = Status(shown.training_metric, compiled=compiled)
        # No refresh thread: data workers are forked while the display is live.
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
        """Print and log a message."""
        text = printable(text)
        self._print(text, Text(text), wrap=False)  # a wrapped path cannot be copied

    def data_note(self, text: str, *, loud: bool = False, topic: str | None = None) -> None:
        """Print a message about the data or the machine: only once per text or topic, however many runs a sweep has."""
        text = printable(f"WARNING: {text}" if loud else text)
        topic = text if topic is None else topic
        self._print(text, Text(text, "bold yellow" if loud else ""), wrap=False, shown=topic not in self.printed)
        self.printed.add(topic)

    def data_check(self, report: Report) -> None:
        """Print the summary of a data check and its serious findings."""
        self.data_note(report.summary)
        for finding in report.findings:
            if finding.serious:
                some = ", ".join(finding.details[:2]) + (", …" if len(finding.details) > 2 else "")
                details = f" ({some})" if some else ""
                self.data_note(f"{finding.text}{details}; {finding.advice}", loud=True)

    def defaults(self, defaults: Sequence[ResolvedDefault]) -> None:
        """Print the resolved defaults with their reasons."""
        if defaults:
            self._print("\n".join(defaults_lines(defaults)), defaults_table(defaults))

    def warning(self, text: str) -> None:
        """Print a warning that stands out."""
        text = printable(f"WARNING: {text}")
        self._print(text, Text(text, "bold yellow"), wrap=False)

    def result(self, text: str) -> None:
        """Print the final result and stop the live display."""
        self.live.stop()
        text = printable(text)
        self._print(text, Text(text, "bold"))

    def step(self, row: dict[str, Any]) -> None:
        """Show the metrics of a step."""
        self.status.update(row)
        since = time.monotonic() - self.shown
        if self.quiet or since < (REFRESH_INTERVAL if self.on_terminal else PLAIN_INTERVAL):
            return
        self.shown = time.monotonic()
        if self.on_terminal:
            self.live.start()
            self.live.refresh()
        else:
            print(self.status, file=sys.stderr, flush=True)

    def validation(self, row: dict[str, Any]) -> None:
        """Print the validation metrics."""
        headline, criterion = self.metrics.headline, self.metrics.criteria[row["criterion"]]
        star = ""
        if row["best"] == row["step"] and row["highest"] is not None:
            star = "  (best so far)" if row["highest"] else f"  ({WITHIN_ERROR})"
        by = ""
        if criterion.key not in (headline.key, "val_loss"):
            by = f", {criterion.name} {criterion.show(row[criterion.key])}"
        value = f"{headline.name} {headline.show(row[headline.key])}"
        loss = f", loss {number(row['val_loss'])}" if headline.key != "val_loss" else ""
        metrics = f"{value} on the validation split{by}{loss}"
        self.note(f"step {row['step']:,}: {metrics}{star}")

    def _print(self, plain: str, rich_text: RenderableType, *, wrap: bool = True, shown: bool = True) -> None:
        try:
            self.log.write(f"{plain}\n")
            self.log.flush()
        except OSError as error:
            raise not_written(self.log_file, error) from None
        if not shown:
            return
        if self.on_terminal:
            self.console.print(rich_text, soft_wrap=not wrap)
        elif not self.quiet:
            self.console.print(plain, markup=False, soft_wrap=True)


class SilentConsole:
    """The console of every rank but the main one: prints nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def step(self, row: dict[str, Any]) -> None:
        """Do nothing."""

    def validation(self, row: dict[str, Any]) -> None:
        """Do nothing."""

    def warning(self, text: str) -> None:
        """Do nothing."""

    def result(self, text: str) -> None:
        """Do nothing."""
