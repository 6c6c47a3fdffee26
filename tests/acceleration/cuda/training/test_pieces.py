"""The fused training path in pieces: the model's gradients, and compiled code that pieces share."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.tiny_models import KINDS, bundle, pixels
from torch import Tensor, nn

from vitrail.acceleration.cuda.training.pieces import FusedPieces
from vitrail.acceleration.planner import unsupported_by_fused_training

FUSED = [kind for kind in KINDS if not unsupported_by_fused_training(bundle(kind).model.config)]


def gradients(forward: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the output and every gradient, with a fixed random seed."""
    forward.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    output: Tensor = forward(images)
    output.square().sum().backward()
    named = {name.removeprefix("fused.model."): p.grad for name, p in forward.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **{name: gradient.clone() for name, gradient in named.items()}}


@pytest.fixture
def _compiled_with_aot() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("blocks_per_piece", [1, 2, 4])
def test_every_gradient_is_the_models(kind: str, blocks_per_piece: int) -> None:
    made = bundle(kind, layer_scale=0.5, stochastic_depth=0.4, depth=3)
    model, images = made.model.train().double(), made.preprocess.normalise(pixels(6, made.preprocess.channels)).double()
    expected = gradients(model, images)
    with torch.compiler.set_stance("force_eager"):
        actual = gradients(FusedPieces(model, blocks_per_piece), images)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(actual[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch reads it of every input
@pytest.mark.usefixtures("_compiled_with_aot")
@pytest.mark.parametrize(
    ("changes", "graphs"),
    [({"depth": 4}, 3), ({"depth": 10, "stochastic_depth": 0.3}, 11)],  # stochastic depth is different in every block
    ids=["equal pieces", "more than torch's limit"],
)
def test_equal_pieces_share_compiled_code(changes: dict[str, Any], graphs: int) -> None:
    made = bundle("plain", **changes)
    model, images = made.model.train(), made.preprocess.normalise(pixels(6, made.preprocess.channels))
    pieces = FusedPieces(model, 1)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        actual = [gradients(pieces, images) for _ in range(2)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    expected = gradients(model, images)
    for name, value in expected.items():
        assert torch.allclose(actual[1][name], value, rtol=1e-3, atol=1e-4), name
