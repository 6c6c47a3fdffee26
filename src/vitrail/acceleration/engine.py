"""Engines: a model and its preprocessing made ready to answer, by torch or by another runtime.

    pixels (B, C, H, W), uint8  ->  engine  ->  logits (B, K), float32, on the CPU

An engine normalises the pixels itself, so that what it is given is what `Preprocess.fit` makes of a picture.
"""

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from vitrail.acceleration.casting import cast_matrices, cast_once
from vitrail.acceleration.cuda.encoder import Numbers, can_fold
from vitrail.acceleration.cuda.model import FastModel
from vitrail.acceleration.lanes import Lanes
from vitrail.acceleration.packed import can_pack, pack
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, suggest
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, autocast

Kind = Literal["torch", "onnx", "openvino"]


class Engine(Protocol):
    """Something that answers."""

    @property
    def kind(self) -> Kind:
        """Who computes."""

    @property
    def precision(self) -> Precision:
        """What it computes in."""

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits (B, K) for pictures (B, C, H, W) of uint8, in float32 on the CPU."""


class TorchEngine:
    """The model as it is, in torch."""

    kind: Kind = "torch"

    def __init__(self, model: ViT, preprocess: Preprocess, device: torch.device, precision: Precision) -> None:
        self.model = made_ready(model.to(device).eval(), precision)
        self.preprocess, self.device, self.precision = preprocess, device, precision
        self.lanes = Lanes() if device.type == "cpu" else None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits for pictures."""
        return self._answer(pixels) if self.lanes is None else self.lanes(self._answer, pixels)

    @torch.inference_mode()
    def _answer(self, pixels: Tensor) -> Tensor:
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


def made_ready(model: ViT, precision: Precision) -> nn.Module:
    """Return a model that answers under autocast as this one does, sooner."""
    kind = next(model.parameters()).device.type
    if precision == "bf16" and kind == "cuda" and can_fold(model.config):
        return FastModel(model, Numbers())
    if precision == "bf16" and kind == "cpu" and can_pack(model, torch.bfloat16):
        return cast_matrices(pack(model, torch.bfloat16), torch.bfloat16)
    return cast_once(model, precision)
