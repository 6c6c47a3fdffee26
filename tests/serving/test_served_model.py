"""A served model, without HTTP."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.support.commands import PLAN
from tests.support.tiny_models import bundle
from torch import Tensor

from vitrail.acceleration import auto
from vitrail.acceleration.engine import open_engine
from vitrail.acceleration.export.openvino import core
from vitrail.acceleration.planner import ExecutionPlan, Hardware
from vitrail.checkpoints.bundle import Bundle
from vitrail.errors import Diverged
from vitrail.inference.features import FeatureRequest
from vitrail.runtime import Precision, autocast
from vitrail.serving.lifecycle import Counters
from vitrail.serving.model_registry import ModelRegistry, ServedModel
from vitrail.serving.operations import Embed, Predict
from vitrail.serving.settings import NamedSource, Settings

CPU = torch.device("cpu")
Open = Callable[..., ServedModel]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens a bundle like the service."""
    made: list[ServedModel] = []

    def open_bundle(original: Bundle, **settings: object) -> ServedModel:
        original.save(tmp_path / "m", overwrite=True)
        named = NamedSource("m", str(tmp_path / "m"))
        values = {"models": (named,), "device": "cpu", **settings}
        made.append(ServedModel(named, Settings.model_validate(values), Counters()))
        return made[-1]

    yield open_bundle
    for served in made:
        asyncio.run(served.batcher.close())


def embedded(served: ServedModel, images: Tensor, request: FeatureRequest = FeatureRequest()) -> Tensor:  # noqa: B008 - a constant
    outputs = served.run(Embed(request), [image.numpy() for image in images])
    return torch.tensor([output["embedding"] for output in outputs if isinstance(output, dict)])


def images() -> Tensor:
    return torch.randint(0, 256, (4, 16, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def expected(original: Bundle, request: FeatureRequest, precision: Precision) -> Tensor:
    with autocast(CPU, precision):
        return request.take(original.model.eval(), original.preprocess.normalise(images().permute(0, 3, 1, 2)))


@pytest.mark.parametrize(
    "feature_request",
    [
        FeatureRequest(),
        FeatureRequest(layer=0),
        FeatureRequest(normalise=True),
        FeatureRequest(tokens="patches"),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_features_are_bit_identical_to_the_models(
    feature_request: FeatureRequest, precision: Precision, opened: Open
) -> None:
    original = bundle()
    actual = embedded(opened(original, precision=precision), images(), feature_request)
    assert torch.equal(actual, expected(original, feature_request, precision))
    assert not torch.equal(actual, expected(original, feature_request, "bf16" if precision == "float32" else "float32"))


def test_auto_precision_does_not_apply_to_features(opened: Open) -> None:
    original = bundle()
    served = opened(original, precision="auto")
    served.engine = open_engine(served.bundle.model, served.bundle.preprocess, precision="bf16", device=CPU)
    assert served.description["precision"] == "bf16"
    assert torch.equal(embedded(served, images()), expected(original, FeatureRequest(), "float32"))


def plans_in(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__["fields"]["plan"] for record in log.records if record.message == "plan"]


def test_the_plan_is_logged_when_a_precision_is_chosen(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vitrail.serving")
    monkeypatch.setattr(auto, "hardware_of", lambda _: Hardware("cpu", fast_bf16=True))
    monkeypatch.setattr(auto.PrecisionTrial, "choose", lambda trial: (trial.quick, "bf16"))
    served = opened(bundle(), precision="auto")
    served.warm_up()
    assert served.description["precision"] == "float32"
    served.run(Predict(top=1), [image.numpy() for image in images()] * (auto.IMAGES // 4))
    assert served.plan.precision == "bf16"
    assert plans_in(caplog) == [str(served.plan)]
    assert [record.message for record in caplog.records] == ["precision", "plan"]


def test_plans_are_logged_at_the_start_and_after_a_reload(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vitrail.serving")
    bundle().save(tmp_path / "a")
    bundle("no_head").save(tmp_path / "b")

    async def run() -> None:
        settings = Settings(models=[str(tmp_path / "a"), str(tmp_path / "b")], device="cpu", precision="float32")
        registry = ModelRegistry(settings, Counters())
        await registry.start()
        assert len(plans_in(caplog)) == 2
        await registry.reload()
        assert len(plans_in(caplog)) == 4
        await registry.close()

    asyncio.run(run())
    assert all(PLAN.fullmatch(plan) for plan in plans_in(caplog))


@pytest.mark.slow
def test_other_engines_do_not_compute_features(opened: Open) -> None:
    original, abilities = bundle(), core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    served = opened(original, precision="bf16" if "BF16" in abilities else "float32", engine="openvino")
    assert torch.equal(embedded(served, images()), expected(original, FeatureRequest(), "float32"))


def test_a_model_is_prepared_once(opened: Open) -> None:
    served = opened(bundle(), precision="bf16")
    kept = served.ready(FeatureRequest())
    assert all(
        served.ready(expected) is kept
        for expected in (FeatureRequest(normalise=True), FeatureRequest(layer=0), FeatureRequest(layer=-1))
    )
    assert kept is not served.bundle.model


def test_equivalent_feature_requests_share_a_prepared_model() -> None:
    config, fused, eager = bundle().model.config, ExecutionPlan("fused_encoder", "bf16"), ExecutionPlan("eager", "bf16")
    assert FeatureRequest(tokens="class", layer=0).cache_key(config, eager) == FeatureRequest()
    assert (
        FeatureRequest(layer=-1, normalise=True).cache_key(config, fused)
        == FeatureRequest(layer=1).cache_key(config, fused)
        == FeatureRequest()
    )
    assert (
        FeatureRequest(layer=-2).cache_key(config, fused)
        == FeatureRequest(layer=0).cache_key(config, fused)
        == FeatureRequest(layer=0)
        == FeatureRequest(layer=0).cache_key(config, fused)
        == FeatureRequest(layer=0)
    )
    assert FeatureRequest(tokens="class", raw=True).cache_key(config, fused) == FeatureRequest(tokens="class")


def test_non_finite_features_fail_the_warm_up(opened: Open) -> None:
    original = bundle("no_head")
    opened(original).warm_up()
    with torch.no_grad():
        next(original.model.parameters()).fill_(float("nan"))
    with pytest.raises(Diverged):
        opened(original).warm_up()
