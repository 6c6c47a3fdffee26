"""The planner: the path of every kind of hardware and model, and the reason where it is not the fastest."""

import sys
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.config_strategies import configs
from tests.support.peers import relative_error, scramble

from vitrail.acceleration.cpu.onednn import pack
from vitrail.acceleration.cuda.inference.encoder import EncoderPrecision
from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.acceleration.cuda.training.model import FusedTraining
from vitrail.acceleration.planner import (
    TITLES,
    ExecutionPath,
    Hardware,
    Purpose,
    _kernel_error,
    can_checkpoint,
    hardware_of,
    plan_inference,
    plan_training,
    unsupported_by_fp8,
    unsupported_by_fused_encoder,
    unsupported_by_fused_training,
    unsupported_by_onednn,
    usual_precision,
    usual_precisions,
)
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import Precision

HOPPER = Hardware("cuda", fast_bf16=True, capability=(9, 0), kernels=True, short_attention=True)
ADA = HOPPER._replace(capability=(8, 9), short_attention=False)
AMPERE = ADA._replace(capability=(8, 0))
T4 = Hardware("cuda", capability=(7, 5), kernels=True)
T4_WITHOUT_TRITON = T4._replace(kernels=False, kernel_error="No module named 'triton'")
WITHOUT_TRITON = HOPPER._replace(kernels=False, kernel_error="No module named 'triton'", short_attention=False)
AMX = Hardware("cpu", fast_bf16=True, onednn_bf16=True, short_attention=True)
AVX512 = AMX._replace(fast_bf16=False)
VNNI = AVX512._replace(fast_int8=True)
OLD_CPU = AVX512._replace(onednn_bf16=False)
APPLE = Hardware("mps")
EVERYTHING = (HOPPER, ADA, AMPERE, T4, T4_WITHOUT_TRITON, WITHOUT_TRITON, AMX, AVX512, OLD_CPU, APPLE)
PLAIN = ViTConfig()
ROTARY = ViTConfig(position="rope_2d")
PATCHES = ViTConfig(pool="patches")
LAYERS = ViTConfig(pool="patches", head_layers=(5, 11))


