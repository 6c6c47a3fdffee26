"""Post-training quantisation with NNCF: int8 matmuls; norms, softmax and GELU stay in float32.

    ONNX graph + calibration inputs  ->  ONNX graph with QuantizeLinear and DequantizeLinear, weights in int8

Weights are symmetric with one scale per output channel; activations have one scale and zero point per tensor, taken
from the calibration inputs. SmoothQuant moves outliers of the activations into the weights. OpenVINO and ONNX Runtime
both open the result.
"""

import contextlib
import io
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.acceleration.export.graph import INPUT, quiet, require
from vitrail.acceleration.export.onnx import write_onnx
from vitrail.errors import CheckpointError
from vitrail.text import first_line

PACKAGES = ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf")


def require_packages() -> None:
    """Raise if a package is missing, before anything slow."""
    for package in PACKAGES[:-1]:
        require(package, "int8")
    _nncf()


def versions() -> str:
    """Return the versions that the quantised graph depends on."""
    return " ".join(f"{name} {require(name, 'int8').__version__}" for name in ("onnxscript", "nncf"))


def quantise(program: torch.onnx.ONNXProgram, inputs: Sequence[NDArray[Any]]) -> Any:
    """Return the quantised ONNX model; `inputs` are batches of one image."""
    nncf: Any = _nncf()
    onnx: Any = require("onnx", "int8")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(program, path)
        model = onnx.load(path)
    data = nncf.Dataset([{INPUT: np.ascontiguousarray(batch)} for batch in inputs])
    try:
        # It draws progress bars on stdout, where rows may go.
        with quiet(), contextlib.redirect_stdout(io.StringIO()):
            return nncf.quantize(
                model,
                data,
                subset_size=len(inputs),
                model_type=nncf.ModelType.TRANSFORMER,
                preset=nncf.QuantizationPreset.MIXED,
                target_device=nncf.TargetDevice.CPU,
                advanced_parameters=_settings(nncf),
            )
    except Exception as error:  # NNCF, ONNX and ONNX Runtime have no common base class
        raise CheckpointError(f"NNCF cannot quantise this model ({first_line(error)})") from None


def _settings(nncf: Any) -> Any:
    """Return where we depart from NNCF's defaults, which were less accurate (benchmarks/LOG.md).

    Ranges cover all calibration images: the mean of each image's range clips the pixels of bright and dark ones. Bias
    correction is off.
    """
    from nncf.quantization.range_estimator import RangeEstimatorParametersSet

    return nncf.AdvancedQuantizationParameters(
        activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX, disable_bias_correction=True
    )


def _nncf() -> ModuleType:
    nncf = require("nncf", "int8")
    # Not nncf.set_log_level, which also sets the level of the logger's handlers: they may not be its own.
    logging.getLogger("nncf").setLevel(logging.ERROR)
    return nncf
