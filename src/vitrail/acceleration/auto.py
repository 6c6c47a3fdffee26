"""Automatic precision: bf16 if it is faster on this device and gives the same predictions."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.acceleration.engine import Engine, Kind
from vitrail.acceleration.planner import hardware_of
from vitrail.errors import ConfigError
from vitrail.runtime import Precision

IMAGES = 64
"""How many of a job's first images run in both precisions."""
MAX_CHANGE = 0.02
"""Largest change of a probability allowed in bf16."""
MIN_SPEEDUP = 1.1
"""Speedup from which bf16 is used."""
CHUNK = 16


class Trial(NamedTuple):
    """bf16 compared with float32 on the first images."""

    images: int
    changed: int
    """Images whose top class differs."""
    change: float
    """Largest change of a probability; NaN if bf16 gave NaN."""
    speedup: float
    """Speedup of bf16."""


class PrecisionTrial:
    """Runs two engines on the same batches, alternating so that disturbances affect both timings."""

    def __init__(self, exact: Engine, quick: Engine) -> None:
        self.exact, self.quick = exact, quick
        self.trial = Trial(images=0, changed=0, change=0.0, speedup=1.0)
        self._spent = [0.0, 0.0]

    def run(self, images: Tensor) -> Tensor:
        """Run both, update the comparison, and return the exact logits."""
        outputs = []
        for number, engine in enumerate((self.exact, self.quick)):
            start = time.perf_counter()
            outputs.append(engine(images))
            self._spent[number] += time.perf_counter() - start
        expected, actual = (output.softmax(dim=-1) for output in outputs)
        before, change = self.trial, float((expected - actual).abs().max())
        self.trial = Trial(
            images=before.images + len(images),
            changed=before.changed + int((expected.argmax(dim=-1) != actual.argmax(dim=-1)).sum()),
            # Keeps a NaN from any batch.
            change=change if math.isnan(change) or change > before.change else before.change,
            speedup=self._spent[0] / max(self._spent[1], 1e-9),
        )
        return outputs[0]

    def choose(self) -> tuple[Engine, str]:
        """Return the engine to use, and the reason."""
        trial = self.trial
        reason = _why_not(trial)
        if reason is not None:
            return self.exact, f"float32: {reason}"
        same = "image has the same top class" if trial.images == 1 else f"{trial.images} images have the same top class"
        return self.quick, (
            f"bf16: {trial.speedup:.1f}× faster; the first {same}, probabilities within {trial.change:.3f}"
        )


class AutoPrecisionEngine:
    """An engine for a service: it runs the first images in float32 and in bf16, then chooses one."""

    def __init__(
        self, open_engine_for: Callable[[Precision], Engine], device: torch.device, report: Callable[[str], None]
    ) -> None:
        self._engine, self._trial, why = _open_engines(open_engine_for, device)
        self._report = report
        if why is not None:
            report(why)

    @property
    def kind(self) -> Kind:
        """The runtime."""
        return self._engine.kind

    @property
    def precision(self) -> Precision:
        """The precision in use at present."""
        return self._engine.precision

    def restart(self) -> None:
        """Discard the comparison so far, which was for warm-up."""
        if self._trial is not None:
            self._trial = PrecisionTrial(self._trial.exact, self._trial.quick)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits for images."""
        if self._trial is None:
            return self._engine(pixels)
        try:
            logits = self._trial.run(pixels)
        except RuntimeError as error:  # such as out of memory for both; the caller still needs its logits
            self._trial = None
            self._report(f"float32: bf16 could not be tried: {str(error).splitlines()[0]}")
            return self._engine(pixels)
        if self._trial.trial.images >= IMAGES:
            self._engine, why = self._trial.choose()
            self._trial = None
            self._report(why)
        return logits


def choose_precision(
    open_engine_for: Callable[[Precision], Engine], first: Tensor, device: torch.device
) -> tuple[Engine, str]:
    """Choose between float32 and bf16 on a job's first images (B, C, H, W); return the engine and the reason.

    bf16 is tried only on devices that are known to be faster with it.
    """
    exact, comparison, why = _open_engines(open_engine_for, device)
    if comparison is None:
        return exact, why or "float32"
    if not len(first):
        return exact, "float32: no images to try bf16 on"
    chunks = first[:IMAGES].split(CHUNK)
    for chunk in {len(chunk): chunk for chunk in chunks}.values():
        for engine in (comparison.exact, comparison.quick):
            engine(chunk)  # warm-up: the first call of a size allocates memory and compiles kernels
    for chunk in chunks:
        comparison.run(chunk)
    return comparison.choose()


def _open_engines(
    open_engine_for: Callable[[Precision], Engine], device: torch.device
) -> tuple[Engine, PrecisionTrial | None, str | None]:
    """Return the exact engine, and the comparison with bf16, or the reason for not trying it."""
    exact = open_engine_for("float32")
    if not hardware_of(device).fast_bf16:
        return exact, None, "float32: bf16 is not faster on this device"
    try:
        return exact, PrecisionTrial(exact, open_engine_for("bf16")), None
    except ConfigError as error:
        return exact, None, f"float32: {error}"


def _why_not(trial: Trial) -> str | None:
    """Return why bf16 is not used; None if it is."""
    if trial.changed:
        return f"bf16 changes the top class of {trial.changed} of the first {trial.images} images"
    if not trial.change <= MAX_CHANGE:  # also rejects NaN
        return f"bf16 changes a probability of the first {trial.images} images by {trial.change:.3f}"
    if trial.speedup < MIN_SPEEDUP:
        return f"bf16 is only {trial.speedup:.1f}× as fast on this device"
    return None
