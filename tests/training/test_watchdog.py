"""A rank that hangs is named, and the run ends."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.support.torchrun import environment_of, ranks_of, start_and_wait
from torch.distributed import HashStore  # type: ignore[attr-defined]

from vitrail.training.watchdog import EXIT_CODE, Note, Watchdog, explanation

READING = "reading images"
REDUCING = "forward and backward pass, with the all-reduce of the gradients"


def test_the_rank_that_is_behind_is_named() -> None:
    notes = [Note(36, REDUCING, 60.0), Note(36, READING, 60.0), Note(36, REDUCING, 60.0)]
    text = explanation(notes, [], 60.0)
    assert text.startswith(
        "rank 1 hangs (step 36: reading images); rank 0 has waited for 1 min 0 s (step 36: forward and"
    )
    assert text.endswith("rerun the same command to resume from the last saved training state")


def test_an_earlier_step_is_behind() -> None:
    notes = [Note(36, READING, 60.0), Note(35, REDUCING, 60.0)]
    assert explanation(notes, [], 60.0).startswith("rank 1 hangs (step 35: forward")


def test_a_rank_that_does_not_respond_is_named() -> None:
    notes = [Note(36, REDUCING, 60.0), Note(36, REDUCING, 2.0), None]
    text = explanation(notes, [1, 2], 60.0)
    assert "rank 1 does not respond (step 36: forward" in text
    assert "rank 2 does not respond (it has not started)" in text


def test_all_ranks_wait() -> None:
    notes = [Note(36, REDUCING, 60.0), Note(36, REDUCING, 60.0)]
    assert explanation(notes, [], 60.0).startswith("all ranks have been stuck for 1 min 0 s: step 36: forward")


def test_two_ranks_in_one_process() -> None:
    store = HashStore()
    ended: list[str] = []
    with (
        Watchdog(store, 0, 2, 0.4, end=ended.append) as waits,
        Watchdog(store, 1, 2, 0.4, end=ended.append) as hangs,
    ):
        for step in range(20):  # much longer than the timeout, but never stuck
            for rank in (waits, hangs):
                rank.now(READING, step)
            time.sleep(0.05)
        assert not ended
        waits.now(REDUCING)
        deadline = time.monotonic() + 20
        while not any(ended) and time.monotonic() < deadline:
            time.sleep(0.05)
    messages = [message for message in ended if message]
    assert len(messages) == 1
    assert "rank 1 hangs (step 19: reading images)" in messages[0]


@pytest.mark.slow
def test_a_stopped_process_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changes = ("steps=4000", "save_minutes=0", "distributed.timeout_minutes=0.4", "evaluations=1")
    process = start_and_wait(folder, 2, 3, *changes)
    stopped = next(number for number in ranks_of(folder) if b"RANK=1" in environment_of(number))
    os.kill(stopped, signal.SIGSTOP)
    error = process.communicate(timeout=300)[1]
    assert process.returncode != 0
    messages = [line for line in error.splitlines() if line.startswith("vitrail: ")]
    assert len(messages) == 1, error
    assert "rank 1 does not respond (step " in messages[0]
    assert f"exitcode  : {EXIT_CODE}" in error
    assert not ranks_of(folder)
