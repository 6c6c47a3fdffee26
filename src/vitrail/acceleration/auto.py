"""Which precision a job computes in where nobody said: bf16 if it is faster here and gives the same answers."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.acceleration.engine import Engine, Kind
from vitrail.errors import ConfigError
from vitrail.runtime import Precision, faster_in_bf16

IMAGES = 64
"""How many of a job's first images are asked twice."""
LARGEST_CHANGE = 0.02
"""By how much bf16 may change a probability."""
WORTH_IT = 1.1
"""How many times as fast bf16 has to be."""
CHUNK = 16


class Trial(NamedTuple):
    """What became of the first images in bf16, beside float32."""

    images: int
    changed: int
    """Images whose first answer is another one."""
    change: float
    """By how much a probability changes at most; not a number where bf16 gave none."""
    speed: float
    """How many times as fast bf16 is."""


class Beside:
    """Two engines that are asked the same, in turns so that what disturbs the clock disturbs both."""

    def __init__(self, exact: Engine, quick: Engine) -> None:
        self.exact, self.quick = exact, quick
        self.trial = Trial(images=0, changed=0, change=0.0, speed=1.0)
        self._spent = [0.0, 0.0]

    def ask(self, images: Tensor) -> Tensor:
        """Ask both; count how they differ, and return the exact answers."""
        answers = []
        for number, engine in enumerate((self.exact, self.quick)):
            start = time.perf_counter()
            answers.append(engine(images))
            self._spent[number] += time.perf_counter() - start
        wanted, found = (answer.softmax(dim=-1) for answer in answers)
        before, change = self.trial, float((wanted - found).abs().max())
        self.trial = Trial(
            images=before.images + len(images),
            changed=before.changed + int((wanted.argmax(dim=-1) != found.argmax(dim=-1)).sum()),
            # Written so that "not a number" stays, wherever it was found.
            change=change if math.isnan(change) or change > before.change else before.change,
            speed=self._spent[0] / max(self._spent[1], 1e-9),
        )
        return answers[0]

    def settled(self) -> tuple[Engine, str]:
        """Return the engine to go on with, and why in a sentence."""
        trial = self.trial
        refused = _why_not(trial)
        if refused is not None:
            return self.exact, f"float32: {refused}"
        whose = "image gets the same answer" if trial.images == 1 else f"{trial.images} images get the same answers"
        return self.quick, (
            f"bf16: {trial.speed:.1f} times as fast here; the first {whose}, probabilities within {trial.change:.3f}"
        )


class SettlingEngine:
    """An engine for a job without an end: it answers its first images in float32, tries bf16 on them, and settles."""

    def __init__(
        self, open_engine_for: Callable[[Precision], Engine], device: torch.device, tell: Callable[[str], None]
    ) -> None:
        self._engine, self._trying, why = _opened(open_engine_for, device)
        self._tell = tell
        if why is not None:
            tell(why)

    @property
    def kind(self) -> Kind:
        """Who computes."""
        return self._engine.kind

    @property
    def precision(self) -> Precision:
        """What the answers are computed in at present."""
        return self._engine.precision

    def begin(self) -> None:
        """Forget what has been asked so far: it was to warm up."""
        if self._trying is not None:
            self._trying = Beside(self._trying.exact, self._trying.quick)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits for images."""
        if self._trying is None:
            return self._engine(pixels)
        try:
            logits = self._trying.ask(pixels)
        except RuntimeError as error:  # torch's, such as no memory for both; whoever asked is to have an answer
            self._trying = None
            self._tell(f"float32: bf16 could not be tried: {str(error).splitlines()[0]}")
            return self._engine(pixels)
        if self._trying.trial.images >= IMAGES:
            self._engine, why = self._trying.settled()
            self._trying = None
            self._tell(why)
        return logits


def settle_precision(
    open_engine_for: Callable[[Precision], Engine], first: Tensor, device: torch.device
) -> tuple[Engine, str]:
    """Choose between float32 and bf16 by a job's first images (B, C, H, W); return the engine, and why in a sentence.

    bf16 is tried only where the processor is known to be faster with it.
    """
    exact, trying, why = _opened(open_engine_for, device)
    if trying is None:
        return exact, why or "float32"
    if not len(first):
        return exact, "float32: there are no images to try bf16 on"
    chunks = first[:IMAGES].split(CHUNK)
    for chunk in {len(chunk): chunk for chunk in chunks}.values():
        for engine in (trying.exact, trying.quick):
            engine(chunk)  # the first call of a size prepares memory and kernels
    for chunk in chunks:
        trying.ask(chunk)
    return trying.settled()


def _opened(
    open_engine_for: Callable[[Precision], Engine], device: torch.device
) -> tuple[Engine, Beside | None, str | None]:
    """Return the exact engine, with what bf16 is tried by, or why it is not."""
    exact = open_engine_for("float32")
    if not faster_in_bf16(device):
        return exact, None, "float32: this processor is not faster in bf16"
    try:
        return exact, Beside(exact, open_engine_for("bf16")), None
    except ConfigError as error:
        return exact, None, f"float32: {error}"


def _why_not(trial: Trial) -> str | None:
    """Say why bf16 is not taken; None where nothing speaks against it."""
    if trial.changed:
        return f"bf16 would answer {trial.changed} of the first {trial.images} images differently"
    if not trial.change <= LARGEST_CHANGE:  # written so that "not a number" is refused, too
        return f"bf16 would change a probability of the first {trial.images} images by {trial.change:.3f}"
    if trial.speed < WORTH_IT:
        return f"bf16 is only {trial.speed:.1f} times as fast here"
    return None
