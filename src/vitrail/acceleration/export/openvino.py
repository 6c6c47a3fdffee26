"""OpenVINO export: an .xml with the graph and a .bin with the weights, converted from ONNX.

OpenVINO can also read torch graphs directly, but then gives wrong results for rotary positions (release 2026.4), and
takes longer than via ONNX.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.acceleration.export.graph import quiet, require
from vitrail.acceleration.export.onnx import write_onnx, write_quantised
from vitrail.errors import CheckpointError, ConfigError
from vitrail.runtime import Precision
from vitrail.text import first_line

HINTS: dict[Precision, tuple[str, str]] = {
    "float32": ("f32", "FP32"),
    "bf16": ("bf16", "BF16"),
    "fp16": ("f16", "FP16"),
}
"""OpenVINO's name of each precision as a hint, and in the list of CPU capabilities."""


def core() -> Any:
    """Return OpenVINO's runtime, which is never closed.

    Its CPU plugin gives the thread that first uses it another stack for signal handlers, and frees that stack when the
    runtime is closed. If another thread closes it, for example when a served model is replaced, the next signal crashes
    the process, even the SIGCHLD of a data loading worker (seen in release 2026.4).
    """
    return _opened(require("openvino", "openvino"))


@functools.cache
def _opened(openvino: Any) -> Any:
    return openvino.Core()


def check_precision(precision: Precision) -> None:
    """Raise if this CPU has no instructions for a precision; OpenVINO itself would silently use another."""
    if HINTS[precision][1] not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise ConfigError(f"OpenVINO does not support {precision} on this CPU; use float32")


def openvino_model(program: Any) -> Any:
    """Convert an ONNX model to OpenVINO: an exported one, or a quantised one."""
    runtime = core()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "model.onnx"
        (write_onnx if isinstance(program, torch.onnx.ONNXProgram) else write_quantised)(program, path)
        try:
            with quiet():
                return runtime.read_model(path)
        except RuntimeError as error:
            raise CheckpointError(f"OpenVINO cannot express this model ({first_line(error)})") from None


def write_openvino(model: Any, path: Path) -> None:
    """Write the .xml and the .bin, with float32 weights."""
    openvino: Any = require("openvino", "openvino")
    try:
        with quiet():
            openvino.save_model(model, path, compress_to_fp16=False)
    except RuntimeError as error:  # for example, a full disk
        raise OSError(first_line(error)) from None


class Compiled:
    """An OpenVINO model compiled for this CPU; `model` is in memory, or the path of an .xml."""

    def __init__(self, model: Any, precision: Precision = "float32", threads: int | None = None) -> None:
        check_precision(precision)
        settings = {
            "INFERENCE_PRECISION_HINT": HINTS[precision][0],  # otherwise OpenVINO uses 16 bits wherever it can
            "INFERENCE_NUM_THREADS": threads or torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",  # all threads work on one batch
        }
        try:
            with quiet():
                read = core().read_model(model) if isinstance(model, Path) else model
                self.compiled = core().compile_model(read, "CPU", settings)
        except RuntimeError as error:
            raise CheckpointError(f"OpenVINO cannot open the model ({first_line(error)})") from None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the outputs for a batch."""
        return torch.from_numpy(self.compiled([np.ascontiguousarray(pixels.numpy())])[0])
