"""`accelerate` returns a faster model, or says why not."""

from typing import Any

import pytest
import torch
from tests.support.peers import relative_error
from tests.support.tiny_models import CPU, KINDS, bundle, pixels
from torch import Tensor

import vitrail
from vitrail import Bundle
from vitrail.acceleration.accelerate import Accelerated, _is_same, accelerate
from vitrail.acceleration.engine import prepare
from vitrail.acceleration.planner import plan_of
from vitrail.errors import ConfigError, InputError
from vitrail.runtime import autocast


def bundle_and_images(kind: str, **changes: object) -> tuple[Bundle, Tensor]:
    made = bundle(kind, **changes)
    return made, made.preprocess.normalise(pixels(3, made.preprocess.channels))


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_cpu_bf16_equals_the_engine(kind: str) -> None:
    made, images = bundle_and_images(kind)
    made.model.train()  # the caller's model keeps its mode
    fast = vitrail.accelerate(made.model)
    with torch.inference_mode(), autocast(CPU, "bf16"):
        expected = prepare(made.model, plan_of(made.model, "bf16")).eval()(images).float()
    assert torch.equal(fast(images), expected)
    assert fast(images).dtype == torch.float32
    assert made.model.training
    assert {parameter.dtype for parameter in made.model.parameters()} == {torch.float32}
    made.model.eval()
    assert relative_error(fast(images), made.model(images).detach()) < 0.1


@pytest.mark.parametrize("kind", ["plain", "rope"])  # packed if the CPU supports it; never packed
def test_a_model_in_training_mode_runs_without_dropout(kind: str) -> None:
    made, images = bundle_and_images(kind, mlp_dropout=0.5, proj_dropout=0.5)
    expected = accelerate(made.model)(images)
    made.model.train()
    assert torch.equal(accelerate(made.model)(images), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["plain", "rope"])
def test_a_model_that_is_not_in_float32(kind: str, dtype: torch.dtype) -> None:
    made, images = bundle_and_images(kind)
    result = accelerate(made.model.to(dtype))(images)
    assert {parameter.dtype for parameter in made.model.parameters()} == {dtype}
    assert torch.equal(result, accelerate(made.model.float())(images))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_images_of_any_floating_point_dtype(kind: str, dtype: torch.dtype) -> None:
    made, images = bundle_and_images(kind)
    fast = accelerate(made.model)
    result = fast(images.to(dtype))
    assert result.dtype == torch.float32
    assert torch.equal(result, fast(images)) or dtype in (torch.float16, torch.bfloat16)
    assert relative_error(result, fast(images)) < 0.05


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(1, 3, 16, 32, dtype=torch.uint8), "expected normalised floating-point images, found torch.uint8"),
        ([[0.0]], "expected a tensor of images, found list"),
    ],
)
def test_invalid_inputs_are_refused(wrong: Any, message: str) -> None:
    made, _ = bundle_and_images("plain")
    with pytest.raises(InputError, match=message):
        accelerate(made.model)(wrong)


def test_graphs_are_used_only_on_a_gpu() -> None:
    made, images = bundle_and_images("plain")
    fast = accelerate(made.model)
    assert fast.graphs is None
    assert torch.equal(Accelerated(fast.model, CPU, graphs=True)(images), fast(images))


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("fp8", "fp8 needs an NVIDIA GPU (Ada or later), but the model is on cpu; use bf16"),
        ("int8", "no precision is called 'int8'; choose bf16 or fp8"),
        ("bf61", "no precision is called 'bf61'; did you mean 'bf16'?"),
    ],
)
def test_unsupported_options(precision: str, message: str) -> None:
    made, images = bundle_and_images("plain")
    with pytest.raises(ConfigError) as error:
        accelerate(made.model, precision, calibration=images)
    assert str(error.value) == message


def test_only_a_vit_is_accepted() -> None:
    with pytest.raises(ConfigError, match=r"accelerate takes a ViT, not a Bundle; for a bundle, pass bundle\.model"):
        accelerate(bundle())


def test_the_same_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would silently copy images from another GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    cpu, current, first, second = map(torch.device, ("cpu", "cuda", "cuda:0", "cuda:1"))
    assert _is_same(cpu, cpu)
    assert _is_same(first, first)
    assert _is_same(current, second)
    assert not _is_same(current, first)
    assert not _is_same(first, second)
    assert not _is_same(cpu, first)
