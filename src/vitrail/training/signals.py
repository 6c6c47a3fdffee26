"""Ctrl-C and SIGTERM: a run saves its state before it stops."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
