"""No graph breaks, a dynamic batch in torch.export, and the same outputs."""

import pytest
import torch
from tests.support.peers import scramble
from tests.support.tiny_models import BASIC_KINDS, TINY
from torch import nn

from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT


def build(kind: str) -> nn.Module:
    return scramble(ViT(ViTConfig(**{**TINY, **BASIC_KINDS[kind]})))


QUICK = ("plain", "relative")  # the usual model, and the one with the most unusual graph
SLOW = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in BASIC_KINDS]


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


@pytest.mark.parametrize("kind", BASIC_KINDS)
def test_export_with_a_dynamic_batch(kind: str) -> None:
    model = build(kind)
    program = torch.export.export(
        model, (torch.randn(3, 3, 16, 32),), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    )
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 16, 32)
        assert torch.allclose(program.module()(x), model(x), atol=1e-5)
