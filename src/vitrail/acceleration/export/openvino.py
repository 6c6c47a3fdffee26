"""OpenVINO: an .xml with the graph and a .bin with the weights, made from ONNX.

OpenVINO also reads torch's graphs directly. But it then gives other numbers for rotated positions (release 2026.4), and
takes longer than by way of ONNX.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.acceleration.export.graph import first_line
from vitrail.acceleration.export.onnx import write_onnx
from vitrail.acceleration.packages import quiet, require
from vitrail.errors import CheckpointError, ConfigError
from vitrail.runtime import Precision

HINTS: dict[Precision, tuple[str, str]] = {
    "float32": ("f32", "FP32"),
    "bf16": ("bf16", "BF16"),
    "fp16": ("f16", "FP16"),
}
"""What OpenVINO calls a precision when it is asked for, and where it lists what a processor can do."""


def check_precision(precision: Precision) -> None:
    """Refuse a precision that this processor has no instructions for; OpenVINO itself would quietly take another."""
    openvino: Any = require("openvino", "openvino")
    if HINTS[precision][1] not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise ConfigError(f"OpenVINO cannot compute in {precision} on this processor; use float32")


def openvino_model(made: torch.onnx.ONNXProgram) -> Any:
    """Turn a model in ONNX into one of OpenVINO."""
    openvino: Any = require("openvino", "openvino")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(made, path)
        try:
            with quiet():
                return openvino.Core().read_model(path)
        except RuntimeError as error:
            raise CheckpointError(f"OpenVINO cannot express this model ({first_line(error)})") from None


def write_openvino(model: Any, path: Path) -> None:
    """Write the .xml, and the .bin beside it, with the weights as they are: float32."""
    openvino: Any = require("openvino", "openvino")
    try:
        with quiet():
            openvino.save_model(model, path, compress_to_fp16=False)
    except RuntimeError as error:  # what it makes of a full disk
        raise OSError(first_line(error)) from None


class Compiled:
    """A model of OpenVINO made ready for this processor; `model` is one in memory, or the path of an .xml."""

    def __init__(self, model: Any, precision: Precision = "float32", threads: int | None = None) -> None:
        check_precision(precision)
        openvino: Any = require("openvino", "openvino")
        core = openvino.Core()
        settings = {
            "INFERENCE_PRECISION_HINT": HINTS[precision][0],  # without it OpenVINO takes 16 bits wherever it can
            "INFERENCE_NUM_THREADS": threads or torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",  # all threads for one batch: the next one comes when this one is done
        }
        try:
            with quiet():
                read = core.read_model(model) if isinstance(model, Path) else model
                self.compiled = core.compile_model(read, "CPU", settings)
        except RuntimeError as error:
            raise CheckpointError(f"OpenVINO cannot open the model ({first_line(error)})") from None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the answers to a batch."""
        return torch.from_numpy(self.compiled([np.ascontiguousarray(pixels.numpy())])[0])
