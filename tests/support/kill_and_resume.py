"""Runs a predict job that is killed repeatedly and resumes each time: `python -m tests.support.kill_and_resume …`.

The killer is a separate process that imports everything once and forks every run. It kills a run when its output has
grown past a random size, after a random delay.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from vitrail.checkpoints.load import load
from vitrail.inference.bulk_prediction import predict_files


def main() -> None:
    bundle, output, kills, seed, *places = sys.argv[1:]
    torch.set_num_threads(1)
    target, draw = Path(output), random.Random(int(seed))
    growing = target.with_name(target.name + ".rows.jsonl") if target.suffix == ".parquet" else target
    rows = len(places)
    # Some of the moments are before the first row, while the job file is written.
    moments = sorted(draw.uniform(0, 0.95) * rows if number else 0 for number in range(int(kills)))
    ended = 0
    for moment in [*moments, None]:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            predict_files(load(bundle), places, output=target, resume=True, batch=7, workers=2, device="cpu")
            os._exit(0)
        if moment is not None:
            wait_for(growing, moment * row_size(growing), child)
            time.sleep(draw.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        ended += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            assert status == 0, status
    print(ended)


def row_size(file: Path) -> float:
    """Return the mean length of the existing rows; a guess if there are none."""
    content = file.read_bytes() if file.exists() else b""
    return len(content) / content.count(b"\n") if content.count(b"\n") else 120


def wait_for(file: Path, size: float, child: int) -> None:
    while not (file.exists() and file.stat().st_size >= size):
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.001)


if __name__ == "__main__":
    main()
