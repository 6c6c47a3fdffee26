"""sessions.json: hardware and duration of a run, one entry per start or resume; and the signals that stop it."""

import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitrail._version import __version__
from vitrail.errors import CheckpointError
from vitrail.io import read_json
from vitrail.training.run_folder import MetricsFile, write_json

SESSIONS = "sessions.json"


class Session(NamedTuple):
    """A run from a start or resume to its next stop."""

    first_step: int
    last_step: int
    seconds: float
    """Wall time of everything: reading, training, validation, saving and the result."""
    device: str
    ranks: int
    precision: str
    torch: str
    vitrail: str


@contextmanager
def timed_session(folder: Path, device: torch.device, ranks: int, precision: str) -> Iterator[None]:
    """Record this session, even if it is interrupted; one without a step is not recorded."""
    before, start = _steps(folder), time.monotonic()
    try:
        yield
    finally:
        after = _steps(folder)
        if after > before:
            session = Session(
                before, after, round(time.monotonic() - start, 3), hardware(device), ranks, precision,
                torch.__version__, __version__,
            )  # fmt: skip
            with suppress(CheckpointError):  # a full disk has already been reported
                write_json(folder / SESSIONS, [one._asdict() for one in [*read_sessions(folder), session]])


def read_sessions(folder: Path) -> list[Session]:
    """Return the sessions of a run in order; empty if their file is missing or corrupt."""
    try:
        rows: Any = read_json(folder / SESSIONS)
        return [Session(**{name: kind(row[name]) for name, kind in Session.__annotations__.items()}) for row in rows]
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return []


def hardware(device: torch.device) -> str:
    """Return the name of the hardware of a run."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} of {os.cpu_count() or 1} threads"


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _steps(folder: Path) -> int:
    return max((row["step"] for row in MetricsFile.read(folder) if isinstance(row.get("step"), int)), default=0)


# ── stop signals ──

ONE_REQUEST = 3.0
"""Seconds within which signals count as one: torchrun forwards signals that the terminal has already sent."""


class Stopped(Exception):  # noqa: N818 - named for what happened
    """The run was stopped by a signal; its training state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


@contextmanager
def stop_signal() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the signal received so far, or 0; a second signal interrupts immediately."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield lambda: 0
        return
    received: list[tuple[int, float]] = []

    def handle(number: int, _: object) -> None:
        if received and time.monotonic() - received[0][1] > ONE_REQUEST:
            raise KeyboardInterrupt
        received.append((number, time.monotonic()))

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0][0] if received else 0
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
