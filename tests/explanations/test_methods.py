"""Every method against a naive float64 implementation, for every kind of model."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.reference_explanations import CONFIGS, Naive, build, images
from torch import Tensor

from vitrail.errors import InputError
from vitrail.explanations.attention import (
    attention_maps,
    attention_rows,
    choose_head,
    maps_of_layers,
    pooling_rows,
    rollout,
    rollout_maps,
)
from vitrail.explanations.relevance import as_colours, gradcam_maps, pca_maps, relevance, relevance_maps
from vitrail.explanations.request import ExplanationRequest, explain_pixels
from vitrail.models.vit import ViT


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    largest = expected.abs().max()
    assert largest > 1e-4, "a map of zeros proves nothing"
    assert float((actual - expected).abs().max() / largest) < 2e-5


def queries(naive: Naive) -> list[str | None]:
    """Return one query of each kind that this model has."""
    special = [name for name in naive.names if "," not in name]
    return [None, "mean", "1,3", *special]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_reference_is_the_same_model(name: str) -> None:
    model = build(name)
    naive, x = Naive(model), images(model.config)
    expected = torch.stack([naive(image).logits for image in x])
    with torch.no_grad():
        assert_close(model(x).double(), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_attention(name: str) -> None:
    model = build(name)
    naive, x = Naive(model), images(model.config)
    for query in queries(naive):
        if query is None and model.config.pool == "map":
            continue
        actual = attention_maps(model, x, 1, query)
        expected = torch.stack([naive.attention(image, 1, query) for image in x])
        assert_close(actual, expected)
        assert_close(choose_head(actual, -1), expected[:, -1])
        assert_close(choose_head(actual, None), expected.mean(1))
    assert_close(attention_maps(model, x, -1, "0,0"), attention_maps(model, x, None, (0, 0)))


@pytest.mark.parametrize("name", ["map", "map over all"])
def test_attention_of_the_pool(name: str) -> None:
    model = build(name)
    naive, x = Naive(model), images(model.config)
    result = pooling_rows(model, x)
    torch.testing.assert_close(result.sum(-1), torch.ones(2, model.config.heads))
    for b, image in enumerate(x):
        pooling = naive(image).pooling
        assert pooling is not None
        assert_close(result[b][:, naive.pooled_over], pooling[:, 0].detach())
        places = [naive.pooled_over.index(place) for place in naive.patches]
        assert_close(attention_maps(model, x)[b], pooling[:, 0, places].unflatten(1, model.config.grid).detach())
    # With a layer, it is the mean of the pooled tokens.
    assert_close(attention_maps(model, x, 2), attention_maps(model, x, 2, "mean"))


@pytest.mark.parametrize(("fuse", "discard"), [("mean", 0.0), ("max", 0.0), ("min", 0.0), ("mean", 0.9), ("max", 0.5)])
@pytest.mark.parametrize("name", ["class first", "class last", "distillation", "mean over all", "map", "hybrid"])
def test_rollout(name: str, fuse: Any, discard: float) -> None:
    model = build(name)
    naive, x = Naive(model), images(model.config)
    whole = rollout(model, x, fuse=fuse, discard=discard)
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, model.config.tokens))
    for query in queries(naive):
        expected = torch.stack([naive.rollout(image, query, fuse, discard) for image in x])
        assert_close(rollout_maps(model, x, query, fuse=fuse, discard=discard), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_relevance(name: str) -> None:
    model = build(name)
    naive, x = Naive(model), images(model.config)
    for query in ("2,4", "class") if model.config.pool == "none" else (None,):
        expected = torch.stack([naive.relevance(image, 3, query) for image in x])
        assert_close(relevance_maps(model, x, 3, query), expected)
    each = torch.tensor([1, 4])
    expected = torch.stack([naive.relevance(image, int(c), None) for image, c in zip(x, each, strict=True)])
    assert_close(relevance_maps(model, x, each), expected)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("token", ["first", "last"])
def test_logits_of_patches_are_explained_as_those_of_tokens(token: Any) -> None:
    every, x = build("per token", class_token=token), images(build("per token").config)
    patches = ViT(every.config.replace(pool="patches"))
    patches.load_state_dict(every.state_dict())
    patches.eval()
    for query in ("2,4", "0,1"):
        assert torch.equal(relevance_maps(patches, x, 3, query), relevance_maps(every, x, 3, query))
        for layer in (0, None):
            assert torch.equal(gradcam_maps(patches, x, 3, layer, query), gradcam_maps(every, x, 3, layer, query))
    assert torch.equal(rollout_maps(patches, x), rollout_maps(every, x, "mean"))
    assert torch.equal(attention_maps(patches, x), attention_maps(every, x, None, "mean"))
    for wrong, words in ((None, "choose one with query"), ("class", "for patches only, not for class")):
        with pytest.raises(InputError, match=words):
            ExplanationRequest(query=wrong).check(patches.config)
        with pytest.raises(InputError, match=words):
            relevance_maps(patches, x, 3, wrong)


def test_heads_that_read_several_layers() -> None:
    model = build("per token", pool="patches", head_layers=(0, 2))
    x = images(model.config)
    for call in (
        lambda: ExplanationRequest(query="1,1").check(model.config),
        lambda: relevance_maps(model, x, 3, "1,1"),
        lambda: gradcam_maps(model, x, 3, None, "1,1"),
    ):
        with pytest.raises(InputError, match="reads several layers, and relevance and gradcam support one; use"):
            call()
    for request in (ExplanationRequest("attention"), ExplanationRequest("rollout"), ExplanationRequest("pca")):
        request.check(model.config)
        assert explain_pixels(model, x, request).isfinite().all()


@pytest.mark.parametrize("name", CONFIGS)
def test_gradcam(name: str) -> None:
    model = build(name)
    naive, x = Naive(model), images(model.config)
    query = "0,1" if model.config.pool == "none" else None
    for layer in (0, -1, None):
        for target in range(5):  # some classes have no evidence, and their map is empty
            expected = torch.stack([naive.gradcam(image, target, layer, query) for image in x])
            if expected.max() > 1e-3:
                assert_close(gradcam_maps(model, x, target, layer, query), expected)
                break
        else:
            raise AssertionError("a map of zeros proves nothing")


@pytest.mark.parametrize("name", ["class first", "class last", "registers", "map", "mean over all", "hybrid"])
def test_pca(name: str) -> None:
    model = build(name)
    naive, x = Naive(model), images(model.config)
    result = pca_maps(model, x)
    assert result.shape == (2, *model.config.grid, 3)
    for b, image in enumerate(x):
        features = naive(image).normed[naive.patches].detach().numpy()
        centred = features - features.mean(0)
        _, vectors = np.linalg.eigh(centred.T @ centred)
        for i in range(3):
            direction = vectors[:, -1 - i]
            places = centred @ direction * np.sign(direction[np.abs(direction).argmax()])
            places = (places - places.min()) / (places.max() - places.min())
            np.testing.assert_allclose(result[b, :, :, i].flatten(), places, atol=1e-4)


def test_colours_of_identical_patches() -> None:
    assert torch.equal(as_colours(torch.full((6, 4), 0.3)), torch.full((6, 3), 0.5))
    line = as_colours(torch.arange(5.0)[:, None] * torch.tensor([[1.0, -2.0]]))  # a single component
    torch.testing.assert_close(line[:, 0], torch.linspace(1, 0, 5))  # its largest entry, -2, is made positive
    assert torch.equal(line[:, 1:], torch.full((5, 2), 0.5))


def test_training_mode_raises() -> None:
    model = build("class first").train()
    x = images(model.config)
    for method in ("attention", "rollout", "relevance", "gradcam", "pca"):
        with pytest.raises(InputError, match=r"call model\.eval\(\) first"):
            explain_pixels(model, x, ExplanationRequest(method), 0)


@pytest.mark.parametrize("method", ["attention", "rollout", "relevance", "gradcam", "pca"])
def test_tensors_of_another_size_raise(method: Any) -> None:
    model = build("class first")
    with pytest.raises(InputError, match="takes images of 12×20 pixels, found 20×12"):
        explain_pixels(model, torch.randn(1, 3, 20, 12), ExplanationRequest(method), 0)


def test_gradients_work_under_no_grad() -> None:
    model = build("map").requires_grad_(False)
    x = images(model.config)
    expected = relevance(model, x, 1)
    with torch.no_grad():
        assert torch.equal(relevance(model, x, 1), expected)
        assert not attention_rows(model, x, 0).requires_grad
    assert not expected.requires_grad


@pytest.mark.parametrize("name", ["class last", "map over all"])
def test_all_layers_in_one_forward_pass(name: str) -> None:
    model = build(name)
    x = images(model.config)
    for query in (None, "register:1", "0,4"):
        result = maps_of_layers(model, x, query)
        assert len(result) == 3
        for layer, maps in enumerate(result):
            assert_close(maps, attention_maps(model, x, layer, query))
