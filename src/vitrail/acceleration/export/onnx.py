"""ONNX: the graph as one file with everything in it; weights beyond 2 GB, which a file cannot hold, lie beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitrail.acceleration.export.graph import BATCH, INPUT, first_line
from vitrail.acceleration.packages import Extra, quiet, require
from vitrail.errors import CheckpointError, ConfigError

OPSET = 20
"""The version of ONNX's operators that is written where none is asked for."""
OPSETS = range(18, 24)
LARGEST_FILE = 1_900_000_000
"""Bytes of weights that one file holds; protobuf ends at 2 GB."""


def onnx_program(
    program: ExportedProgram, output: str, opset: int = OPSET, *, extra: Extra = "onnx"
) -> torch.onnx.ONNXProgram:
    """Turn a traced graph into ONNX."""
    check_opset(opset)
    for package in ("onnx", "onnxscript"):
        require(package, extra)
    try:
        with quiet(), torch.no_grad():
            made = torch.onnx.export(
                program,
                input_names=[INPUT],
                output_names=[output],
                dynamic_shapes={INPUT: {0: BATCH}},
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter has many kinds of its own
        raise CheckpointError(f"this model cannot be written as ONNX ({first_line(error)})") from None
    if made is None:
        raise CheckpointError("this model cannot be written as ONNX; torch gave no reason")
    return made


def check_opset(opset: int) -> None:
    """Refuse a version of the operators that torch does not write."""
    if opset not in OPSETS:
        raise ConfigError(f"opset is {opset}; choose one from {OPSETS.start} to {OPSETS.stop - 1}")


def write_onnx(made: torch.onnx.ONNXProgram, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a model in ONNX, with notes that every reader of the format can see."""
    made.model.metadata_props.update(metadata or {})
    made.model.producer_name = "vitrail"
    _forget_shapes_of_weights(made)
    weights = sum(value.const_value.nbytes for value in made.model.graph.initializers.values() if value.const_value)
    with quiet():
        made.save(path, external_data=weights > LARGEST_FILE)


def _forget_shapes_of_weights(made: torch.onnx.ONNXProgram) -> None:
    """Leave the shape of a weight to the weight itself.

    The exporter notes it a second time. ONNX Runtime's quantiser transposes weights and leaves that note as it was, and
    then refuses the model because the two differ.
    """
    for value in made.model.graph.initializers.values():
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
        except Exception as error:  # the runtime's kinds are private
            raise CheckpointError(f"ONNX Runtime cannot open the model ({first_line(error)})") from None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the answers to a batch."""
        return torch.from_numpy(self.session.run(None, {INPUT: np.ascontiguousarray(pixels.numpy())})[0])
