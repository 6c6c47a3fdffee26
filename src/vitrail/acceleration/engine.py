"""Engines: a model with its normalisation, run by torch, ONNX Runtime or OpenVINO.

    pixels (B, C, H, W), uint8  ->  engine  ->  logits (B, K), float32, on the CPU; (B, K, rows, columns) per patch

An engine normalises the pixels itself; its input is the output of `Preprocess.fit`.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from vitrail.acceleration.casting import cast_matrices, cast_once
from vitrail.acceleration.cpu.onednn import pack
from vitrail.acceleration.cpu.threads import CpuThreads
from vitrail.acceleration.cuda.graphs import SIZES, CudaGraphs
from vitrail.acceleration.cuda.inference.encoder import EncoderPrecision
from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.acceleration.export.graph import Graph, output_name, require, trace
from vitrail.acceleration.export.onnx import OnnxFile, onnx_program, write_onnx
from vitrail.acceleration.export.openvino import Compiled, check_precision, openvino_model
from vitrail.acceleration.planner import ExecutionPlan, plan_of
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, suggest
from vitrail.models.lora import has_adapters
from vitrail.models.vit import ViT
from vitrail.runtime import InferencePrecision, Precision, autocast

Kind = Literal["torch", "onnx", "openvino"]
CHUNK = 256
"""Images of a large batch that are computed on a GPU while the next ones are copied."""


# ── engines ──


class Engine(Protocol):
    """A callable from pixels to logits."""

    @property
    def kind(self) -> Kind:
        """The runtime."""

    @property
    def precision(self) -> InferencePrecision:
        """The precision it computes in."""

    @property
    def plan(self) -> ExecutionPlan:
        """How it computes the model."""

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the model's logits for images (B, C, H, W) of uint8, in float32 on the CPU."""


