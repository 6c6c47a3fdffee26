"""Runs with several ranks: start them, kill them, and read what they left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SMALL = [
    "batch=32",
    "evaluations=2",
    "model.width=32",
    "model.depth=2",
    "model.heads=2",
    "model.patch_size=4",
    "model.stem=conv",
    "precision=float32",
    "optimizer.kind=adamw",  # Muon amplifies differences in the last bits
]


def command(
    folder: Path, processes: int, *changes: str, data: str = "digits", verb: str = "train", options: Sequence[str] = ()
) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    rest = ["--"] if processes > 1 else []  # torchrun would parse --run itself
    pretrained = [sys.executable, *(torchrun if processes > 1 else []), "-m", *rest, "vitrail", verb, data]
    words = [word for change in (*SMALL, *changes) for word in ("--set", change)]
    return [*pretrained, "--run", str(folder), "--device", "cpu", "--workers", "0", *options, *words]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(
    folder: Path, processes: int, *changes: str, data: str = "digits", verb: str = "train", options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, processes, *changes, data=data, verb=verb, options=options),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment(),
    )


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def newest(folder: Path) -> Path:
    return sorted((folder / "state").glob("[0-9]*"))[-1]


def steps(folder: Path) -> int:
    return max((int(path.name) for path in (folder / "state").glob("[0-9]*")), default=0)


def start_and_wait(folder: Path, processes: int, until: int, *changes: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command(folder, processes, *changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    while steps(folder) < until:
        time.sleep(0.01)
        assert process.poll() is None, process.communicate()[1]
    return process


def kill_all(folder: Path) -> None:
    """Kill every process whose command names a run: torchrun starts ranks in their own session."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(place.name) != os.getpid() and os.fsencode(folder) in (place / "cmdline").read_bytes():
                os.kill(int(place.name), signal.SIGKILL)


def ranks_of(folder: Path) -> list[int]:
    """Return the processes of a run that torchrun started."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in command and b"torch.distributed.run" not in command:
            found.append(int(place.name))
    return found


def environment_of(number: int) -> list[bytes]:
    return Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
