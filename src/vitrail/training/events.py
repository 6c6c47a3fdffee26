"""TensorBoard events: the rows of the metrics file, plus throughput."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLUSH_SECONDS = 10
"""Flush interval; TensorBoard itself reloads every 30 seconds."""
TAGS = {
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "lr": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "val_top1": "val/top1",
    "val_loss": "val/loss",
    "val_balanced_accuracy": "val/balanced_accuracy",
    "val_macro_f1": "val/macro_f1",
    "images_per_second": "speed/images_per_second",
    "waiting_fraction": "speed/waiting_fraction",
}
"""Key in a row, and tag in TensorBoard."""


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
        values = [Summary.Value(tag=TAGS[name], simple_value=row[name]) for name in TAGS if name in row]
        self._writer.add_summary(Summary(value=values), row["step"])

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