@pytest.mark.parametrize(
    ("hardware", "config", "precision", "line"),
    [
        (HOPPER, PLAIN, "bf16", "fused CUDA path, bf16, CUDA graphs"),
        (HOPPER, PLAIN, "fp8", "fused CUDA path, fp8, CUDA graphs"),
        (ADA, PLAIN, "fp8", "fused CUDA path, fp8, CUDA graphs"),
        (AMPERE, PLAIN, "bf16", "fused CUDA path, bf16, CUDA graphs"),
        (
            AMPERE,
            PLAIN,
            "fp8",
            "fused CUDA path, bf16, CUDA graphs: this GPU does not support fp8, which needs Ada or Hopper",
        ),
        (HOPPER, ROTARY, "bf16", "eager, bf16, CUDA graphs: the fused path does not support rotary positions"),
        (HOPPER, PATCHES, "bf16", "fused CUDA path, bf16, CUDA graphs"),
        (
            HOPPER,
            LAYERS,
            "bf16",
            "eager, bf16, CUDA graphs: the fused path does not support heads that read several layers",
        ),
        (
            HOPPER,
            LAYERS,
            "fp8",
            "eager, bf16, CUDA graphs: fp8 does not support heads that read several layers",
        ),
        (
            WITHOUT_TRITON,
            PLAIN,
            "bf16",
            "eager, bf16, CUDA graphs: the Triton kernels do not run (No module named 'triton')",
        ),
        (HOPPER, PLAIN, "float32", "eager, float32, CUDA graphs: bf16 is faster on this GPU"),
        (HOPPER, PLAIN, "fp16", "eager, fp16, CUDA graphs: the fused path needs bf16"),
        (HOPPER, ROTARY, "fp16", "eager, fp16, CUDA graphs"),
        (AMPERE, PLAIN, "fp16", "eager, fp16, CUDA graphs: the fused path needs bf16"),
        (AMPERE, PLAIN, "float32", "eager, float32, CUDA graphs: bf16 is faster on this GPU"),
        (T4, PLAIN, "fp16", "eager, fp16, CUDA graphs"),
        (T4, PLAIN, "bf16", "fused CUDA path, bf16, CUDA graphs: this GPU is slow in bf16; use fp16"),
        (T4, ROTARY, "bf16", "eager, bf16, CUDA graphs: this GPU is slow in bf16; use fp16"),
        (T4_WITHOUT_TRITON, PLAIN, "bf16", "eager, bf16, CUDA graphs: this GPU is slow in bf16; use fp16"),
        (T4, PLAIN, "float32", "eager, float32, CUDA graphs: fp16 is faster on this GPU"),
        (AMX, PLAIN, "bf16", "packed oneDNN path, bf16"),
        (AMX, LAYERS, "bf16", "packed oneDNN path, bf16"),
        (AMX, ROTARY, "bf16", "eager, bf16: the packed path does not support rotary positions"),
        (AMX._replace(onednn_bf16=False), PLAIN, "bf16", "eager, bf16: oneDNN has no bf16 on this CPU"),
        (OLD_CPU, PLAIN, "bf16", "eager, bf16: this CPU is slow in bf16; use float32"),
        (AMX, PLAIN, "float32", "eager, float32: bf16 is faster on this CPU"),
        (AMX, PLAIN, "fp16", "eager, fp16: the packed path needs bf16"),
        (AVX512, PLAIN, "bf16", "packed oneDNN path, bf16: this CPU is slow in bf16; use float32"),
        (AVX512, PLAIN, "float32", "eager, float32: this CPU has no bf16 matrix units"),
        (OLD_CPU, PLAIN, "float32", "eager, float32: this CPU has no bf16 matrix units"),
        (OLD_CPU, PLAIN, "fp8", "eager, bf16: fp8 needs an NVIDIA GPU (Ada or later), but the model is on cpu"),
        (VNNI, PLAIN, "int8", "OpenVINO, int8"),
        (VNNI, ROTARY, "int8", "OpenVINO, int8"),
        (AMX, PLAIN, "int8", "OpenVINO, int8: bf16 is fast on this CPU too; compare them with vitrail bench"),
        (
            OLD_CPU,
            PLAIN,
            "int8",
            "OpenVINO, int8: this CPU has no int8 dot products (VNNI), so int8 may not be faster than float32",
        ),
        (HOPPER, PLAIN, "int8", "eager, float32, CUDA graphs: int8 runs on the CPU only, not on cuda"),
        (APPLE, PLAIN, "int8", "eager, float32: int8 runs on the CPU only, not on mps"),
        (APPLE, PLAIN, "float32", "eager, float32"),
        (APPLE, PLAIN, "fp16", "eager, fp16"),
        (APPLE, PLAIN, "bf16", "eager, bf16: there is no fused path for mps"),
    ],
)
def test_inference(hardware: Hardware, config: ViTConfig, precision: str, line: str) -> None:
    assert str(plan_inference(config, hardware, precision)) == line


@pytest.mark.parametrize(
    ("hardware", "config", "options", "line"),
    [
        (HOPPER, PLAIN, {}, "fused CUDA path, compiled, bf16, CUDA graphs"),
        (HOPPER, PLAIN, {"gradient_accumulation": 2}, "fused CUDA path, compiled, bf16"),
        (HOPPER, PLAIN, {"deterministic": True}, "compiled, bf16: the fused path is not deterministic"),
        (
            HOPPER,
            PLAIN,
            {"alone": False},
            "fused CUDA path, compiled, bf16: in pieces without CUDA graphs, so that gradients are reduced during the "
            "backward pass",
        ),
        (HOPPER, PLAIN, {"sharded": True}, "compiled, bf16: the fused path does not support sharded models"),
        (HOPPER, ROTARY, {}, "compiled, bf16: the fused path does not support rotary positions"),
        (HOPPER, PATCHES, {}, "fused CUDA path, compiled, bf16, CUDA graphs"),
        (HOPPER, LAYERS, {}, "compiled, bf16: the fused path does not support heads that read several layers"),
        (HOPPER, PLAIN, {"adapters": True}, "compiled, bf16: the fused path does not support LoRA adapters"),
        (HOPPER, PLAIN, {"compiled": False}, "eager, bf16"),
        (ADA, PLAIN, {}, "fused CUDA path, compiled, bf16, CUDA graphs"),
        (AMPERE, PLAIN, {}, "fused CUDA path, compiled, bf16, CUDA graphs"),
        (WITHOUT_TRITON, PLAIN, {}, "compiled, bf16: the Triton kernels do not run (No module named 'triton')"),
        (HOPPER, PLAIN, {"precision": "float32"}, "compiled, float32: the fused path needs bf16"),
        (HOPPER, PLAIN, {"precision": "float32", "compiled": False}, "eager, float32: bf16 is faster on this GPU"),
        (T4, PLAIN, {}, "compiled, bf16: this GPU is slow in bf16; use fp16"),
        (T4, PLAIN, {"precision": "float32"}, "compiled, float32: fp16 is faster on this GPU"),
        (
            T4,
            PLAIN,
            {"precision": "fp16"},
            "compiled, fp16: the fused path needs a GPU that is fast in bf16, Ampere or later",
        ),
        (T4, PLAIN, {"precision": "fp16", "compiled": False}, "eager, fp16"),
        (T4, PLAIN, {"precision": "float32", "compiled": False}, "eager, float32: fp16 is faster on this GPU"),
        (T4, PLAIN, {"compiled": False}, "eager, bf16: this GPU is slow in bf16; use fp16"),
        (OLD_CPU, PLAIN, {"compiled": False}, "eager, bf16: this CPU is slow in bf16; use float32"),
        (AMX, PLAIN, {"compiled": False}, "eager, bf16"),
        (OLD_CPU, PLAIN, {}, "compiled, bf16: the fused path needs an NVIDIA GPU"),
        (APPLE, PLAIN, {"precision": "float32", "compiled": False}, "eager, float32"),
    ],
)
def test_training(hardware: Hardware, config: ViTConfig, options: dict[str, object], line: str) -> None:
    plan = plan_training(config, hardware, **{"precision": "bf16", "compiled": True, **options})
    assert str(plan) == line


