"""The forward pass of training."""

from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from vitrail.acceleration.planner import Hardware
from vitrail.models.config import ViTConfig
from vitrail.training import step
from vitrail.training.recipe import Recipe
from vitrail.training.train import train

SMALL = ("steps=2", "batch=16", "evaluations=1", "model.depth=1", "model.heads=1", "model.stem=conv", "compile=true")


@pytest.mark.slow
def test_every_model_of_a_sweep_is_compiled(tmp_path: Path) -> None:
    """torch compiles a function for eight kinds of input, and then falls back to eager."""
    torch.compiler.reset()  # compiled by other tests
    with (
        torch.compiler.set_stance("default", force_backend="eager"),
        torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True),
    ):
        for width in (16, 24):
            changes = [*SMALL, f"model.width={width}"]
            train("digits", changes=changes, folder=tmp_path / str(width), device="cpu", workers=0, quiet=True)


@pytest.mark.parametrize(
    ("version", "checkpointing", "shorter"),
    [("2.11.0+cu130", False, True), ("2.11.0+cu130", True, False), ("2.12.0", True, True), ("2.13.0+cpu", True, True)],
)
def test_checkpointing_uses_the_path_with_less_memory(
    version: str, checkpointing: bool, shorter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torch 2.11, a compiled custom backward pass keeps everything that it reads."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    hopper = Hardware("cuda", fast_bf16=True, capability=(9, 0), kernels=True, short_attention=True)
    monkeypatch.setattr(step, "hardware_of", lambda _: hopper)  # CI has no GPU
    recipe = Recipe(compile=True, gradient_checkpointing=checkpointing)
    plan = step.plan_step(ViTConfig(), recipe, "bf16", torch.device("cuda"), alone=True)
    assert (plan.path == "fused_training") == shorter
