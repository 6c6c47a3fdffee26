"""evaluate, embed and predict in the best precision: what they choose, and the line that says so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tiny_models import bundle, pixels

import vitrail
from vitrail import evaluation
from vitrail.acceleration import auto
from vitrail.acceleration.agreement import compare_outputs
from vitrail.acceleration.planner import Hardware
from vitrail.inference import bulk_prediction


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the CPU is faster in bf16, and that any job is large enough to try it."""
    monkeypatch.setattr(auto, "hardware_of", lambda _: Hardware("cpu", fast_bf16=True))
    monkeypatch.setattr(auto, "MIN_SPEEDUP", 0.0)
    monkeypatch.setattr(auto, "MIN_OPERATIONS", 0)
    for module in (evaluation, bulk_prediction):  # random weights have near ties
        monkeypatch.setattr(module, "compare_for", lambda _: compare_outputs)


def images(count: int) -> Any:
    return pixels(count).permute(0, 2, 3, 1).numpy(), np.arange(count) % 5


def lines(count: int, **options: Any) -> list[str]:
    """Return what evaluate, embed and predict say about how they compute."""
    made, data, said = bundle(), images(count), list[str]()
    made.classes = tuple("01234")
    common = {"device": "cpu", "on_plan": said.append, **options}
    vitrail.evaluate(made, data, split="all", workers=0, **common)
    vitrail.embed(made, data, workers=0, **common)
    vitrail.predict(made, list(data[0]), **common)
    return said


@pytest.mark.usefixtures("fast")
def test_bf16_is_chosen_where_it_is_faster_and_agrees() -> None:
    for line in lines(70):
        assert "bf16" in line
    for line in lines(70)[:2]:
        assert "× faster; the first 64 images have" in line


@pytest.mark.usefixtures("fast")
def test_features_that_differ_are_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.acceleration.agreement.MAX_CHANGE", 0.0)
    evaluated, embedded, _ = lines(70)
    assert "float32: bf16 changes an output of the first 64 images by" in evaluated
    assert "float32: bf16 changes a feature vector of the first 64 images by" in embedded
    exact = vitrail.embed(bundle(), images(70), workers=0, device="cpu", precision="float32").features
    assert np.array_equal(vitrail.embed(bundle(), images(70), workers=0, device="cpu").features, exact)


@pytest.mark.usefixtures("fast")
def test_small_jobs_and_models_are_not_tried_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all("float32" in line for line in lines(63))
    assert "bf16 is tried from 64 images" in lines(63)[0]
    monkeypatch.setattr(auto, "MIN_OPERATIONS", 10**12)
    assert "the model is too small to gain from bf16" in lines(70)[0]


def test_a_given_precision_is_used(tmp_path: Path) -> None:
    assert all("bf16" in line for line in lines(4, precision="bf16"))
    made = bundle()
    with pytest.raises(vitrail.ConfigError, match="unknown precision 'int3'"):
        vitrail.predict(made, [tmp_path], precision="int3")