@pytest.mark.parametrize(
    ("hardware", "purpose", "precision", "line"),
    [
        (HOPPER, "evaluate", "bf16", "fused CUDA path, bf16, CUDA graphs"),
        (HOPPER, "features", "bf16", "fused CUDA path, bf16"),
        (HOPPER, "features", "float32", "eager, float32: bf16 is faster on this GPU"),
        (AMX, "evaluate", "bf16", "packed oneDNN path, bf16"),
        (AMX, "features", "bf16", "eager, bf16: the packed path does not compute features"),
        (AVX512, "features", "bf16", "eager, bf16: this CPU is slow in bf16; use float32"),
    ],
)
def test_purposes(hardware: Hardware, purpose: Purpose, precision: Precision, line: str) -> None:
    plan = plan_inference(PLAIN, hardware, precision, purpose)
    assert str(plan) == line
    assert not plan.cpu_threads  # only an engine splits batches


def test_where_batches_are_split_between_threads() -> None:
    assert [hardware for hardware in EVERYTHING if plan_inference(PLAIN, hardware, "float32").cpu_threads] == [
        AMX,
        AVX512,
        OLD_CPU,
    ]


def test_the_usual_precisions() -> None:
    assert [hardware for hardware in EVERYTHING if usual_precision(hardware) == "bf16"] == [
        HOPPER,
        ADA,
        AMPERE,
        WITHOUT_TRITON,
        AMX,
    ]
    assert usual_precisions(torch.device("cpu")) == ("float32", "bf16")
    assert usual_precisions(torch.device("cuda")) == ("float32", "bf16", "fp16")


