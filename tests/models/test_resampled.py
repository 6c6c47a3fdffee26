"""A ViT run on images of another size equals the resized ViT, and stays as it is."""

import copy

import pytest
import torch
from tests.support.peers import scramble
from tests.support.tiny_models import KINDS, TINY

from vitrail import ViT, ViTConfig
from vitrail.models.position import METHODS, Method
from vitrail.models.resampled import ResampledForward

SIZE = (24, 40)


def build(kind: str) -> ViT:
    model = ViT(ViTConfig(**{**TINY, "image_size": (32, 32), **KINDS[kind]})).double()
    scramble(model)
    return model


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"every_rate"}))
def test_equals_the_resized_model(kind: str) -> None:
    model = build(kind)
    resized = copy.deepcopy(model)
    resized.resize(SIZE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    images = torch.randn(2, model.config.channels, *SIZE, dtype=torch.float64)
    forward = ResampledForward(model.config, SIZE).double()
    torch.testing.assert_close(forward(model, images), resized(images), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not forward.state_dict()
    assert not list(forward.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: Method) -> None:
    model = build("every_block")
    resized = copy.deepcopy(model)
    resized.resize(SIZE, method=method)
    images = torch.randn(2, 3, *SIZE, dtype=torch.float64)
    forward = ResampledForward(model.config, SIZE, method=method).double()
    torch.testing.assert_close(forward(model, images), resized(images), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "learned_2d", "relative", "every_block"])
def test_gradients_of_tables(kind: str) -> None:
    """The gradient of each table, against finite differences."""
    model, size = build(kind), SIZE
    forward = ResampledForward(model.config, size).double()
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    tables = {name: p for name, p in model.named_parameters() if "pos_embed" in name or "rel_pos" in name}
    forward(model, images).sum().backward()
    for name, table in tables.items():
        direction, step = torch.randn_like(table), 1e-5
        ends = []
        for sign in (1, -1):
            table.data.add_(direction, alpha=sign * step)
            ends.append(float(forward(model, images).sum().detach()))
            table.data.sub_(direction, alpha=sign * step)
        expected = (ends[0] - ends[1]) / (2 * step)
        assert float((table.grad * direction).sum()) == pytest.approx(expected, rel=1e-4, abs=1e-6), name


def test_checkpointing_gives_the_same_gradients() -> None:
    model, images = build("every_block").train(), torch.randn(2, 3, *SIZE, dtype=torch.float64)
    forward = ResampledForward(model.config, SIZE).double()
    gradients = []
    for model.gradient_checkpointing in (False, True):
        model.zero_grad()
        forward(model, images).square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_dropout_follows_the_mode_of_the_model() -> None:
    model = build("every_rate")
    forward = ResampledForward(model.config, SIZE).double()
    images = torch.randn(2, 3, *SIZE, dtype=torch.float64)
    assert torch.equal(forward(model.eval(), images), forward(model, images))
    assert not torch.equal(forward(model.train(), images), forward(model, images))


def test_batch_norm_updates_the_statistics_of_the_model() -> None:
    model = build("conv_stem").train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}
    ResampledForward(model.config, SIZE).double()(model, torch.randn(2, 3, *SIZE, dtype=torch.float64))
    assert before
    assert all(not torch.equal(buffer, model.get_buffer(name)) for name, buffer in before.items())
