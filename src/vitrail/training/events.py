"""TensorBoard events: what the journal holds, and how fast it went, for those who watch their runs there."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLUSH_SECONDS = 10
"""How long a number may take to show; TensorBoard itself looks twice a minute."""
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
    "waiting_share": "speed/waiting_share",
}
"""What a number is called in a row, and what in TensorBoard."""


class Events:
    """Writes rows of numbers to a folder that TensorBoard reads. Nothing is made before the first row."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self._writer: Any = None

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of a row. They go out as one event, which costs a sixth of an event for each."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = self._open()
        values = [Summary.Value(tag=TAGS[name], simple_value=row[name]) for name in TAGS if name in row]
        self._writer.add_summary(Summary(value=values), row["step"])

    def flush(self) -> None:
        """See to it that everything written so far is in the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        """Begin a new file, which makes readers forget what older ones say of the steps that come again."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import FileWriter

        _wait_for_a_later_name(self.folder)
        writer = FileWriter(str(self.folder), flush_secs=FLUSH_SECONDS)
        writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), self.step + 1)
        return writer


def _wait_for_a_later_name(folder: Path) -> None:
    """Files are read in the order of their names, which begin with the second; two of one second may change places."""
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.[0-9]*.*")]
    wait = max(seconds, default=0) + 1 - time.time()
    if 0 < wait <= 1:  # a clock that was set back by more cannot be waited for
        time.sleep(wait)
