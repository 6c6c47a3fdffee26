"""The engine `onnx`: the model's graph, run by ONNX Runtime."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from vitrail.acceleration.engine import Kind, check_runs_on_cpu
from vitrail.acceleration.export.graph import Graph, output_name, trace
from vitrail.acceleration.export.onnx import OnnxFile, onnx_program, write_onnx
from vitrail.acceleration.packages import require
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.models.vit import ViT
from vitrail.runtime import Precision


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
        program = onnx_program(trace(Graph(model, preprocess)), output_name(model))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "model.onnx"
            write_onnx(program, path)
            self.session = OnnxFile(path)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits for images."""
        return self.session(pixels)
