"""The execution plan that a command prints is the one that runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tiny_models import CPU, bundle

import vitrail
from vitrail import evaluation
from vitrail.acceleration import engine
from vitrail.acceleration.engine import open_engine
from vitrail.acceleration.planner import ExecutionPlan, Hardware
from vitrail.data.sources.source import Arrays
from vitrail.inference.features import ComputeOptions, FeatureRequest, gather

OLD_CPU = Hardware("cpu")
NEW_CPU = Hardware("cpu", fast_bf16=True, onednn_bf16=True)
Plans = Callable[[Hardware], list[ExecutionPlan]]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Plans:
    """Return a function that moves the planner to other hardware, and returns the plans that run afterwards.

    Models are prepared for float32 in any case, since this CPU may lack what the other one has.
    """

    def move(hardware: Hardware) -> list[ExecutionPlan]:
        plans: list[ExecutionPlan] = []

        def prepare(model: Any, plan: ExecutionPlan) -> Any:
            plans.append(plan)
            return model

        monkeypatch.setattr("vitrail.acceleration.planner.hardware_of", lambda _: hardware)
        monkeypatch.setattr(engine, "prepare", prepare)
        monkeypatch.setattr(evaluation, "prepare", prepare)
        monkeypatch.setattr(FeatureRequest, "ready", lambda _, model, plan: prepare(model, plan))
        return plans

    return move


def images() -> Arrays:
    made = bundle()
    shape = (6, *made.preprocess.size, made.preprocess.channels)
    return Arrays(np.random.default_rng(0).integers(0, 256, shape, np.uint8), np.arange(6) % 5, tuple("abcde"))


CASES = [
    (OLD_CPU, "float32", "eager, float32: this CPU has no bf16 matrix units"),
    (NEW_CPU, "float32", "eager, float32: bf16 is faster on this CPU"),
    (NEW_CPU, "bf16", "packed oneDNN path, bf16"),
    (OLD_CPU, "bf16", "eager, bf16: this CPU is slow in bf16; use float32"),
]


@pytest.mark.parametrize(("hardware", "precision", "line"), CASES)
def test_predict(hardware: Hardware, precision: str, line: str, on: Plans) -> None:
    ran = on(hardware)
    printed: list[str] = []
    vitrail.predict(bundle(), list(images().images), device="cpu", precision=precision, on_plan=printed.append)
    assert printed == [str(plan) for plan in ran] == [line]


@pytest.mark.parametrize(("hardware", "precision", "line"), CASES)
def test_predict_files(hardware: Hardware, precision: str, line: str, on: Plans, tmp_path: Path) -> None:
    for number, pixels in enumerate(images().images):
        np.save(tmp_path / f"{number}.npy", pixels)
    ran = on(hardware)
    printed: list[str] = []
    vitrail.predict(bundle(), tmp_path, device="cpu", precision=precision, workers=0, on_plan=printed.append)
    assert printed == [str(plan) for plan in ran] == [line]


@pytest.mark.parametrize(("hardware", "precision", "line"), CASES)
def test_evaluate(hardware: Hardware, precision: Any, line: str, on: Plans) -> None:
    ran = on(hardware)
    printed: list[str] = []
    evaluation.evaluate_bundle(
        bundle(), images(), device="cpu", precision=precision, workers=0, by_number=True, on_plan=printed.append
    )
    assert printed == [str(plan) for plan in ran] == [line]


@pytest.mark.parametrize(("hardware", "precision", "line"), CASES)
def test_features(hardware: Hardware, precision: Any, line: str, on: Plans) -> None:
    ran = on(hardware)
    printed: list[str] = []
    gather(bundle(), images(), how=ComputeOptions("cpu", precision, workers=0, on_plan=printed.append))
    line = "eager, bf16: the packed path does not compute features" if "packed" in line else line
    assert printed == [str(plan) for plan in ran] == [line]


@pytest.mark.parametrize(("kind", "line"), [("onnx", "ONNX Runtime, float32"), ("openvino", "OpenVINO, float32")])
@pytest.mark.slow
def test_other_runtimes(kind: str, line: str) -> None:
    pytest.importorskip("onnxruntime" if kind == "onnx" else "openvino")
    made = bundle()
    assert str(open_engine(made.model, made.preprocess, kind=kind, device=CPU).plan) == line


def test_a_benchmark_prints_a_plan_per_precision(on: Plans) -> None:
    ran = on(NEW_CPU)
    printed: list[str] = []
    result = vitrail.bench(bundle(), engines=["torch"], batches=[2], seconds=0.01, device="cpu", on_plan=printed.append)
    assert printed == ["eager, float32: bf16 is faster on this CPU", "packed oneDNN path, bf16"]
    assert set(printed) == {str(plan) for plan in ran}
    assert [cell.precision for cell in result.cells] == ["float32", "bf16"]
