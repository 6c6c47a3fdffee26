"""The fused path inside pretraining modules: the same losses and gradients, and only where they are compiled."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.tiny_models import TINY
from torch import Tensor, fx, nn

from vitrail.acceleration.cuda.training.in_place import fuse_in_place
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.training.distillation import TwoHeads
from vitrail.training.pretraining.dino import Dino, DinoSettings
from vitrail.training.pretraining.mae import MaeSettings, MaskedAutoencoder
from vitrail.training.pretraining.masked_patches import MaskedPatchesSettings, MaskedPatchPrediction

CONFIG: dict[str, Any] = {
    **TINY, "image_size": 16, "patch_size": 4, "classes": 0, "stem": "conv", "layer_scale": 0.5,
    "stochastic_depth": 0.3,
}  # fmt: skip


def images(count: int = 4, *shape: int) -> Tensor:
    return torch.randn(count, *(shape or (3, 16, 16)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mae() -> tuple[nn.Module, tuple[Any, ...]]:
    settings = MaeSettings(decoder_width=8, decoder_depth=2, decoder_heads=2)
    module = MaskedAutoencoder(ViT(ViTConfig(**CONFIG)), settings)
    return module, (images(), torch.rand(4, module.encoder.config.patches, dtype=torch.float64))


def masked_patches() -> tuple[nn.Module, tuple[Any, ...]]:
    settings = MaskedPatchesSettings(target="pixels")
    module = MaskedPatchPrediction(ViT(ViTConfig(**CONFIG)), settings, (0.5,) * 3, (0.5,) * 3)
    return module, (images(), torch.rand(4, 16, 3, dtype=torch.float64))


def dino() -> tuple[nn.Module, tuple[Any, ...]]:
    settings = DinoSettings(prototypes=16, hidden=8, bottleneck=4, local_crops=2, local_size=8)
    return Dino(ViT(ViTConfig(**CONFIG)), settings), (images(4, 2, 3, 16, 16), images(4, 2, 3, 8, 8), 0.04)


def two_heads() -> tuple[nn.Module, tuple[Any, ...]]:
    config = {**CONFIG, "classes": 5, "distillation_token": True}
    return TwoHeads(ViT(ViTConfig(**config))), (images(),)


METHODS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "mae": mae, "masked patches": masked_patches, "dino": dino, "two heads": two_heads,
}  # fmt: skip


def gradients(module: nn.Module, call: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    module.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    outputs = call(*inputs)
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = torch.stack([part.square().mean() for part in parts]).sum()
    loss.backward()
    found = {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_losses_and_gradients_are_the_same(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = METHODS[name]()
    module = module.double().train()
    expected = gradients(module, module, inputs)
    fuse_in_place(module)
    seen: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    torch.compiler.reset()
    actual = gradients(module, torch.compile(module, backend=backend), inputs)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(actual[key], value, rtol=1e-9, atol=1e-12), key
    assert norms_of_blocks(seen), "the graph has no norm without γ and β, as the fused blocks have"
    assert not any(node.target in (F.conv2d, torch.conv2d) for graph in seen for node in graph.graph.nodes)


def norms_of_blocks(graphs: list[fx.GraphModule]) -> list[fx.Node]:
    nodes = (node for graph in graphs for node in graph.graph.nodes if node.target is F.layer_norm)
    return [node for node in nodes if len(node.args) < 3 and "weight" not in node.kwargs]


def test_what_is_not_compiled_stays_as_it_was() -> None:
    module, inputs = mae()
    module = module.double().eval()
    expected = module(*inputs)
    fuse_in_place(module)
    assert torch.equal(module(*inputs), expected)
    assert set(module.state_dict()) == set(mae()[0].state_dict())


def test_a_copy_computes_with_its_own_weights() -> None:
    module, inputs = mae()
    module = module.double().eval()
    fuse_in_place(module)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert other(*inputs) != module(*inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_on_a_gpu_in_bf16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A compiled model draws other random numbers than an eager one.
    monkeypatch.setitem(CONFIG, "stochastic_depth", 0.0)
    torch.manual_seed(0)
    module, inputs = METHODS[name]()
    module = module.float().cuda().train()
    inputs = tuple(each.float().cuda() if isinstance(each, Tensor) else each for each in inputs)
    expected = gradients(module, module, inputs)
    fuse_in_place(module)
    torch.compiler.reset()
    compiled = torch.compile(module)
    with torch.autocast("cuda", torch.bfloat16):
        actual = gradients(module, compiled, inputs)
    for key, value in expected.items():
        assert (actual[key] - value).norm() <= 0.1 * value.norm() + 1e-4, key
