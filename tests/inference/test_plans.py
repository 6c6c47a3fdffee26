"""The execution plan that commands print, for each way of inference and for machines that are not there."""

from collections.abc import Callable

import pytest
import torch
from tests.support.tiny_models import CPU, bundle

from vitrail.acceleration.engine import open_engine
from vitrail.acceleration.planner import Hardware
from vitrail.evaluation import evaluation_plan
from vitrail.inference import plans
from vitrail.models.vit import ViT

Move = Callable[[Hardware], ViT]
HOPPER = Hardware("cuda", fast_bf16=True, capability=(9, 0), kernels=True)
OLD_CPU = Hardware("cpu")
NEW_CPU = Hardware("cpu", fast_bf16=True, onednn_bf16=True)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Move:
    """Return a function that moves the planner to other hardware, and returns a model."""

    def move(hardware: Hardware) -> ViT:
        monkeypatch.setattr("vitrail.acceleration.planner.hardware_of", lambda _: hardware)
        monkeypatch.setattr(plans, "hardware_of", lambda _: hardware)
        return bundle().model

    return move


def test_torch(on: Move) -> None:
    made = bundle()
    engine = open_engine(made.model, made.preprocess, device=CPU)
    on(OLD_CPU)
    assert plans.engine_plan(made.model, engine) == "eager, float32: this CPU has no bf16 matrix units"
    on(NEW_CPU)
    assert plans.engine_plan(made.model, engine) == "eager, float32"
    on(HOPPER)
    assert plans.engine_plan(made.model, engine) == "eager, float32, CUDA graphs"
    engine.precision = "bf16"
    assert plans.engine_plan(made.model, engine) == "fused CUDA path, bf16, CUDA graphs"
    on(NEW_CPU)
    assert plans.engine_plan(made.model, engine) == "packed oneDNN path, bf16"


@pytest.mark.parametrize(("kind", "line"), [("onnx", "ONNX Runtime, float32"), ("openvino", "OpenVINO, float32")])
def test_other_runtimes(kind: str, line: str) -> None:
    pytest.importorskip("onnxruntime" if kind == "onnx" else "openvino")
    made = bundle()
    engine = open_engine(made.model, made.preprocess, kind=kind, device=CPU)
    assert plans.engine_plan(made.model, engine) == line


def test_evaluation_and_features_use_no_cuda_graphs(on: Move) -> None:
    model = on(HOPPER)
    assert evaluation_plan(model, "bf16") == "fused CUDA path, bf16"
    assert plans.feature_plan(model, "bf16") == "fused CUDA path, bf16"
    assert plans.feature_plan(model, "float32") == "eager, float32"


def test_features_are_not_computed_by_the_packed_path(on: Move) -> None:
    model = on(NEW_CPU)
    assert evaluation_plan(model, "bf16") == "packed oneDNN path, bf16"
    assert plans.feature_plan(model, "bf16") == "eager, bf16: the packed path does not compute features"


def test_a_benchmark_has_a_plan_per_precision(on: Move) -> None:
    config = on(HOPPER).config
    assert plans.benchmark_plans(config, torch.device("cpu"), ("float32", "bf16")) == [
        "eager, float32, CUDA graphs",
        "fused CUDA path, bf16, CUDA graphs",
    ]
