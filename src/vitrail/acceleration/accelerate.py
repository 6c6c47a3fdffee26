"""A model made faster where it is: one call, whatever the device."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vitrail.acceleration.cuda.calibration import calibrate
from vitrail.acceleration.cuda.elementwise import kernels_run
from vitrail.acceleration.cuda.encoder import Numbers, can_fold, can_quantise
from vitrail.acceleration.cuda.graphs import CudaGraphs
from vitrail.acceleration.cuda.model import FastModel, runs_fast
from vitrail.acceleration.engine import made_ready
from vitrail.errors import ConfigError, suggest
from vitrail.models.vit import ViT
from vitrail.runtime import autocast

LowPrecision = Literal["bf16", "fp8"]


class Accelerated:
    """A model that answers sooner than the one it was made from, which stays as it is."""

    def __init__(self, model: nn.Module, device: torch.device, *, graphs: bool) -> None:
        self.model, self.device = model, device
        # Not a method, which would hold on to this.
        compute = partial(_computed, model, device)
        self._answer = CudaGraphs(compute, device) if graphs else compute

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Return for normalised images (B, C, H, W), of any float dtype, what the model returns, in float32."""
        return self._answer(_castable(images))


def _castable(images: Tensor) -> Tensor:
    """Return images in a dtype that autocast lowers; it leaves float64 alone, and stumbles over it."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    other = isinstance(images, Tensor) and images.is_floating_point() and images.dtype not in known
    return images.float() if other else images  # what is no image at all is refused by the model


def _computed(model: nn.Module, device: torch.device, images: Tensor) -> Tensor:
    with autocast(device, "bf16"):
        answer: Tensor = model(images)
    return answer.float()


def accelerate(
    model: ViT,
    precision: LowPrecision = "bf16",
    *,
    calibration: Tensor | Iterable[Tensor] | None = None,
    exact: bool = False,
    graphs: bool = False,
    merge: int = 0,
) -> Accelerated:
    """Return something that answers as a model does, within the rounding of a lower precision, and sooner.

    `calibration`: normalised images (B, C, H, W), or batches of them, like those to be answered later, a thousand
    or so; `fp8` needs them, and rounds weights by them once. `exact`: on a CUDA device in bf16, compute GELU in its
    exact form, rather than in the tanh form, which costs nothing there. `graphs`: on a CUDA device, record the work of
    each of the first few batch sizes once and replay it, for small batches, which wait for the processor otherwise.
    `merge`: in each block, let so many tokens become part of the ones that they resemble (token merging); fewer are
    computed, and the answers are others, so measure them.
    A model that the fast encoder does not know is computed under autocast, as it would be anyway.
    """
    if not isinstance(model, ViT):
        raise ConfigError(f"accelerate takes a model, not a {type(model).__name__}; that of a bundle is bundle.model")
    like = next(model.parameters())
    device = like.device
    if like.dtype != torch.float32:  # autocast lowers what is in float32, and stumbles over anything else
        model = copy.deepcopy(model).float()
    match precision:
        case "bf16":
            # A CPU merges by the same encoder, by plain torch, so that its answers can be seen anywhere.
            if runs_fast(model) or (merge and _can_merge(model, device)):
                return Accelerated(FastModel(model, Numbers(exact=exact), merge=merge), device, graphs=graphs)
            return Accelerated(made_ready(model, "bf16").eval(), device, graphs=graphs)
        case "fp8":
            check_fp8(model, device)
            if calibration is None:
                raise ConfigError(
                    "fp8 is chosen by what images make of a model; give a batch of them as calibration, or use bf16"
                )
            # Calibrated without merging: merged tokens are means of others, and so no larger. What their rounding would
            # gain by being seen themselves was not measured.
            numbers = Numbers(exact=exact, inputs=calibrate(model, calibration))
            return Accelerated(FastModel(model, numbers, merge=merge), device, graphs=graphs)
        case _:
            known = suggest(precision, get_args(LowPrecision)) or "; choose bf16 or fp8"
            raise ConfigError(f"no model is accelerated in {precision!r}{known}")


def _can_merge(model: ViT, device: torch.device) -> bool:
    """Refuse to merge tokens where the fast encoder does not know the model, or its kernels do not run."""
    if not can_fold(model.config):
        raise ConfigError(
            "tokens are merged in plain pre-norm blocks with positions added at the stem, which this model does not "
            "have; leave merge out"
        )
    if device.type == "cuda":
        raise ConfigError("to merge tokens on a GPU takes Triton and a C compiler, which are not here; leave merge out")
    return True


def check_fp8(model: ViT, device: torch.device) -> None:
    """Refuse fp8 where there are no units for it, and where the model does not fit them."""
    if device.type != "cuda":
        raise ConfigError(f"fp8 needs a GPU that has it (NVIDIA, Ada or later), but the model is on {device}; use bf16")
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has no units for fp8, which came with Ada and Hopper; use bf16"
        )
    if not kernels_run(device):
        raise ConfigError(
            "fp8 needs Triton, which comes with torch's CUDA builds for Linux, and a C compiler; use bf16"
        )
    if not can_quantise(model.config):
        raise ConfigError(
            "this model cannot be computed in fp8: that takes plain pre-norm blocks, positions added at the stem, and "
            "widths that are multiples of 16; use bf16"
        )
