"""A served model on a CUDA device, without HTTP. Run by hand with `make test-gpu`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.peers import relative_error
from tests.support.tiny_models import bundle

from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.inference.features import FeatureRequest
from vitrail.models.vit import ViT
from vitrail.serving.lifecycle import Counters
from vitrail.serving.model_registry import ServedModel
from vitrail.serving.operations import Embed
from vitrail.serving.settings import NamedSource, Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
ROUNDING = {"float32": 2e-3, "bf16": 0.1}
"""Tolerance of the features of a tiny random model; float32 allows for TF32."""
REQUESTS = [
    FeatureRequest(),
    FeatureRequest(layer=0),
    FeatureRequest(normalise=True),
    FeatureRequest(tokens="class"),
    FeatureRequest(tokens="patches", layer=-2),
    FeatureRequest(tokens="patches", raw=True),
]


@pytest.fixture(params=list(ROUNDING))
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ServedModel, str]]:
    bundle().save(tmp_path / "m")
    named = NamedSource("m", str(tmp_path / "m"))
    made = ServedModel(named, Settings(models=(named,), device="cuda", precision=request.param), Counters())
    yield made, request.param
    asyncio.run(made.batcher.close())


def test_features_are_those_of_the_model(served: tuple[ServedModel, str]) -> None:
    model, precision = served
    exact, generator = bundle(), torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (5, 16, 32, 3), dtype=torch.uint8, generator=generator)
    for request in REQUESTS:
        outputs = model.run(Embed(request), [image.numpy() for image in images])
        actual = torch.tensor([output["embedding"] for output in outputs if isinstance(output, dict)])
        with torch.no_grad():
            expected = request.take(exact.model, exact.preprocess.normalise(images.permute(0, 3, 1, 2)))
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) < ROUNDING[precision]
        assert isinstance(model.ready(request), FastModel if precision == "bf16" else ViT)
    kept = model.ready(FeatureRequest())
    assert model.ready(FeatureRequest(layer=-1, normalise=True)) is kept
    assert (model.ready(FeatureRequest(layer=0)) is kept) == (precision == "float32")
