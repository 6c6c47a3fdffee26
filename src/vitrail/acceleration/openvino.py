"""The engine `openvino`: the model's graph, run by OpenVINO."""

import torch
from torch import Tensor

from vitrail.acceleration.engine import Kind, check_runs_on_cpu
from vitrail.acceleration.export.graph import Graph, output_name, trace
from vitrail.acceleration.export.onnx import onnx_program
from vitrail.acceleration.export.openvino import Compiled, check_precision, openvino_model
from vitrail.data.preprocess import Preprocess
from vitrail.models.vit import ViT
from vitrail.runtime import Precision


class OpenVinoEngine:
    """The model in OpenVINO, on the CPU."""

    kind: Kind = "openvino"

    def __init__(self, model: ViT, preprocess: Preprocess, device: torch.device, precision: Precision) -> None:
        check_runs_on_cpu("OpenVINO", device)
        check_precision(precision)  # before tracing, which takes a while
        self.precision: Precision = precision
        program = onnx_program(trace(Graph(model, preprocess)), output_name(model), extra="openvino")
        self.session = Compiled(openvino_model(program), precision)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits for images."""
        return self.session(pixels)
