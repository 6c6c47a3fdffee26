"""The watchdog of a distributed run: a rank that hangs is named, and the run ends instead of waiting forever.

Every rank notes what it is doing. A thread publishes the note in the process group's store; once its own rank has been
stuck for too long, it reads the notes of all ranks, says who waits for whom, and ends the process. The launcher then
ends the others, or restarts all of them (`torchrun --max-restarts`).
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

from torch.distributed import Store  # type: ignore[attr-defined]

from vitrail.text import duration

EXIT_CODE = 3
"""Neither a wrong setting (2) nor a bug (1): the same command resumes the run."""
BEATS = 8
"""How often a note is published during the timeout, at least."""
LONGEST_BEAT = 10.0
"""Seconds between two notes, at most."""


class Note(NamedTuple):
    """What a rank is doing."""

    step: int
    doing: str
    """Such as "reading images" or "all_gather"."""
    seconds: float
    """Since when."""
    beat: int = 0
    """Counts publications, so that others notice when they stop."""


class Watchdog:
    """Watches this rank, and the others when it is stuck. Use it as a context."""

    def __init__(
        self, store: Store, rank: int, size: int, seconds: float, end: Callable[[str], None] | None = None
    ) -> None:
        """`seconds`: how long a rank may be stuck; `end`: called with a message (default: print it and exit)."""
        self.store, self.rank, self.size, self.seconds = store, rank, size, seconds
        self.end = end or _print_and_exit
        self._step, self._doing, self._since = 0, "starting", time.monotonic()
        self._beat = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=1.0)

    def now(self, doing: str, step: int | None = None) -> None:
        """Note what this rank does from now on."""
        self._step = self._step if step is None else step
        self._doing, self._since = doing, time.monotonic()

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Note what this rank does inside a `with` block."""
        before = self._doing
        self.now(doing)
        try:
            yield
        finally:
            self.now(before)

    def _watch(self) -> None:
        try:
            self._publish()
            while not self._over.wait(min(self.seconds / BEATS, LONGEST_BEAT)):
                if self._publish().seconds > self.seconds:
                    self._report()
                    return
        except RuntimeError:  # the store is gone with the launcher, so the run is over
            return

    def _publish(self) -> Note:
        self._beat += 1
        note = Note(self._step, self._doing, time.monotonic() - self._since, self._beat)
        self.store.set(f"note-{self.rank}", json.dumps(note))
        return note

    def _report(self) -> None:
        """Name the ranks that hang, once per run, and end."""
        first = self._notes()
        for _ in range(2):  # a rank that publishes nothing meanwhile does not respond
            time.sleep(min(self.seconds / BEATS, LONGEST_BEAT))
            self._publish()
        notes = self._notes()
        silent = [rank for rank, (old, new) in enumerate(zip(first, notes, strict=True)) if new is None or new == old]
        reporter = self.store.compare_set("reporter", "", str(self.rank))
        self.end(explanation(notes, silent, self.seconds) if int(reporter) == self.rank else "")

    def _notes(self) -> list[Note | None]:
        """Return the notes of all ranks; None if a rank has not published any."""
        keys = [f"note-{rank}" for rank in range(self.size)]
        return [Note(*json.loads(self.store.get(key))) if self.store.check([key]) else None for key in keys]


def explanation(notes: Sequence[Note | None], silent: Sequence[int], timeout: float) -> str:
    """Return one sentence that names the ranks that hang: those that do not respond, else those furthest behind."""
    known = {rank: note for rank, note in enumerate(notes) if note is not None}
    waiting = {rank: note for rank, note in known.items() if rank not in silent}
    if silent:
        hanging = list(silent)
    else:
        least = min(_progress(note) for note in waiting.values())
        hanging = [rank for rank, note in waiting.items() if _progress(note) == least]
    if not silent and len(hanging) == len(notes):
        return (
            f"all ranks have been stuck for {duration(timeout)}: {_place(notes[0])}; check the network between the "
            f"machines, then rerun the same command to resume from the last saved training state"
        )
    named = "; ".join(
        f"rank {rank} {'does not respond' if rank in silent else 'hangs'} ({_place(notes[rank])})" for rank in hanging
    )
    others = next((rank for rank in waiting if rank not in hanging), None)
    waits = "" if others is None else f"; rank {others} has waited for {duration(timeout)} ({_place(notes[others])})"
    return f"{named}{waits}; rerun the same command to resume from the last saved training state"


def _progress(note: Note) -> tuple[int, bool]:
    """Order notes: a rank that waits in a collective of a step is ahead of one that has not reached it."""
    return note.step, "all-reduce" in note.doing or "all_" in note.doing


def _place(note: Note | None) -> str:
    return "it has not started" if note is None else f"step {note.step:,}: {note.doing}"


def _print_and_exit(message: str) -> None:
    if message:
        print(f"vitrail: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)  # the main thread is stuck in a collective and cannot raise
