"""Trace a model once, for any batch size: the graph every export format starts from, and torch.export's archive."""

import contextlib
import copy
import importlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail.acceleration.export.dynamic_size import outputs_of_any_size
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.vit import ViT
from vitrail.text import first_line

Extra = Literal["onnx", "openvino", "int8"]
"""The extras of this package that install a runtime."""
INPUT, BATCH = "pixels", "batch"
HEIGHT, WIDTH = "height", "width"
"""The names of the sides of images of any size."""
TRACED_BATCH = 3
"""Traced batch size. Not 1, which torch would specialise, and not one that the check uses."""


# ── optional packages ──

NO_TELEMETRY = ("ORT_DISABLE_TELEMETRY", "NNCF_CI")
"""Environment variables that ONNX Runtime and NNCF read once, at their import: where they are set, nothing is sent to
their makers, and no thread for that is started."""


def require(package: str, extra: Extra) -> ModuleType:
    """Import a package, or raise with the command that installs it."""
    try:
        with quiet(), _without_telemetry():
            return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise ConfigError(_install_hint(f"{package} needs {error.name}, which is missing", extra)) from None
        raise ConfigError(_install_hint(f"{package} is not installed", extra)) from None
    except ImportError as error:
        raise ConfigError(_install_hint(f"{package} cannot be imported ({error})", extra)) from None


def _install_hint(what: str, extra: Extra) -> str:
    return f"{what}; install it with pip install 'vitrail[{extra}]'"


@contextlib.contextmanager
def _without_telemetry() -> Iterator[None]:
    names = [name for name in NO_TELEMETRY if name not in os.environ]
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and log lines of other packages; exceptions are still raised."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ── graph ──


class Graph(nn.Module):
    """A model, optionally with normalisation of uint8 pixels, channels first or last.

    `compute` computes something else than the logits, such as features. With `dynamic_size`, the graph takes images
    whose sides are any multiples of the patch size.
    """

    def __init__(
        self,
        model: ViT,
        preprocess: Preprocess | None,
        *,
        channels_last: bool = False,
        compute: Callable[[ViT, Tensor], Tensor] | None = None,
        dynamic_size: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.preprocess, self.channels_last = model, preprocess, channels_last
        self.compute = outputs_of_any_size if dynamic_size else compute
        self.dynamic_size = dynamic_size

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits for pixels 0…255 if there is preprocessing, or else for normalised images."""
        if self.channels_last:
            pixels = pixels.permute(0, 3, 1, 2)
        if self.preprocess is not None:
            pixels = self.preprocess.normalise(pixels)
        outputs: Tensor = self.model(pixels) if self.compute is None else self.compute(self.model, pixels)
        return outputs

    @property
    def axes(self) -> dict[int, str]:
        """The dynamic axes of the input, with their names."""
        first = 1 if self.channels_last else 2
        return {0: BATCH, **({first: HEIGHT, first + 1: WIDTH} if self.dynamic_size else {})}

    def dims(self) -> dict[int, Any]:
        """Return the same for torch.export."""
        patches = dict(zip((HEIGHT, WIDTH), self.model.config.patch_size, strict=True))
        return {
            axis: patches[name] * Dim(f"{name}_in_patches", min=1) if name in patches else Dim(name, min=1)
            for axis, name in self.axes.items()
        }

    def inputs(self, pixels: Tensor, preprocess: Preprocess) -> Tensor:
        """Return the inputs of the graph for uint8 pixels (B, C, H, W); `preprocess` is that of the model."""
        inputs = pixels if self.preprocess is not None else preprocess.normalise(pixels)
        return inputs.permute(0, 2, 3, 1).contiguous() if self.channels_last else inputs

    def example(self, batch: int) -> Tensor:
        """Return an example input."""
        config = self.model.config
        sides = (config.channels, *config.image_size)
        shape = (*sides[1:], sides[0]) if self.channels_last else sides
        dtype = torch.float32 if self.preprocess is None else torch.uint8
        return torch.zeros(batch, *shape, dtype=dtype)


def output_name(model: ViT) -> str:
    """Return the name of a graph's output."""
    return "logits" if model.config.classes else "features"


def trace(graph: Graph) -> ExportedProgram:
    """Trace a graph for any batch size, in float32 and eval mode."""
    graph.model = _for_inference(graph.model)
    try:
        # Without gradients: with them torch traces other strides after attention, which the ONNX exporter rejects.
        with torch.no_grad(), quiet():
            return torch.export.export(
                graph.eval(), (graph.example(TRACED_BATCH),), dynamic_shapes={INPUT: graph.dims()}
            )
    except Exception as error:  # torch has no common base class for tracing errors
        raise CheckpointError(f"torch cannot trace this model into a graph ({first_line(error)})") from None


def _for_inference(model: ViT) -> ViT:
    """Return the model if it is on the CPU, in float32 and in eval mode, or else such a copy."""
    like = next(model.parameters())
    if like.device.type == "cpu" and like.dtype == torch.float32 and not any(m.training for m in model.modules()):
        return model
    return copy.deepcopy(model).to("cpu", torch.float32).eval()


# ── torch.export ──


def write_archive(program: ExportedProgram, path: Path) -> None:
    """Write a traced graph via memory: torch's own writer kills the process if the disk is full."""
    buffer = io.BytesIO()
    with quiet():
        torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())


class Archive:
    """A loaded torch.export archive."""

    def __init__(self, path: Path) -> None:
        with quiet():
            self.module = torch.export.load(path).module()

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the outputs for a batch."""
        with torch.inference_mode():
            outputs: Tensor = self.module(pixels)
        return outputs
