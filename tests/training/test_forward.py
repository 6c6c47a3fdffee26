"""The model as a step calls it."""

import torch

from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import Processes
from vitrail.training.forward import forward_of
from vitrail.training.recipe import Recipe
from vitrail.training.team import Team

CPU = torch.device("cpu")


def test_every_model_of_a_sweep_is_compiled() -> None:
    """torch compiles a piece of Python for eight kinds of input, and from then on runs it as it is."""
    with (
        torch.compiler.set_stance("default", force_backend="eager"),
        torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True),
    ):
        for width in (16, 24, 32):
            model = ViT(ViTConfig(image_size=16, patch_size=8, width=width, depth=1, heads=1, classes=3))
            forward = forward_of(model, Recipe(compile=True), "float32", Team(Processes(), CPU))
            pictures = torch.randn(2, 3, 16, 16)
            assert torch.allclose(forward(pictures), model(pictures), atol=1e-5)
