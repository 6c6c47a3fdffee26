"""Ctrl-C and SIGTERM: asked for an end, a run saves first."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ONE_REQUEST = 3.0
"""Seconds within which signals count as one: torchrun passes on what the terminal has sent already."""


class Stopped(Exception):  # noqa: N818 - named for what happened
    """A signal asked the run to stop; its state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


@contextmanager
def requests_to_stop() -> Iterator[Callable[[], int]]:
    """Give a function that tells which signal has asked for an end, 0 for none; asked again, it ends at once."""
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread, not to this one
        yield lambda: 0
        return
    received: list[tuple[int, float]] = []

    def remember(number: int, _: object) -> None:
        if received and time.monotonic() - received[0][1] > ONE_REQUEST:
            raise KeyboardInterrupt
        received.append((number, time.monotonic()))

    old = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0][0] if received else 0
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
