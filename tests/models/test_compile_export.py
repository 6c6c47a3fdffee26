"""No graph breaks, a dynamic batch in torch.export, and the same outputs."""

from typing import Any

import pytest
import torch
from tests.peers import scramble
from torch import nn

from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

TINY: dict[str, Any] = {"image_size": (16, 32), "patch_size": 8, "width": 24, "depth": 2, "heads": 3, "classes": 5}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"stem": "linear", "class_token": "last"},
    "linear_norm": {"stem": "linear_norm", "qkv_bias": False},
    "conv_stem": {"stem": "conv_stem", "norm_order": "post"},
    "resnet": {"stem": "resnet", "resnet": {"depths": (1, 1), "width_factor": 0.5}},
    "rope": {"position": "rope_2d", "registers": 2, "qk_norm": True},
    "relative": {"position": "relative", "activation": "swiglu"},
    "every_block": {"position_at": "every_block", "position_covers": "class", "registers": 1},
    "learned_2d": {"position": "learned_2d", "position_at": "shared"},
    "sincos": {"position": "sincos_2d", "pool": "map", "layer_scale": 0.1},
    "distilled": {"distillation_token": True, "representation": 7},
    "every_rate": dict.fromkeys(
        ("embed_dropout", "attention_dropout", "proj_dropout", "mlp_dropout", "stochastic_depth", "patch_dropout"), 0.2
    ),
}


def build(kind: str) -> nn.Module:
    return scramble(ViT(ViTConfig(**{**TINY, **KINDS[kind]})))


QUICK = ("plain", "relative")  # the usual model, and the one with the most unusual graph
SLOW = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", SLOW)
@pytest.mark.parametrize("training", [False, True])
def test_one_graph(kind: str, training: bool) -> None:
    """The whole model traces into one graph, in training (with every kind of dropout) and in evaluation."""
    torch.compiler.reset()
    model = build(kind).train(training)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 16, 32)
    out = compiled(x)
    out.sum().backward()
    if not training:
        assert torch.allclose(out, model(x), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "rope", "relative", "resnet"])
def test_inductor_gives_the_same_outputs(kind: str) -> None:
    torch.compiler.reset()
    model = build(kind)
    x = torch.randn(2, 3, 16, 32)
    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_export_with_a_dynamic_batch(kind: str) -> None:
    model = build(kind)
    program = torch.export.export(
        model, (torch.randn(3, 3, 16, 32),), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    )
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 16, 32)
        assert torch.allclose(program.module()(x), model(x), atol=1e-5)
