"""Engines: a model and its preprocessing made ready to answer, by torch or by another runtime.

    pixels (B, C, H, W), uint8  ->  engine  ->  logits (B, K), float32, on the CPU

An engine normalises the pixels itself, so that what it is given is what `Preprocess.fit` makes of an image.
"""

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from vitrail.acceleration.casting import cast_matrices, cast_once
from vitrail.acceleration.cpu_threads import CpuThreads
from vitrail.acceleration.cuda.encoder import Numbers
from vitrail.acceleration.cuda.graphs import SIZES, CudaGraphs
from vitrail.acceleration.cuda.model import FastModel, runs_fast
from vitrail.acceleration.onednn import can_pack, pack
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, suggest
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, autocast

Kind = Literal["torch", "onnx", "openvino"]
PART = 256
"""Images of a large batch that are computed on a GPU while the next ones are on their way."""


class Engine(Protocol):
    """Something that answers."""

    @property
    def kind(self) -> Kind:
        """Who computes."""

    @property
    def precision(self) -> Precision:
        """What it computes in."""

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits (B, K) for images (B, C, H, W) of uint8, in float32 on the CPU."""


class TorchEngine:
    """The model as it is, in torch.

    On a GPU, small batches are filled up to one of a few sizes and replayed as a graph: what an image's answer is
    depends on how many others are asked about, as it does anyway, by the rounding of the precision and no more.
    """

    kind: Kind = "torch"

    def __init__(self, model: ViT, preprocess: Preprocess, device: torch.device, precision: Precision) -> None:
        self.device, self.precision = device, precision
        self.compute = FromPixels(made_ready(model.to(device).eval(), precision), preprocess, device, precision)
        self.cpu_threads = CpuThreads() if device.type == "cpu" else None
        self.replayed: CudaGraphs | None = None
        if device.type == "cuda":
            self.replayed = CudaGraphs(self.compute, device, sizes=SIZES, kept=self.compute.weights())
            self.sending = torch.cuda.Stream(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits for images."""
        return self._answer(pixels) if self.cpu_threads is None else self.cpu_threads(self._answer, pixels)

    @torch.inference_mode()
    def _answer(self, pixels: Tensor) -> Tensor:
        if self.replayed is None:
            return self.compute(pixels.to(self.device)).cpu()
        return (self.replayed(pixels) if len(pixels) <= PART else self._in_parts(pixels)).cpu()

    def _in_parts(self, pixels: Tensor) -> Tensor:
        """Send some images to a CUDA device while those before them are computed."""
        sending, computing = self.sending, torch.cuda.current_stream(self.device)
        answers = []
        for part in pixels.chunk(-(-len(pixels) // PART)):
            ready = part if part.is_cuda or part.is_pinned() else part.pin_memory()
            with torch.cuda.stream(sending):
                there = ready.to(self.device, non_blocking=True)
            computing.wait_stream(sending)
            there.record_stream(computing)
            answers.append(self.compute(there))
        return torch.cat(answers)


class FromPixels:
    """A model behind its normalising, which is that of `Preprocess`, bit for bit, with its constants on the device.

    To send these there for every batch would be to wait for the device.
    """

    def __init__(self, model: nn.Module, preprocess: Preprocess, device: torch.device, precision: Precision) -> None:
        self.model, self.device, self.precision = model, device, precision
        factor = [1 / (255 * std) for std in preprocess.std]
        shift = [-mean / std for mean, std in zip(preprocess.mean, preprocess.std, strict=True)]
        self.factor, self.shift = (
            torch.tensor(numbers, dtype=torch.float32, device=device)[:, None, None] for numbers in (factor, shift)
        )

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits for pixels 0…255 (B, C, H, W) on the device, in float32, without waiting for the device."""
        normalised = torch.addcmul(self.shift, pixels, self.factor)
        with autocast(self.device, self.precision):
            logits: Tensor = self.model(normalised)
        return logits.float()

    def weights(self) -> list[Tensor]:
        """Return all that a recording of this reads besides the pixels."""
        return [self.factor, self.shift, *self.model.parameters(), *self.model.buffers()]


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
    if precision == "bf16" and runs_fast(model):
        return FastModel(model, Numbers())
    if precision == "bf16" and kind == "cpu" and can_pack(model, torch.bfloat16):
        return cast_matrices(pack(model, torch.bfloat16), torch.bfloat16)
    return cast_once(model, precision)