def test_kernels_that_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is kept; running out of memory says nothing about the kernels, which are tried again."""
    errors: list[Exception] = [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Failed to find C compiler.\nPlease specify one"),
    ]

    def norm(*_: object) -> None:
        if errors:
            raise errors.pop(0)

    kernels = ModuleType("kernels")
    kernels.norm = norm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vitrail.acceleration.cuda.inference.kernels", kernels)
    _kernel_error.cache_clear()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            _kernel_error(torch.device("cpu"))
        assert _kernel_error(torch.device("cpu")) == "Failed to find C compiler."
        assert not errors
        assert _kernel_error(torch.device("cpu")) == "Failed to find C compiler."
        _kernel_error.cache_clear()
        assert _kernel_error(torch.device("cpu")) == ""
    finally:
        _kernel_error.cache_clear()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(configs())
@pytest.mark.slow
def test_a_path_computes_the_model_or_is_refused(config: ViTConfig) -> None:
    """A new option of the model fails here until every path knows it, or the planner refuses it."""
    model = scramble(ViT(config)).double().eval()
    images = torch.randn(2, config.channels, *config.image_size, dtype=torch.float64)
    with torch.no_grad():
        expected = model(images)
        for make, lacks in (
            (
                lambda: FastModel(model, EncoderPrecision(torch.float64, exact=True)),
                unsupported_by_fused_encoder(config),
            ),
            (lambda: FusedTraining(model), unsupported_by_fused_training(config)),
        ):
            if lacks:
                with pytest.raises(ConfigError):
                    make()
            else:
                assert relative_error(make()(images), expected) < 1e-9
        if not unsupported_by_onednn(config):  # oneDNN packs float32 and bf16 only
            expected = model.float()(images.float())
            assert relative_error(pack(model, torch.float32)(images.float()), expected) < 1e-4


def fast_paths(config: ViTConfig, hardware: Hardware) -> dict[str, str]:
    """Return the paths in bf16 and fp8 that a device has, and what each does not support of a config."""
    match hardware.kind:
        case "cuda" if hardware.kernels:
            paths = {"fused_encoder": unsupported_by_fused_encoder(config)}
            return {**paths, "fp8_encoder": unsupported_by_fp8(config)} if hardware.capability >= (8, 9) else paths
        case "cpu" if hardware.onednn_bf16:
            return {"onednn": unsupported_by_onednn(config)}
    return {}


@settings(derandomize=True, deadline=None, max_examples=300)
@given(configs(), st.sampled_from(EVERYTHING), st.sampled_from(["float32", "fp16", "bf16", "fp8"]))
def test_every_inference_plan(config: ViTConfig, hardware: Hardware, precision: str) -> None:
    plan, paths = plan_inference(config, hardware, precision), fast_paths(config, hardware)
    wanted = {"bf16": {"fused_encoder", "onednn"}, "fp8": {"fp8_encoder"}}.get(precision, set())
    assert plan.path in {"eager"} | {path for path, lacks in paths.items() if not lacks}
    assert plan.graphs == (hardware.kind == "cuda")
    assert plan.precision == ("bf16" if precision == "fp8" and plan.path != "fp8_encoder" else precision)
    assert str(plan).startswith(f"{TITLES[plan.path]}, {plan.precision}")
    slow = hardware in (T4, T4_WITHOUT_TRITON, AVX512, OLD_CPU)
    if precision == "bf16" and slow:
        assert "is slow in bf16; use " in plan.reason
    elif wanted and plan.path not in wanted:
        assert plan.reason
        assert [lacks for path, lacks in paths.items() if path in wanted and lacks not in plan.reason] == []
    elif precision == "fp16":
        fast = {path for path, lacks in paths.items() if not lacks} - {"fp8_encoder"}
        assert bool(plan.reason) == (bool(fast) and not slow)
    else:
        assert bool(plan.reason) == (precision == "float32" and hardware is not APPLE)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    configs(), st.sampled_from(EVERYTHING), st.sampled_from(["float32", "fp16", "bf16"]), st.booleans(),
    st.booleans(), st.booleans(), st.sampled_from([1, 2]), st.booleans(),
)  # fmt: skip
def test_every_training_plan(
    config: ViTConfig, hardware: Hardware, precision: str, compiled: bool,
    deterministic: bool, checkpointing: bool, accumulation: int, alone: bool,
) -> None:  # fmt: skip
    plan = plan_training(
        config, hardware, precision, compiled=compiled, deterministic=deterministic,
        gradient_checkpointing=checkpointing, gradient_accumulation=accumulation, alone=alone,
    )  # fmt: skip
    lacks = unsupported_by_fused_training(config)
    runs = hardware in (HOPPER, ADA, AMPERE) and precision == "bf16" and not (deterministic or lacks)
    fused = runs and compiled and (can_checkpoint() or not checkpointing)
    assert plan.path == ("fused_training" if fused else "compiled" if compiled else "eager")
    assert plan.precision == precision
    assert plan.graphs == (fused and alone and accumulation == 1)
    assert plan.pieces == (fused and not alone)
    assert bool(plan.reason) == (plan.path == "compiled" or plan.pieces) or not compiled
    assert str(plan).startswith(f"{TITLES[plan.path]}, {precision}")


def test_every_path_is_planned_somewhere() -> None:
    precisions: tuple[Any, ...] = ("float32", "bf16", "fp8", "int8")
    planned = {plan_inference(PLAIN, hardware, precision).path for hardware in EVERYTHING for precision in precisions}
    planned |= {plan_training(PLAIN, hardware, "bf16", compiled=True).path for hardware in EVERYTHING}
    chosen = {"onnx", "openvino"}  # by the user, as an engine
    assert planned | chosen == set(get_args(ExecutionPath)) == set(TITLES)


def test_this_machine() -> None:
    assert hardware_of(torch.device("cpu")).kind == "cpu"
    assert hardware_of(torch.device("cpu")).capability == (0, 0)
