"""Folded layers compute what the norm, the layer and LayerScale compute one after the other."""

import pytest
import torch
import torch.nn.functional as F
from tests.support.peers import relative_error, scramble
from tests.support.tiny_models import bundle
from torch import Tensor, nn

from vitrail.acceleration.folding import affine, fold_block, fold_scale, fold_trained_norm
from vitrail.models.blocks import Block


def block_of(dtype: torch.dtype = torch.float64, **changes: object) -> Block:
    model = scramble(bundle("plain", **{"layer_scale": 0.5, **changes}).model)
    block = model.blocks[0].to(dtype)
    assert isinstance(block, Block)
    return block


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layer_scale", [None, 0.5])
def test_a_folded_block(bias: bool, layer_scale: float | None) -> None:
    block = block_of(layer_scale=layer_scale, qkv_bias=bias, proj_bias=bias, mlp_bias=bias, norm_eps=1e-6)
    folded = fold_block(block)
    x, heads = torch.randn(5, 24, dtype=torch.float64), torch.randn(5, 24, dtype=torch.float64)
    hidden = torch.randn(5, block.mlp.fc2.weight.shape[1], dtype=torch.float64)
    for result, expected in (
        (F.linear(normed(x), *folded.qkv), block.attn.qkv(block.norm1(x))),
        (F.linear(heads, *folded.proj), block.ls1(block.attn.proj(heads))),
        (F.linear(normed(x), *folded.fc1), block.mlp.fc1(block.norm2(x))),
        (F.linear(hidden, *folded.fc2), block.ls2(block.mlp.fc2(hidden))),
    ):
        assert relative_error(result, expected.detach()) < 1e-13


def test_a_block_is_folded_in_float64_and_unchanged() -> None:
    block = block_of(torch.float32)
    before = {name: value.clone() for name, value in block.state_dict().items()}
    assert {tensor.dtype for layer in fold_block(block) for tensor in layer} == {torch.float64}
    assert not any(tensor.requires_grad for layer in fold_block(block) for tensor in layer)
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())


@pytest.mark.parametrize("bias", [False, True])
def test_a_trained_norm_has_the_gradients_of_the_layers(bias: bool) -> None:
    norm, layer = nn.LayerNorm(6, eps=1e-6).double(), nn.Linear(6, 4, bias=bias).double()
    parameters = [norm.weight, norm.bias, *layer.parameters()]
    for parameter in parameters:
        nn.init.normal_(parameter)
    x, target = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    expected = torch.autograd.grad((layer(norm(x)) * target).sum(), parameters)
    result = torch.autograd.grad((F.linear(normed(x), *fold_trained_norm(norm, layer)) * target).sum(), parameters)
    assert all(relative_error(some, other) < 1e-13 for some, other in zip(result, expected, strict=True))


def test_a_trained_norm_is_folded_in_float32_under_autocast() -> None:
    norm, layer = nn.LayerNorm(6), nn.Linear(6, 4)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    exact = fold_trained_norm(norm, layer)
    with torch.autocast("cpu", torch.bfloat16):
        folded = fold_trained_norm(norm, layer)
    assert torch.equal(folded.weight, exact.weight)
    assert torch.equal(folded.bias, exact.bias)


def test_layer_scale_keeps_the_dtype_and_a_missing_bias() -> None:
    block = block_of(torch.float32, mlp_bias=False)
    weight, bias = fold_scale(block.mlp.fc2.weight, block.mlp.fc2.bias, block.ls2)
    assert weight.dtype == torch.float32
    assert bias is None
    assert fold_scale(weight, bias, nn.Identity())[0] is weight


def test_a_convolution_is_a_matrix() -> None:
    layer = nn.Conv2d(3, 5, (2, 4), stride=(2, 4), bias=False)
    weight, bias = affine(layer)
    image = torch.randn(1, 3, 2, 4)
    assert torch.allclose(weight @ image.flatten().double(), layer(image).flatten().double(), atol=1e-6)
    assert torch.equal(bias, torch.zeros(5, dtype=torch.float64))
