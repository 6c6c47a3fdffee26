"""Features compared to timm and transformers, with the same weights, and to the model's trace."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tests.support.peer_models import SMALL, timm_vit
from tests.support.peers import import_peer, relative_error, scramble

from vitrail.acceleration.cuda.inference.encoder import EncoderPrecision
from vitrail.acceleration.planner import plan_of
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import load
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Arrays
from vitrail.data.sources.splits import split_of
from vitrail.errors import ConfigError, DataError, Diverged, InputError
from vitrail.inference.features import (
    FEATURE_KINDS,
    ComputeOptions,
    FeatureKind,
    FeatureRequest,
    feature_batches,
    gather,
)
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, autocast

TOLERANCE = 1e-5
HERE = ComputeOptions("cpu", workers=0)
PRE = Preprocess(size=(32, 32))


def images(count: int = 5, size: int = 32) -> Arrays:
    noise = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)
    return Arrays(noise, np.arange(count) % 2, ("a", "b"))


class Corrupt(Arrays):
    """A source with two unreadable images."""

    def read(self, index: int) -> Any:
        return b"no image" if index in (2, 3) else super().read(index)


def bundle(**fields: Any) -> Bundle:
    model = ViT(ViTConfig(**{**SMALL, **fields}))
    scramble(model)
    return Bundle(model, PRE)


def normalised(source: Arrays) -> torch.Tensor:
    pixels = torch.from_numpy(np.stack([source.read(i) for i in range(len(source))])).permute(0, 3, 1, 2)
    return PRE.normalise(pixels)


def features(model: Bundle, kind: FeatureKind = "pooled", **request: Any) -> torch.Tensor:
    result = gather(model, images(), FeatureRequest(kind, **request), ComputeOptions("cpu", batch=2, workers=0))
    return torch.from_numpy(result.features)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        pytest.param({}, {}, id="cls"),
        pytest.param({"global_pool": "avg"}, {"pool": "mean", "final_norm": "after_pool"}, id="gap"),
        pytest.param({"global_pool": "map", "class_token": False}, {"pool": "map", "class_token": "none"}, id="map"),
        pytest.param({"reg_tokens": 2}, {"registers": 2, "position_covers": "all"}, id="registers"),
    ],
)
@torch.no_grad()
def test_timm(options: dict[str, Any], fields: dict[str, Any]) -> None:
    peer = timm_vit(**options)
    ours = ViT(ViTConfig(**{**SMALL, **fields}))
    ours.load_state_dict(peer.state_dict())
    model, x = Bundle(ours, PRE), normalised(images())
    tokens = peer.forward_features(x)
    pooled = peer.forward_head(tokens, pre_logits=True)
    assert relative_error(features(model), pooled) <= TOLERANCE
    special = tokens.shape[1] - 16
    assert relative_error(features(model, "patches"), tokens[:, special:]) <= TOLERANCE
    if ours.config.class_token != "none":
        assert relative_error(features(model, "class"), tokens[:, 0]) <= TOLERANCE
    if ours.config.registers:
        assert relative_error(features(model, "registers"), tokens[:, 1:3]) <= TOLERANCE


@torch.no_grad()
def test_transformers(tmp_path: Path) -> None:
    peers = import_peer("transformers")
    size = {"image_size": 32, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3}
    peer = scramble(peers.ViTForImageClassification(peers.ViTConfig(**size, intermediate_size=192, num_labels=7)))
    peer.save_pretrained(tmp_path)
    hidden = peer.vit(normalised(images())).last_hidden_state
    model = Bundle(load(tmp_path).model, PRE)
    assert relative_error(features(model, "class"), hidden[:, 0]) <= TOLERANCE
    assert relative_error(features(model, "patches"), hidden[:, 1:]) <= TOLERANCE
    assert relative_error(features(model), hidden[:, 0]) <= TOLERANCE


@pytest.mark.parametrize("class_token", ["first", "last"])
@torch.no_grad()
def test_every_layer_matches_the_trace(class_token: str) -> None:
    model = bundle(class_token=class_token, registers=2)
    vit, layout = model.model.eval(), model.model.config.layout
    traced = vit.trace(normalised(images()), tokens=range(3)).tokens
    places: dict[FeatureKind, Any] = {
        "class": layout.class_token,
        "patches": layout.patches,
        "registers": layout.registers,
    }
    for kind, place in places.items():
        for layer in range(3):
            raw = traced[layer][:, place]
            torch.testing.assert_close(features(model, kind, layer=layer, raw=True), raw)
            torch.testing.assert_close(features(model, kind, layer=layer - 3), vit.norm(raw))
        torch.testing.assert_close(features(model, kind), features(model, kind, layer=2))
        torch.testing.assert_close(features(model, kind, raw=True), traced[2][:, place])
    for layer in range(3):
        torch.testing.assert_close(features(model, layer=layer), features(model, "class", layer=layer))


def test_pooled_is_the_input_of_the_head() -> None:
    model = bundle(pool="mean", representation=20)
    pooled = features(model)
    assert pooled.shape == (5, 20)
    with torch.no_grad():
        torch.testing.assert_close(model.model.head(pooled), model.model.eval()(normalised(images())))


@pytest.mark.parametrize("kind", FEATURE_KINDS)
def test_normalised(kind: FeatureKind) -> None:
    model = bundle(registers=2)
    plain, unit = features(model, kind), features(model, kind, normalise=True)
    assert plain.shape[1:] == FeatureRequest(kind).shape(model.model.config)
    torch.testing.assert_close(unit.norm(dim=-1), torch.ones(unit.shape[:-1]))
    torch.testing.assert_close(unit * plain.norm(dim=-1, keepdim=True), plain)


def test_half_precision_is_close() -> None:
    model = bundle()
    low = gather(model, images(), how=ComputeOptions("cpu", "bf16", workers=0)).features
    assert relative_error(torch.from_numpy(low), features(model)) < 0.05
    assert low.dtype == np.float32


def test_order_labels_and_bad_images() -> None:
    source = images(7)
    broken = Corrupt(source.images, source.labels, source.classes)
    model = bundle(mlp_dropout=0.5)
    model.model.train()
    steps: list[tuple[int, int]] = []
    batches = list(
        feature_batches(
            model,
            broken,
            FeatureRequest(),
            ComputeOptions("cpu", batch=2, workers=0, on_progress=lambda *step: steps.append(step)),
        )
    )
    assert model.model.training
    assert not torch.is_inference_mode_enabled()
    assert [batch.indices.tolist() for batch in batches] == [[0, 1], [], [4, 5], [6]]
    assert [batch.features.shape for batch in batches] == [(2, 48), (0, 48), (2, 48), (1, 48)]
    assert [image.name for batch in batches for image in batch.bad] == ["image 2", "image 3"]
    assert steps == [(2, 7), (4, 7), (6, 7), (7, 7)]
    whole = gather(model, broken, how=HERE)
    np.testing.assert_array_equal(whole.labels, source.labels[[0, 1, 4, 5, 6]])
    expected = gather(model, source, how=HERE).features[[0, 1, 4, 5, 6]]
    np.testing.assert_allclose(whole.features, expected, atol=1e-5)
    with pytest.raises(DataError, match=r"none of the 2 can be read; the first, image 2: "):
        gather(model, split_of(broken, np.array([2, 3])), how=HERE)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        (
            {},
            {"tokens": "patchs"},
            "unknown features 'patchs'; choose pooled, class, patches, registers; did you",
        ),
        ({"class_token": "none", "pool": "mean"}, {"tokens": "class"}, "has no class token; choose pooled or patches$"),
        ({}, {"tokens": "registers"}, "has no registers; choose pooled or class or patches$"),
        ({"pool": "none"}, {}, "does not pool its tokens; choose class or patches$"),
        ({}, {"raw": True}, "raw features are tokens as they leave a layer"),
    ],
)
def test_features_a_model_does_not_have(fields: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gather(bundle(**fields), images(), FeatureRequest(**options), HERE)


@pytest.mark.parametrize("layer", [3, -4])
def test_a_layer_that_does_not_exist(layer: int) -> None:
    with pytest.raises(InputError, match=f"layer {layer} does not exist: this model has layers 0 to 2"):
        features(bundle(), layer=layer)


def test_features_that_are_not_finite() -> None:
    model = bundle()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(Diverged, match="the model's output for image 0 is not finite"):
        features(model, "patches")


REQUESTS = [
    FeatureRequest(kind, layer, normalise, raw)
    for kind in get_args(FeatureKind)
    for layer in (None, 0, -2)
    for normalise, raw in ((False, False), (True, False), (False, True))
    if not (raw and kind == "pooled")
]


@pytest.mark.parametrize("class_token", ["first", "last"])
@pytest.mark.parametrize("pool", ["cls", "mean", "map"])
def test_the_fast_encoder_gives_the_same_features(class_token: str, pool: str) -> None:
    """Also if the head reads only one token and the features are those of others."""
    model = bundle(class_token=class_token, pool=pool, registers=2).model.eval().double()
    x = normalised(images()).double()
    for request in REQUESTS:
        with torch.inference_mode():
            expected = request.take(model, x)
            actual = request.take(request.folded(model, EncoderPrecision(torch.float64, exact=True)), x)
        assert actual.shape == expected.shape == (len(x), *request.shape(model.config))
        assert relative_error(actual, expected) <= 1e-6, request


@pytest.mark.parametrize(
    "precision", ["float32", *(pytest.param(low, marks=pytest.mark.slow) for low in ("bf16", "fp16"))]
)
def test_on_a_cpu_features_are_bit_identical_to_the_models(precision: Precision) -> None:
    model, x = bundle().model.eval(), normalised(images())
    for request in REQUESTS:
        ready = request.ready(model, plan_of(model, precision, "features"))
        assert isinstance(ready, ViT)
        with torch.inference_mode(), autocast(torch.device("cpu"), precision):
            assert torch.equal(request.take(ready, x), request.take(model, x))
