"""The planner: the path of every kind of hardware and model, and the reason where it is not the fastest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.config_strategies import configs

from vitrail.acceleration.cuda.encoder import EncoderPrecision, FastEncoder
from vitrail.acceleration.cuda.training import FusedTraining
from vitrail.acceleration.planner import (
    Hardware,
    hardware_of,
    plan_inference,
    plan_training,
    unsupported_by_fused_encoder,
    unsupported_by_fused_training,
    why_not_fp8,
)
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

HOPPER = Hardware("cuda", fast_bf16=True, capability=(9, 0), kernels=True)
ADA = HOPPER._replace(capability=(8, 9))
AMPERE = HOPPER._replace(capability=(8, 0))
T4 = Hardware("cuda", capability=(7, 5), kernels=True)
WITHOUT_TRITON = HOPPER._replace(kernels=False)
AMX = Hardware("cpu", fast_bf16=True, onednn_bf16=True)
OLD_CPU = Hardware("cpu")
APPLE = Hardware("mps")
PLAIN = ViTConfig()
ROTARY = ViTConfig(position="rope_2d")


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
        (WITHOUT_TRITON, PLAIN, "bf16", "eager, bf16, CUDA graphs: Triton or a C compiler is missing"),
        (HOPPER, PLAIN, "float32", "eager, float32, CUDA graphs"),
        (T4, PLAIN, "fp16", "eager, fp16, CUDA graphs"),
        (T4, PLAIN, "float32", "eager, float32, CUDA graphs: this GPU is slow in bf16"),
        (AMX, PLAIN, "bf16", "packed oneDNN path, bf16"),
        (AMX, ROTARY, "bf16", "eager, bf16: the packed path does not support rotary positions"),
        (OLD_CPU, PLAIN, "bf16", "eager, bf16: oneDNN has no bf16 on this CPU"),
        (OLD_CPU, PLAIN, "float32", "eager, float32: this CPU has no bf16 matrix units"),
        (APPLE, PLAIN, "float32", "eager, float32"),
    ],
)
def test_inference(hardware: Hardware, config: ViTConfig, precision: str, line: str) -> None:
    assert str(plan_inference(config, hardware, precision)) == line


@pytest.mark.parametrize(
    ("hardware", "config", "settings", "line"),
    [
        (HOPPER, PLAIN, {}, "fused CUDA path, compiled, bf16, CUDA graphs"),
        (HOPPER, PLAIN, {"gradient_accumulation": 2}, "fused CUDA path, compiled, bf16"),
        (HOPPER, PLAIN, {"deterministic": True}, "compiled, bf16: the fused path is not deterministic"),
        (HOPPER, PLAIN, {"alone": False}, "compiled, bf16: the fused path runs on one rank"),
        (HOPPER, ROTARY, {}, "compiled, bf16: the fused path does not support rotary positions"),
        (HOPPER, PLAIN, {"compiled": False}, "eager, bf16"),
        (T4, PLAIN, {}, "compiled, bf16: this GPU is slow in bf16"),
        (OLD_CPU, PLAIN, {}, "compiled, bf16: the fused path needs an NVIDIA GPU"),
    ],
)
def test_training(hardware: Hardware, config: ViTConfig, settings: dict[str, object], line: str) -> None:
    plan = plan_training(config, hardware, "bf16", **{"compiled": True, **settings})
    assert str(plan) == line


@given(configs(), st.sampled_from([HOPPER, AMPERE, T4, WITHOUT_TRITON, AMX, OLD_CPU, APPLE]))
def test_a_path_accepts_exactly_the_models_that_are_planned_for_it(config: ViTConfig, hardware: Hardware) -> None:
    planned = plan_inference(config, hardware, "bf16")
    assert (planned.path == "eager") == bool(planned.reason) or hardware.kind == "mps"
    assert (plan_inference(config, hardware, "fp8").precision == "fp8") == (not why_not_fp8(config, hardware))
    model = ViT(config)
    for path, lacks in (
        (lambda: FastEncoder(model, EncoderPrecision()), unsupported_by_fused_encoder(config)),
        (lambda: FusedTraining(model), unsupported_by_fused_training(config)),
    ):
        if lacks:
            with pytest.raises(ConfigError):
                path()
        else:
            path()


def test_this_machine() -> None:
    assert hardware_of(torch.device("cpu")).kind == "cpu"
    assert hardware_of(torch.device("cpu")).capability == (0, 0)
