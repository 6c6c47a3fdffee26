"""ONNX export: a single file, or external weights beyond 2 GB."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitrail.acceleration.export.graph import BATCH, INPUT, Extra, quiet, require
from vitrail.errors import CheckpointError, ConfigError
from vitrail.text import first_line

OPSET = 20
"""Default opset."""
OPSETS = range(18, 24)
MAX_FILE_BYTES = 1_900_000_000
"""Maximum bytes of weights in one file; protobuf is limited to 2 GB."""


def onnx_program(
    program: ExportedProgram,
    output: str,
    opset: int = OPSET,
    *,
    axes: Mapping[int, str] | None = None,
    extra: Extra = "onnx",
) -> torch.onnx.ONNXProgram:
    """Convert a traced graph to ONNX; `axes` names its dynamic axes, by default the batch."""
    check_opset(opset)
    for package in ("onnx", "onnxscript"):
        require(package, extra)
    try:
        with quiet(), torch.no_grad():
            exported = torch.onnx.export(
                program,
                input_names=[INPUT],
                output_names=[output],
                dynamic_shapes={INPUT: dict(axes or {0: BATCH})},
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter raises many types
        raise CheckpointError(f"this model cannot be exported to ONNX ({first_line(error)})") from None
    if exported is None:
        raise CheckpointError("this model cannot be exported to ONNX; torch gave no reason")
    return exported


def check_opset(opset: int) -> None:
    """Raise if torch cannot export this opset."""
    if opset not in OPSETS:
        raise ConfigError(f"opset is {opset}; choose one from {OPSETS.start} to {OPSETS.stop - 1}")


def write_onnx(program: torch.onnx.ONNXProgram, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write an ONNX model with metadata."""
    program.model.metadata_props.update(metadata or {})
    program.model.producer_name = "vitrail"
    _drop_weight_shapes(program)
    weights = sum(value.const_value.nbytes for value in program.model.graph.initializers.values() if value.const_value)
    with quiet():
        program.save(path, external_data=weights > MAX_FILE_BYTES)


def write_quantised(model: Any, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a quantised ONNX model with metadata."""
    onnx: Any = require("onnx", "int8")
    model.producer_name = "vitrail"
    onnx.helper.set_model_props(model, dict(metadata or {}))
    path.write_bytes(model.SerializeToString())


def _drop_weight_shapes(program: torch.onnx.ONNXProgram) -> None:
    """Remove the redundant shape annotations of weights.

    ONNX Runtime's quantiser transposes weights without updating the annotation, and then rejects the model because the
    two differ.
    """
    for value in program.model.graph.initializers.values():
        if not value.is_graph_input():
            value.shape = value.type = None


class OnnxFile:
    """An ONNX file opened by ONNX Runtime, on the CPU."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        runtime: Any = require("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = threads or torch.get_num_threads()
        try:
            self.session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's exception types are private
            raise CheckpointError(f"ONNX Runtime cannot open the model ({first_line(error)})") from None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the outputs for a batch."""
        return torch.from_numpy(self.session.run(None, {INPUT: np.ascontiguousarray(pixels.numpy())})[0])
