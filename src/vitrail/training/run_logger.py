"""Files a run writes as it trains: metrics.jsonl, curves.svg, TensorBoard events."""

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.sources.source import Source
from vitrail.errors import CheckpointError
from vitrail.tasks.lookup import CLASSIFICATION
from vitrail.tasks.task import Predictions, Task
from vitrail.training.curves import draw_curves
from vitrail.training.display import Throughput
from vitrail.training.learner import ShownMetrics
from vitrail.training.run_folder import (
    CURVES,
    EVENTS,
    PREVIEWS,
    TEST_PREDICTIONS,
    MetricsFile,
    atomic_run_file,
    best_row,
    preview_file,
)
from vitrail.training.split_predictions import write_test_predictions

# ── TensorBoard events ──

FLUSH_SECONDS = 10
"""Flush interval; TensorBoard itself reloads every 30 seconds."""
TAGS = {
    "lr": "train/learning_rate",
    "images_per_second": "speed/images_per_second",
    "waiting_fraction": "speed/waiting_fraction",
}
"""Key in a row, and tag in TensorBoard, where `tag_of` does not derive it."""
PREVIEW_TAG = "val/preview"
NOT_PLOTTED = ("step", "epoch", "best")


def tag_of(key: str) -> str:
    """Return the tag of a metric in TensorBoard: `val_loss` is `val/loss`."""
    split, _, name = key.partition("_") if key.startswith("val_") else ("train", "_", key)
    return TAGS.get(key, f"{split}/{name}")


class Events:
    """Writes rows to a TensorBoard log folder. The file is created with the first row."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self._writer: Any = None

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of a row as one event, which costs a sixth of one event per number."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = self._open()
        values = [Summary.Value(tag=tag_of(name), simple_value=row[name]) for name in row if name not in NOT_PLOTTED]
        self._writer.add_summary(Summary(value=values), row["step"])

    def write_image(self, tag: str, step: int, png: bytes) -> None:
        """Write an image."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = self._open()
        width, height = (int.from_bytes(png[start : start + 4]) for start in (16, 20))  # the header chunk
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        self._writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def flush(self) -> None:
        """Flush everything written so far to the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        """Start a new file with a session start event, so that TensorBoard drops older events of repeated steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import FileWriter

        _wait_for_next_second(self.folder)
        writer = FileWriter(str(self.folder), flush_secs=FLUSH_SECONDS)
        writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), self.step + 1)
        return writer


def _wait_for_next_second(folder: Path) -> None:
    """Wait for the next second: TensorBoard reads files in order of their names, which start with a timestamp."""
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.[0-9]*.*")]
    wait = max(seconds, default=0) + 1 - time.time()
    if 0 < wait <= 1:  # do not wait for a clock that was set back
        time.sleep(wait)


# ── all files of a run ──

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
        shown: ShownMetrics = CLASSIFICATION,
        compiled: bool = False,
        losses: Sequence[str] = (),
    ) -> None:
        """`losses`: how the plotted losses differ, from `loss_note`."""
        self.folder, self.note, self.losses, self.shown = folder, note, losses, shown
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

    def preview(self, step: int, png: bytes) -> None:
        """Write images to look at, to the run folder and to TensorBoard."""

        def write() -> None:
            path = preview_file(self.folder, step)
            path.parent.mkdir(exist_ok=True)
            with atomic_run_file(path) as temporary:
                temporary.write_bytes(png)

        self._write_optional(PREVIEWS, write)
        self._write_optional(EVENTS, lambda: self.events.write_image(PREVIEW_TAG, step, png))

    def flush(self) -> None:
        """Flush before a training state is saved, so that a run resumed from it finds every event up to it."""
        self._write_optional(EVENTS, self.events.flush)

    def test_predictions(self, predictions: Predictions, source: Source, task: Task) -> None:
        """Write the predictions behind the result."""
        self._write_optional(
            TEST_PREDICTIONS, lambda: write_test_predictions(predictions, source, self.folder / TEST_PREDICTIONS, task)
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
            CURVES, lambda: draw_curves(MetricsFile.read(self.folder), self.folder / CURVES, self.shown, self.losses)
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


def gap_warning(rows: Sequence[dict[str, Any]], images: int, task: Task) -> list[str]:
    """Warn if training and validation metric are far apart at the best checkpoint.

    `images` is the size of the validation split.
    """
    best, key = best_row(rows), task.training_metric.key
    if best is None:
        return []
    before = [row[key] for row in rows if key in row and row["step"] <= best["step"]]
    last = before[-max(1, len(before) // GAP_WINDOW) :]
    return task.overfitting(sum(last) / len(last), best[task.headline.key], images) if last else []
