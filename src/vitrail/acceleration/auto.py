"""Automatic precision: bf16 if it is faster on this device and gives the same predictions."""

import math
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from vitrail.acceleration.agreement import NOTHING, Compare, compare_outputs
from vitrail.acceleration.engine import Engine, Kind
from vitrail.acceleration.planner import ExecutionPlan, hardware_of
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.runtime import InferencePrecision, Precision, PrecisionChoice

Compute = TypeVar("Compute", bound=Callable[[Tensor], Tensor])
"""An engine, or anything else that maps images (B, C, H, W) to one output per image."""
IMAGES = 64
"""How many of a job's first images run in both precisions."""
MIN_OPERATIONS = 100_000_000
"""Floating-point operations of the blocks for one image, from which a job tries bf16."""
MIN_SPEEDUP = 1.1
"""Speedup from which bf16 is used."""
CHUNK = 16


class PrecisionTrial(Generic[Compute]):
    """Runs two engines on the same batches, alternating so that disturbances affect both timings."""

    def __init__(self, exact: Compute, quick: Compute, compare: Compare) -> None:
        self.exact, self.quick, self.compare = exact, quick, compare
        self.agreement = NOTHING
        self._spent = [0.0, 0.0]

    @property
    def speedup(self) -> float:
        """Speedup of the quick engine."""
        return self._spent[0] / max(self._spent[1], 1e-9)

    def run(self, images: Tensor) -> Tensor:
        """Run both, update the comparison, and return the exact outputs."""
        outputs = []
        for number, engine in enumerate((self.exact, self.quick)):
            start = time.perf_counter()
            outputs.append(engine(images))
            self._spent[number] += time.perf_counter() - start
        before, now = self.agreement, self.compare(*outputs)
        self.agreement = now._replace(
            images=before.images + now.images,
            changed=before.changed + now.changed,
            # Keeps a NaN from any batch.
            change=now.change if math.isnan(now.change) or now.change > before.change else before.change,
        )
        return outputs[0]

    def choose(self) -> tuple[Compute, str]:
        """Return the engine to use, and the reason."""
        if (fault := self.agreement.fault) is not None:
            return self.exact, f"float32: bf16 {fault}"
        if self.speedup < MIN_SPEEDUP:
            return self.exact, f"float32: bf16 is only {self.speedup:.1f}× as fast on this device"
        return self.quick, f"bf16: {self.speedup:.1f}× faster; {self.agreement.text}"


class AutoPrecisionEngine:
    """An engine for a service: it runs the first images in float32 and in bf16, then chooses one."""

    def __init__(
        self,
        open_engine_for: Callable[[Precision], Engine],
        device: torch.device,
        report: Callable[[str], None],
        compare: Compare = compare_outputs,
    ) -> None:
        self._engine, self._trial, why = _open_both(open_engine_for, device, compare)
        self._report = report
        if why is not None:
            report(why)

    @property
    def kind(self) -> Kind:
        """The runtime."""
        return self._engine.kind

    @property
    def precision(self) -> InferencePrecision:
        """The precision in use at present."""
        return self._engine.precision

    @property
    def plan(self) -> ExecutionPlan:
        """The plan of the engine in use at present."""
        return self._engine.plan

    def restart(self) -> None:
        """Discard the comparison so far, which was for warm-up."""
        if self._trial is not None:
            self._trial = PrecisionTrial(self._trial.exact, self._trial.quick, self._trial.compare)

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
        if self._trial.agreement.images >= IMAGES:
            self._engine, why = self._trial.choose()
            self._trial = None
            self._report(why)
        return logits


def why_float32(config: ViTConfig, images: int) -> str | None:
    """Return why a job of so many images does not even try bf16; None if it should.

    Two models are opened for the trial, which takes longer than such a job.
    """
    if images < IMAGES:
        return f"float32: bf16 is tried from {IMAGES} images"
    if 24 * config.depth * config.width**2 * config.tokens < MIN_OPERATIONS:
        return "float32: the model is too small to gain from bf16"
    return None


def open_best(
    open_for: Callable[[Precision], Compute],
    precision: PrecisionChoice,
    config: ViTConfig,
    images: int,
    first: Callable[[], Tensor],
    device: torch.device,
    compare: Compare,
) -> tuple[Compute, str | None]:
    """Return what computes a job of so many images, in a given precision, or for "auto" in the best one and why.

    `first` reads the first images, (B, C, H, W).
    """
    if precision != "auto":
        return open_for(precision), None
    if not hardware_of(device).fast_bf16:  # the plan says so
        return open_for("float32"), None
    why = why_float32(config, images)
    return (open_for("float32"), why) if why is not None else choose_precision(open_for, first(), device, compare)


def plan_text(plan: ExecutionPlan, why: str | None) -> str:
    """Say in one line how a job is computed, and why in this precision."""
    if why is None:
        return str(plan)
    return str(plan._replace(reason=why.removeprefix(f"{plan.precision}: ")))


def choose_precision(
    open_for: Callable[[Precision], Compute],
    first: Tensor,
    device: torch.device,
    compare: Compare = compare_outputs,
) -> tuple[Compute, str]:
    """Choose between float32 and bf16 on a job's first images (B, C, H, W); return what computes it, and the reason.

    `compare` says how well the outputs agree, for the model's task. bf16 is tried only on devices that are known to be
    faster with it.
    """
    exact, comparison, why = _open_both(open_for, device, compare)
    if comparison is None:
        return exact, why or "float32"
    if not len(first):
        return exact, "float32: no images to try bf16 on"
    chunks = first[:IMAGES].split(CHUNK)
    for chunk in {len(chunk): chunk for chunk in chunks}.values():
        for compute in (comparison.exact, comparison.quick):
            compute(chunk)  # warm-up: the first call of a size allocates memory and compiles kernels
    for chunk in chunks:
        comparison.run(chunk)
    return comparison.choose()


def _open_both(
    open_for: Callable[[Precision], Compute], device: torch.device, compare: Compare
) -> tuple[Compute, PrecisionTrial[Compute] | None, str | None]:
    """Return the exact computation, and the comparison with bf16, or the reason for not trying it."""
    exact = open_for("float32")
    if not hardware_of(device).fast_bf16:
        return exact, None, "float32: bf16 is not faster on this device"
    try:
        return exact, PrecisionTrial(exact, open_for("bf16"), compare), None
    except ConfigError as error:
        return exact, None, f"float32: {error}"
