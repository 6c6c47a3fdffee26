"""What a run leaves on the way: the journal always; curves and TensorBoard events where the extra is installed."""

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

DRAWN_EVERY = 60.0
"""Seconds between two drawings of the curves; more where drawing takes more than a fiftieth of it."""
GAP_SHARE = 20
"""Training accuracy is that of the last twentieth of the steps up to the best checkpoint."""
NEEDS = {CURVES: "matplotlib", EVENTS: "tensorboard", TEST_PREDICTIONS: "pyarrow"}


class RunLogger:
    """Keeps what a run measures. Only the journal can stop a run; what is for looking at can be missing."""

    def __init__(
        self,
        folder: Path,
        step: int,
        note: Callable[[str], None],
        *,
        compiled: bool = False,
        losses: Sequence[str] = (),
    ) -> None:
        """`losses`: which losses are drawn, as `loss_note` says it."""
        self.folder, self.note, self.losses = folder, note, losses
        self.metrics_file = MetricsFile(folder, step)
        self.left_out = {file for file, package in NEEDS.items() if importlib.util.find_spec(package) is None}
        if self.left_out:
            files = ", ".join(file for file in NEEDS if file in self.left_out)
            note(f"not written: {files}; pip install 'vitrail[train]' adds them")
        self.events, self.throughput = Events(folder / EVENTS, step), Throughput(compiled=compiled)
        self.drawn, self.pause, self.changed = time.monotonic(), DRAWN_EVERY, False
        if step and not self.events.folder.exists():  # the extra came later than the run
            for row in MetricsFile.read(folder):
                self._watch(row)

    def step(self, row: dict[str, Any], *, seconds: float, waited: float, images: int) -> None:
        """Keep what a step came to, and the pace; the journal is the same however fast the machine is."""
        self.metrics_file.write(row)
        self.throughput.add(images=images, seconds=seconds, waited=waited)
        rate = self.throughput.rate
        speed = {} if rate is None else {"images_per_second": rate, "waiting_share": self.throughput.waiting_share}
        self._watch({**row, **speed})
        self.changed = True

    def measured(self, row: dict[str, Any]) -> None:
        """Keep what the validation split came to; draw the curves if it is some time since."""
        self.metrics_file.write(row)
        self._watch(row)
        self.changed = True
        if time.monotonic() - self.drawn > self.pause:
            self._draw()

    def flush(self) -> None:
        """Before a state is saved: a run that goes on from it must find everything up to it."""
        self._leave(EVENTS, self.events.flush)

    def held_out(self, predictions: Predictions, source: Source) -> None:
        """Keep the answers that the result is made of."""
        self._leave(
            TEST_PREDICTIONS, lambda: write_test_predictions(predictions, source, self.folder / TEST_PREDICTIONS)
        )

    def close(self) -> None:
        """Draw the curves as they are at the end."""
        if self.changed or not (self.folder / CURVES).exists():
            self._draw()
        self._leave(EVENTS, self.events.close)

    def _watch(self, row: Mapping[str, Any]) -> None:
        self._leave(EVENTS, lambda: self.events.write(row))

    def _draw(self) -> None:
        began = time.monotonic()
        self._leave(CURVES, lambda: draw_curves(MetricsFile.read(self.folder), self.folder / CURVES, self.losses))
        self.drawn, self.changed = time.monotonic(), False
        self.pause = max(DRAWN_EVERY, 50 * (self.drawn - began))

    def _leave(self, file: str, write: Callable[[], None]) -> None:
        """Write what is for looking at; a run does not end because of it, but says once that it is missing."""
        if file in self.left_out:
            return
        try:
            write()
        except (CheckpointError, ImportError, OSError) as error:
            self.left_out.add(file)
            self.note(f"{file} is left out from here on: {error}")


def gap_warning(rows: Sequence[dict[str, Any]], images: int) -> list[str]:
    """Say that training and validation accuracy are far apart at the best checkpoint, by the journal.

    `images` is how many the validation split has.
    """
    best = best_row(rows)
    if best is None:
        return []
    before = [row["accuracy"] for row in rows if "accuracy" in row and row["step"] <= best["step"]]
    last = before[-max(1, len(before) // GAP_SHARE) :]
    return warning_about_gap(sum(last) / len(last), best["val_top1"], images) if last else []


def card_metrics(measured: Evaluation, *, tested: bool) -> dict[str, str]:
    """Return the metrics that a model card shows, with the split they are from and what has to be known with them."""
    split = "test" if tested else "train" if measured.kind == "training images" else "validation"
    caveat = {"train": ", which the model was trained on", "validation": ", which also selected the checkpoint"}
    low, high = (percent(end) for end in measured.top1_interval)
    return {
        "split": f"{split}, {measured.images:,} images{caveat.get(split, '')}",
        "accuracy": f"{percent(measured.top1)}% (95% interval {low}–{high}%)",
        **({} if measured.top5 is None else {"top-5 accuracy": f"{percent(measured.top5)}%"}),
        "balanced accuracy": f"{percent(measured.balanced_accuracy)}%",
        "macro F1": f"{percent(measured.macro_f1)}%",
        "log loss": f"{measured.loss:.3f}",
        "calibration error": f"{percent(measured.ece)}%",
    }
