"""Every engine gives the model's outputs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support import forked_commands
from tests.support.peers import relative_error
from tests.support.tiny_models import CPU, KINDS, bundle, eager, pixels

from vitrail import Bundle
from vitrail.acceleration.casting import cast_once
from vitrail.acceleration.engine import open_engine
from vitrail.acceleration.export.graph import NO_TELEMETRY
from vitrail.acceleration.export.openvino import core
from vitrail.errors import ConfigError
from vitrail.runtime import autocast

QUICK = ("openvino", "rope")  # via ONNX, so that both are tested
ALL = [
    pytest.param(engine, kind, marks=() if (engine, kind) == QUICK else pytest.mark.slow)
    for engine in ("onnx", "openvino")
    for kind in KINDS
]


@pytest.mark.parametrize(("engine", "kind"), ALL)
def test_the_outputs_are_the_models(engine: str, kind: str) -> None:
    made = bundle(kind, depth=1) if (engine, kind) == QUICK else bundle(kind)
    ready = open_engine(made.model, made.preprocess, kind=engine, device=CPU)
    assert (ready.kind, ready.precision) == (engine, "float32")
    for count in (1, 2, 7):
        images = pixels(count, made.preprocess.channels)
        outputs = ready(images)
        assert (outputs.dtype, outputs.device) == (torch.float32, CPU)
        assert relative_error(outputs, eager(made, images)) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_torch_in_float32_is_the_model(kind: str) -> None:
    made = bundle(kind)
    images = pixels(3, made.preprocess.channels)
    assert torch.equal(open_engine(made.model, made.preprocess, device=CPU)(images), eager(made, images))


@pytest.mark.parametrize("kind", KINDS)
def test_cast_once_is_bit_identical_to_autocast(kind: str) -> None:
    made = bundle(kind)
    images = pixels(2, made.preprocess.channels)
    with autocast(CPU, "bf16"):
        expected = eager(made, images).float()
    with autocast(CPU, "bf16"):
        actual = eager(Bundle(cast_once(made.model, "bf16"), made.preprocess), images).float()
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, eager(made, images))
    assert {parameter.dtype for parameter in made.model.parameters()} == {torch.float32}


def test_openvino_runs_in_bf16_or_raises() -> None:
    """Which of the two depends on the CPU that runs the test."""
    made, images = bundle(), pixels(2)
    if "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        ready = open_engine(made.model, made.preprocess, kind="openvino", precision="bf16", device=CPU)
        assert ready.precision == "bf16"
        assert 1e-6 < relative_error(ready(images), eager(made, images)) < 0.1
    else:
        with pytest.raises(ConfigError, match="OpenVINO does not support bf16 on this CPU; use float32"):
            open_engine(made.model, made.preprocess, kind="openvino", precision="bf16", device=CPU)


@pytest.mark.parametrize(
    ("kind", "precision", "device", "message"),
    [
        ("onnx", "bf16", "cpu", "the engine onnx supports float32 only, not bf16"),
        ("onnx", "float32", "cuda", "ONNX Runtime runs on the CPU only, not on cuda; use --device cpu"),
        ("openvino", "float32", "cuda", "OpenVINO runs on the CPU only, not on cuda; use --device cpu"),
        ("onxx", "float32", "cpu", "no engine is called 'onxx'; did you mean 'onnx'"),
        ("torch", "int8", "cpu", "no precision is called 'int8'; choose float32, bf16 or fp16"),
    ],
)
def test_unsupported_options(kind: str, precision: str, device: str, message: str) -> None:
    made = bundle()
    with pytest.raises(ConfigError) as error:
        open_engine(made.model, made.preprocess, kind=kind, precision=precision, device=torch.device(device))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("kind", "package"), [("onnx", "onnxruntime"), ("onnx", "onnxscript"), ("openvino", "openvino")]
)
def test_a_missing_package(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bundle()
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ConfigError) as error:
        open_engine(made.model, made.preprocess, kind=kind, device=CPU)
    assert str(error.value) == f"{package} is not installed; install it with pip install 'vitrail[{kind}]'"


@pytest.mark.slow
def test_signals_are_handled_after_a_model_was_closed_by_another_thread() -> None:
    """OpenVINO frees the stack for signal handlers of the thread that opened it, whichever thread closes it."""
    code = """
import faulthandler, gc, signal, subprocess, threading, torch
faulthandler.enable()
signal.signal(signal.SIGCHLD, lambda *_: None)
import vitrail
from vitrail.acceleration.engine import open_engine
model = vitrail.create(vitrail.ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=1, classes=2)).eval()
held = [open_engine(model, vitrail.Preprocess(size=(8, 8)), kind="openvino", device=torch.device("cpu"))]
def close():
    held.clear()
    gc.collect()
thread = threading.Thread(target=close)
thread.start()
thread.join()
subprocess.run(["true"])
print("alive")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_no_telemetry(tmp_path: Path) -> None:
    """ONNX Runtime would leave an identifier of the machine in both folders, and start a thread that sends it."""
    code = """
import os, sys
from vitrail.acceleration.export.graph import require
assert "onnxruntime" not in sys.modules
threads = len(os.listdir("/proc/self/task"))
require("onnxruntime", "onnx").get_available_providers()
assert len(os.listdir("/proc/self/task")) == threads
"""
    environment = {key: value for key, value in os.environ.items() if key not in NO_TELEMETRY}
    done = forked_commands.run(code=code, environment={**environment, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
