"""The model as a step calls it."""

from pathlib import Path

import torch

from vitrail.training.train import train

SMALL = ("steps=2", "batch=16", "evaluations=1", "model.depth=1", "model.heads=1", "model.stem=conv", "compile=true")


def test_every_model_of_a_sweep_is_compiled(tmp_path: Path) -> None:
    """torch compiles a piece of Python for eight kinds of input, and from then on runs it as it is."""
    torch.compiler.reset()  # what other tests compiled
    with (
        torch.compiler.set_stance("default", force_backend="eager"),
        torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True),
    ):
        for width in (16, 24):
            changes = [*SMALL, f"model.width={width}"]
            train("digits", changes=changes, folder=tmp_path / str(width), device="cpu", workers=0, quiet=True)
