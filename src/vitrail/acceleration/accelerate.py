"""`accelerate`: a faster version of a model, on any device."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vitrail.acceleration.cuda.fp8.calibration import calibrate
from vitrail.acceleration.cuda.graphs import CudaGraphs
from vitrail.acceleration.cuda.inference.encoder import EncoderPrecision
from vitrail.acceleration.engine import prepare
from vitrail.acceleration.planner import plan_of
from vitrail.errors import ConfigError, suggest
from vitrail.models.vit import ViT
from vitrail.runtime import autocast

LowPrecision = Literal["bf16", "fp8"]


class Accelerated:
    """A faster version of a model; the original is not modified. It can be called from several threads."""

    def __init__(self, model: nn.Module, device: torch.device, *, graphs: bool) -> None:
        self.model, self.device = model, device
        # Not a bound method, which would create a reference cycle.
        self._compute = partial(_forward, model, device)
        self.graphs = CudaGraphs(self._compute, device) if graphs else None

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the model's output in float32 for normalised images (B, C, H, W) of any float dtype."""
        images = _castable(images)
        # A graph would copy images from another device, and fail on what is not a tensor; the model names the mistake.
        if self.graphs is None or not _is_batch(images, self.device):
            return self._compute(images)
        return self.graphs(images)


def _is_batch(images: Tensor, device: torch.device) -> bool:
    return isinstance(images, Tensor) and images.ndim == 4 and _is_same(images.device, device)


def _is_same(one: torch.device, other: torch.device) -> bool:
    """Return whether two devices are the same; "cuda" without an index is the current GPU."""
    if one.type != other.type or one.type != "cuda":
        return one.type == other.type
    indices = {torch.cuda.current_device() if device.index is None else device.index for device in (one, other)}
    return len(indices) == 1


def _castable(images: Tensor) -> Tensor:
    """Return images in a dtype that autocast handles; it does not cast float64, and then fails."""
    supported = (torch.float32, torch.bfloat16, torch.float16)
    other = isinstance(images, Tensor) and images.is_floating_point() and images.dtype not in supported
    return images.float() if other else images  # anything else is rejected by the model


def _forward(model: nn.Module, device: torch.device, images: Tensor) -> Tensor:
    with autocast(device, "bf16"):
        output: Tensor = model(images)
    return output.float()


def accelerate(
    model: ViT,
    precision: LowPrecision = "bf16",
    *,
    calibration: Tensor | Iterable[Tensor] | None = None,
    exact: bool = False,
) -> Accelerated:
    """Return a faster version of a model with the same outputs, up to the rounding of a lower precision.

    `calibration`: about a thousand normalised images (B, C, H, W), or batches of them, similar to those in use;
    required for `fp8`, which rounds the weights by them. `exact`: on a CUDA device in bf16, compute the exact GELU
    instead of the tanh approximation, which is free there. On a CUDA device, each of the first few batch sizes is
    captured as a CUDA graph at its first call; further sizes run without one. A model that the fast encoder does not
    support runs under autocast.
    """
    if not isinstance(model, ViT):
        raise ConfigError(f"accelerate takes a ViT, not a {type(model).__name__}; for a bundle, pass bundle.model")
    like = next(model.parameters())
    device = like.device
    if like.dtype != torch.float32:  # autocast expects float32 weights
        model = copy.deepcopy(model).float()
    if precision not in get_args(LowPrecision):
        hint = suggest(precision, get_args(LowPrecision)) or "; choose bf16 or fp8"
        raise ConfigError(f"no precision is called {precision!r}{hint}")
    plan = plan_of(model, precision)
    if plan.precision != precision:
        raise ConfigError(f"{plan.reason}; use bf16")
    inputs = None
    if plan.path == "fp8_encoder":
        if calibration is None:
            raise ConfigError("fp8 needs calibration images; pass a batch of them as calibration, or use bf16")
        inputs = calibrate(model, calibration)
    prepared = prepare(model, plan, EncoderPrecision(exact=exact, inputs=inputs)).eval()
    return Accelerated(prepared, device, graphs=plan.graphs)