class TorchEngine:
    """The model in torch.

    On a GPU, batches run as CUDA graphs: small ones padded to one of a few sizes, larger ones in chunks whose size is
    captured when it is used again. As usual, logits depend on the batch size only up to rounding.
    """

    kind: Kind = "torch"

    def __init__(self, model: ViT, preprocess: Preprocess, device: torch.device, precision: Precision) -> None:
        self.device, self.precision = device, precision
        self.plan = plan_of(model.to(device).eval(), precision)
        self.compute = FromPixels(prepare(model, self.plan), preprocess, device, precision)
        self.cpu_threads = CpuThreads() if self.plan.cpu_threads else None
        self.graphs: CudaGraphs | None = None
        if self.plan.graphs:
            self.graphs = CudaGraphs(self.compute, device, sizes=SIZES, keep_alive=self.compute.weights())
            self.copy_stream = torch.cuda.Stream(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits for images."""
        return self._run(pixels) if self.cpu_threads is None else self.cpu_threads(self._run, pixels)

    @torch.inference_mode()
    def _run(self, pixels: Tensor) -> Tensor:
        if self.graphs is None:
            return self.compute(pixels.to(self.device)).cpu()
        return (self.graphs(pixels) if len(pixels) <= CHUNK else self._run_chunks(self.graphs, pixels)).cpu()

    def _run_chunks(self, compute: CudaGraphs, pixels: Tensor) -> Tensor:
        """Overlap copying images to the device with computing the previous ones."""
        copy_stream, compute_stream = self.copy_stream, torch.cuda.current_stream(self.device)
        outputs = []
        for chunk in pixels.chunk(-(-len(pixels) // CHUNK)):
            pinned = chunk if chunk.is_cuda or chunk.is_pinned() else chunk.pin_memory()
            with torch.cuda.stream(copy_stream):
                on_device = pinned.to(self.device, non_blocking=True)
            compute_stream.wait_stream(copy_stream)
            on_device.record_stream(compute_stream)
            outputs.append(compute(on_device))
        return torch.cat(outputs)


class FromPixels:
    """A model with its normalisation, bit-identical to `Preprocess`, with the constants on the device.

    Copying the constants for every batch would synchronise with the device.
    """

    def __init__(self, model: nn.Module, preprocess: Preprocess, device: torch.device, precision: Precision) -> None:
        self.model, self.device, self.precision = model, device, precision
        factor = [1 / (255 * std) for std in preprocess.std]
        shift = [-mean / std for mean, std in zip(preprocess.mean, preprocess.std, strict=True)]
        self.factor, self.shift = (
            torch.tensor(values, dtype=torch.float32, device=device)[:, None, None] for values in (factor, shift)
        )

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return float32 logits for pixels 0…255 (B, C, H, W) on the device, without synchronising."""
        normalised = torch.addcmul(self.shift, pixels, self.factor)
        with autocast(self.device, self.precision):
            logits: Tensor = self.model(normalised)
        return logits.float()

    def weights(self) -> list[Tensor]:
        """Return all tensors that a captured CUDA graph reads besides the pixels."""
        return [self.factor, self.shift, *self.model.parameters(), *self.model.buffers()]


class OnnxEngine:
    """The model in ONNX Runtime, in float32 on the CPU."""

    kind: Kind = "onnx"

    def __init__(self, model: ViT, preprocess: Preprocess, device: torch.device, precision: Precision) -> None:
        check_runs_on_cpu("ONNX Runtime", device)
        if precision != "float32":
            raise ConfigError(
                f"the engine onnx supports float32 only, not {precision}; use float32, or the engine openvino or torch"
            )
        require("onnxruntime", "onnx")  # before tracing, which takes a while
        self.precision: Precision = precision
        self.plan = ExecutionPlan("onnx", precision)
        program = onnx_program(trace(Graph(model, preprocess)), output_name(model))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "model.onnx"
            write_onnx(program, path)
            self.session = OnnxFile(path)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits for images."""
        return self.session(pixels)


class OpenVinoEngine:
    """The model in OpenVINO, on the CPU."""

    kind: Kind = "openvino"

    def __init__(self, model: ViT, preprocess: Preprocess, device: torch.device, precision: Precision) -> None:
        check_runs_on_cpu("OpenVINO", device)
        check_precision(precision)  # before tracing, which takes a while
        self.precision: Precision = precision
        self.plan = ExecutionPlan("openvino", precision)
        program = onnx_program(trace(Graph(model, preprocess)), output_name(model), extra="openvino")
        self.session = Compiled(openvino_model(program), precision)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits for images."""
        return self.session(pixels)


# ── opening ──


def open_engine(
    model: ViT, preprocess: Preprocess, *, kind: str = "torch", precision: Precision = "float32", device: torch.device
) -> Engine:
    """Open an engine for a model."""
    if precision not in get_args(Precision):
        raise ConfigError(f"no precision is called {precision!r}; choose float32, bf16 or fp16")
    match kind:
        case "torch":
            return TorchEngine(model, preprocess, device, precision)
        case "onnx":
            return OnnxEngine(model, preprocess, device, precision)
        case "openvino":
            return OpenVinoEngine(model, preprocess, device, precision)
        case _:
            raise ConfigError(
                f"no engine is called {kind!r}{suggest(kind, get_args(Kind)) or '; choose torch, onnx or openvino'}"
            )


def check_runs_on_cpu(runtime: str, device: torch.device) -> None:
    """Raise if a CPU-only runtime is used with another device."""
    if device.type != "cpu":
        raise ConfigError(f"{runtime} runs on the CPU only, not on {device}; use --device cpu, or the engine torch")


def prepare(model: ViT, plan: ExecutionPlan, numbers: EncoderPrecision | None = None) -> nn.Module:
    """Return the model of a plan, with the same outputs under autocast; `numbers` are those of the fused encoder."""
    if has_adapters(model):  # the fast paths would ignore them
        raise ConfigError("the model has LoRA adapters; merge them first, with vitrail.models.lora.merged")
    match plan.path:
        case "fused_encoder" | "fp8_encoder":
            return FastModel(model, numbers or EncoderPrecision())
        case "onednn":
            return cast_matrices(pack(model, torch.bfloat16), torch.bfloat16)
        case _:
            return cast_once(model, plan.autocast)


class CapturedModel(nn.Module):
    """A prepared model on a CUDA device that runs as CUDA graphs, for callers that normalise the images themselves."""

    def __init__(self, model: nn.Module, device: torch.device, precision: Precision) -> None:
        super().__init__()
        self.model = model
        weights = [*model.parameters(), *model.buffers()]
        # Not a bound method, which would create a reference cycle.
        self.graphs = CudaGraphs(partial(_forward, model, device, precision), device, sizes=SIZES, keep_alive=weights)

    def forward(self, images: Tensor) -> Tensor:
        """Return the model's output for images (B, C, H, W) on the device."""
        return self.graphs(images)


def _forward(model: nn.Module, device: torch.device, precision: Precision, images: Tensor) -> Tensor:
    # Without the cache of cast weights: it is freed with the caller's autocast context, while the graph still reads it.
    with autocast(device, precision, cache=False):
        output: Tensor = model(images)
    return output
