"""The execution plan of each way of inference, as one line.

The planner plans the fastest way to compute a model. Features are computed without CUDA graphs, and not by the packed
oneDNN path, so their plans say so.
"""

from collections.abc import Sequence

import torch

from vitrail.acceleration.engine import Engine
from vitrail.acceleration.planner import ExecutionPlan, hardware_of, plan_inference, plan_of
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import Precision

RUNTIMES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}


def engine_plan(model: ViT, engine: Engine) -> str:
    """Return the plan of an open engine: "fused CUDA path, bf16, CUDA graphs", "ONNX Runtime, float32"."""
    if engine.kind == "torch":
        return str(plan_of(model, engine.precision))
    return f"{RUNTIMES[engine.kind]}, {engine.precision}"


def feature_plan(model: ViT, precision: Precision) -> str:
    """Return the plan of computing features; the model is on its device."""
    plan = plan_of(model, precision)
    if plan.path == "onednn":
        return str(ExecutionPlan("eager", plan.precision, reason="the packed path does not compute features"))
    return str(plan._replace(graphs=False))


def benchmark_plans(config: ViTConfig, device: torch.device, precisions: Sequence[Precision]) -> list[str]:
    """Return the plan of torch in each precision."""
    hardware = hardware_of(device)
    return [str(plan_inference(config, hardware, precision)) for precision in precisions]
