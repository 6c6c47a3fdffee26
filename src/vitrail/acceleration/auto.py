"""Which precision a job computes in where nobody said: bf16 if it is faster here and gives the same answers."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.acceleration.engine import Engine
from vitrail.errors import ConfigError
from vitrail.runtime import Precision, faster_in_bf16

PICTURES = 64
"""How many of a job's first pictures are asked twice."""
LARGEST_CHANGE = 0.02
"""By how much bf16 may change a probability."""
WORTH_IT = 1.1
"""How many times as fast bf16 has to be."""
CHUNK = 16


class Trial(NamedTuple):
    """What became of the first pictures in bf16, beside float32."""

    pictures: int
    changed: int
    """Pictures whose first answer is another one."""
    change: float
    """By how much a probability changes at most; not a number where bf16 gave none."""
    speed: float
    """How many times as fast bf16 is."""


def settle_precision(
    open_engine_for: Callable[[Precision], Engine], first: Tensor, device: torch.device
) -> tuple[Engine, str]:
    """Choose between float32 and bf16 by a job's first pictures (B, C, H, W); return the engine, and why in a sentence.

    bf16 is tried only where the processor is known to be faster with it.
    """
    exact = open_engine_for("float32")
    if not faster_in_bf16(device):
        return exact, "float32: this processor is not faster in bf16"
    if not len(first):
        return exact, "float32: there are no pictures to try bf16 on"
    try:
        quick = open_engine_for("bf16")
    except ConfigError as error:
        return exact, f"float32: {error}"
    trial = compare(exact, quick, first[:PICTURES])
    refused = _why_not(trial)
    if refused is not None:
        return exact, f"float32: {refused}"
    whose = "picture gets the same answer" if trial.pictures == 1 else f"{trial.pictures} pictures get the same answers"
    return quick, (
        f"bf16: {trial.speed:.1f} times as fast here; the first {whose}, probabilities within {trial.change:.3f}"
    )


def compare(exact: Engine, quick: Engine, pictures: Tensor) -> Trial:
    """Ask two engines the same, in turns so that what disturbs the clock disturbs both."""
    spent = [0.0, 0.0]
    answers: tuple[list[Tensor], list[Tensor]] = ([], [])
    chunks = pictures.split(CHUNK)
    for engine in (exact, quick):
        engine(chunks[0])  # the first call prepares memory and kernels
    for chunk in chunks:
        for number, engine in enumerate((exact, quick)):
            start = time.perf_counter()
            answers[number].append(engine(chunk))
            spent[number] += time.perf_counter() - start
    wanted, found = (torch.cat(parts).softmax(dim=-1) for parts in answers)
    return Trial(
        pictures=len(pictures),
        changed=int((wanted.argmax(dim=-1) != found.argmax(dim=-1)).sum()),
        change=float((wanted - found).abs().max()),
        speed=spent[0] / max(spent[1], 1e-9),
    )


def _why_not(trial: Trial) -> str | None:
    """Say why bf16 is not taken; None where nothing speaks against it."""
    if trial.changed:
        return f"bf16 would answer {trial.changed} of the first {trial.pictures} pictures differently"
    if not trial.change <= LARGEST_CHANGE:  # written so that "not a number" is refused, too
        return f"bf16 would change a probability of the first {trial.pictures} pictures by {trial.change:.3f}"
    if trial.speed < WORTH_IT:
        return f"bf16 is only {trial.speed:.1f} times as fast here"
    return None
