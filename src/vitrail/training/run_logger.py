"""Files a run writes as it trains: metrics.jsonl and curves; with the extra `train` also TensorBoard events."""

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.sources.source import Source
from vitrail.errors import CheckpointError
from vitrail.evaluation import Evaluation, Predictions, percent
from vitrail.metrics.baselines import warning_about_gap
from vitrail.training.curves import draw_curves
from vitrail.training.events import Events
from vitrail.training.prediction_file import write_test_predictions
from vitrail.training.run_folder import CURVES, EVENTS, TEST_PREDICTIONS, MetricsFile, best_row
from vitrail.training.throughput import Throughput

DRAW_INTERVAL = 60.0
"""Seconds between redraws of the curves; more if drawing takes more than a fiftieth of that."""
GAP_WINDOW = 20
"""Training accuracy is averaged over the last 1/20 of the steps up to the best checkpoint."""
NEEDS = {EVENTS: "tensorboard", TEST_PREDICTIONS: "pyarrow"}
"""Packages of the extra `train` that files need."""


class RunLogger:
    """Writes the metrics of a run. Only a failing metrics file stops the run; the other outputs are optional."""

    def __init__(
        self,
        folder: Path,
        step: int,
        note: Callable[[str], None],
        *,
        compiled: bool = False,
        losses: Sequence[str] = (),
    ) -> None:
        """`losses`: how the plotted losses differ, from `loss_note`."""
        self.folder, self.note, self.losses = folder, note, losses
        self.metrics_file = MetricsFile(folder, step)
        self.disabled = {file for file, package in NEEDS.items() if importlib.util.find_spec(package) is None}
        if self.disabled:
            files = ", ".join(file for file in NEEDS if file in self.disabled)
            note(f"not written: {files}; pip install 'vitrail[train]' adds them")
        self.events, self.throughput = Events(folder / EVENTS, step), Throughput(compiled=compiled)
        self.drawn, self.pause, self.changed = time.monotonic(), DRAW_INTERVAL, False
        if step and not self.events.folder.exists():  # the extra was installed after the run started
            for row in MetricsFile.read(folder):
                self._write_event(row)

    def step(self, row: dict[str, Any], *, seconds: float, waited: float, images: int) -> None:
        """Log the metrics of a step; throughput goes to TensorBoard only, so that metrics.jsonl is reproducible."""
        self.metrics_file.write(row)
        self.throughput.add(images=images, seconds=seconds, waited=waited)
        throughput = self.throughput
        speed = {"images_per_second": throughput.images_per_second, "waiting_fraction": throughput.waiting_fraction}
        self._write_event({**row, **(speed if throughput.images_per_second is not None else {})})
        self.changed = True

    def validation(self, row: dict[str, Any]) -> None:
        """Log validation metrics, and redraw the curves if the last drawing is old enough."""
        self.metrics_file.write(row)
        self._write_event(row)
        self.changed = True
        if time.monotonic() - self.drawn > self.pause:
            self._draw()

    def flush(self) -> None:
        """Flush before a training state is saved, so that a run resumed from it finds every event up to it."""
        self._write_optional(EVENTS, self.events.flush)

    def test_predictions(self, predictions: Predictions, source: Source) -> None:
        """Write the predictions behind the result."""
        self._write_optional(
            TEST_PREDICTIONS, lambda: write_test_predictions(predictions, source, self.folder / TEST_PREDICTIONS)
        )

    def close(self) -> None:
        """Draw the final curves and close the event file."""
        if self.changed or not (self.folder / CURVES).exists():
            self._draw()
        self._write_optional(EVENTS, self.events.close)

    def _write_event(self, row: Mapping[str, Any]) -> None:
        self._write_optional(EVENTS, lambda: self.events.write(row))

    def _draw(self) -> None:
        start = time.monotonic()
        self._write_optional(
            CURVES, lambda: draw_curves(MetricsFile.read(self.folder), self.folder / CURVES, self.losses)
        )
        self.drawn, self.changed = time.monotonic(), False
        self.pause = max(DRAW_INTERVAL, 50 * (self.drawn - start))

    def _write_optional(self, file: str, write: Callable[[], None]) -> None:
        """Write an optional file; on failure, report it once and continue without it."""
        if file in self.disabled:
            return
        try:
            write()
        except (CheckpointError, ImportError, OSError) as error:
            self.disabled.add(file)
            self.note(f"{file} is no longer written: {error}")


def gap_warning(rows: Sequence[dict[str, Any]], images: int) -> list[str]:
    """Warn if training and validation accuracy are far apart at the best checkpoint.

    `images` is the size of the validation split.
    """
    best = best_row(rows)
    if best is None:
        return []
    before = [row["accuracy"] for row in rows if "accuracy" in row and row["step"] <= best["step"]]
    last = before[-max(1, len(before) // GAP_WINDOW) :]
    return warning_about_gap(sum(last) / len(last), best["val_top1"], images) if last else []


def card_metrics(evaluation: Evaluation, *, tested: bool) -> dict[str, str]:
    """Return the metrics for a model card, with the split they come from and a caveat about it."""
    split = "test" if tested else "train" if evaluation.kind == "training images" else "validation"
    caveat = {"train": ", which the model was trained on", "validation": ", which also selected the checkpoint"}
    low, high = (percent(end) for end in evaluation.top1_interval)
    return {
        "split": f"{split}, {evaluation.images:,} images{caveat.get(split, '')}",
        "accuracy": f"{percent(evaluation.top1)}% (95% interval {low}–{high}%)",
        **({} if evaluation.top5 is None else {"top-5 accuracy": f"{percent(evaluation.top5)}%"}),
        "balanced accuracy": f"{percent(evaluation.balanced_accuracy)}%",
        "macro F1": f"{percent(evaluation.macro_f1)}%",
        "log loss": f"{evaluation.loss:.3f}",
        "calibration error": f"{percent(evaluation.ece)}%",
    }
