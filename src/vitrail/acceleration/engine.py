"""Engines: a model and its preprocessing made ready to answer, by torch or by another runtime.

    pixels (B, C, H, W), uint8  ->  engine  ->  logits (B, K), float32, on the CPU

An engine normalises the pixels itself, so that what it is given is what `Preprocess.fit` makes of a picture.
"""

import copy
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, suggest
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, autocast

Kind = Literal["torch", "onnx", "openvino"]


class Engine(Protocol):
    """Something that answers."""

    kind: Kind
    precision: Precision

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits (B, K) for pictures (B, C, H, W) of uint8, in float32 on the CPU."""


class TorchEngine:
    """The model as it is, in torch."""

    kind: Kind = "torch"

    def __init__(self, model: ViT, preprocess: Preprocess, device: torch.device, precision: Precision) -> None:
        self.model = _cast_once(model.to(device).eval(), precision)
        self.preprocess, self.device, self.precision = preprocess, device, precision

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits for pictures."""
        pixels = self.preprocess.normalise(pixels.to(self.device, non_blocking=True))
        with autocast(self.device, self.precision):
            logits: Tensor = self.model(pixels)
        return logits.float().cpu()


def open_engine(
    model: ViT, preprocess: Preprocess, *, kind: str = "torch", precision: Precision = "float32", device: torch.device
) -> Engine:
    """Make a model ready to answer."""
    if precision not in get_args(Precision):
        raise ConfigError(f"no precision is called {precision!r}; choose float32, bf16 or fp16")
    match kind:
        case "torch":
            return TorchEngine(model, preprocess, device, precision)
        case "onnx":
            from vitrail.acceleration.onnx import OnnxEngine

            return OnnxEngine(model, preprocess, device, precision)
        case "openvino":
            from vitrail.acceleration.openvino import OpenVinoEngine

            return OpenVinoEngine(model, preprocess, device, precision)
        case _:
            raise ConfigError(
                f"no engine is called {kind!r}{suggest(kind, get_args(Kind)) or '; there are torch, onnx and openvino'}"
            )


def check_runs_on_cpu(runtime: str, device: torch.device) -> None:
    """Refuse a device that a runtime, as we install it, does not know."""
    if device.type != "cpu":
        raise ConfigError(f"{runtime} computes on the CPU here, not on {device}; use --device cpu, or the engine torch")


def _cast_once(model: ViT, precision: Precision) -> ViT:
    """Return a copy whose matrices are in `precision` already; autocast would cast them anew for every batch.

    The numbers are the same, bit for bit: what autocast leaves in float32 (norms, positions, the hybrids' standardised
    kernels) stays so.
    """
    if precision == "float32":
        return model
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) in (nn.Linear, nn.Conv2d):
            module.to(dtype)
    return model
