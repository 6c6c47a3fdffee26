"""GPTQ rounding to fp8, compared with rounding to nearest."""

import pytest
import torch
from tests.support.peers import relative_error
from tests.support.tiny_models import bundle
from torch import Tensor

from vitrail.acceleration.cuda.fp8 import calibration, quantisation
from vitrail.acceleration.cuda.fp8.calibration import calibrate
from vitrail.acceleration.cuda.fp8.quantisation import FP8, FP8_MAX, InputCalibration, observe, round_correlated, to_fp8
from vitrail.acceleration.cuda.inference.encoder import SPARED, EncoderPrecision
from vitrail.acceleration.cuda.inference.model import FastModel


def correlated(rows: int, inputs: int, seed: int, kinds: int = 6) -> Tensor:
    """Return rows with correlated inputs: mixtures of a few factors, plus noise."""
    generator = torch.Generator().manual_seed(seed)
    mixture = torch.randn(kinds, inputs, generator=torch.Generator().manual_seed(99))
    return torch.randn(rows, kinds, generator=generator) @ mixture + 0.3 * torch.randn(
        rows, inputs, generator=generator
    )


def matrix(outputs: int, inputs: int, seed: int) -> Tensor:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    return weight * (FP8_MAX / weight.abs().max())


def correlation_of(x: Tensor) -> Tensor:
    correlation = observe(x, None).damped()
    assert correlation is not None
    return correlation


def error(weight: Tensor, rounded: Tensor, x: Tensor) -> float:
    return relative_error(x @ rounded.float().t(), x @ weight.t())


@pytest.mark.parametrize("inputs", [48, 200])
@pytest.mark.parametrize("seed", range(3))
def test_the_output_error_is_smaller(inputs: int, seed: int) -> None:
    weight, others = matrix(40, inputs, seed), correlated(500, inputs, seed + 10)
    rounded = round_correlated(weight, correlation_of(correlated(4000, inputs, seed)))
    assert rounded.dtype == FP8
    assert rounded.is_contiguous()
    assert error(weight, rounded, others) < 0.6 * error(weight, to_fp8(weight, 1.0), others)


@pytest.mark.parametrize("rows", [2, 20, 100, 400])
def test_few_images_do_no_harm(rows: int) -> None:
    """Fewer rows than inputs leave most directions unknown."""
    weight, others = matrix(64, 200, 0), correlated(2000, 200, 5, kinds=150)
    rounded = round_correlated(weight, correlation_of(correlated(rows, 200, 1, kinds=150)))
    assert error(weight, rounded, others) < 1.05 * error(weight, to_fp8(weight, 1.0), others)


def test_independent_inputs_are_rounded_to_nearest() -> None:
    weight = matrix(16, 300, 0)
    own = 0.1 + torch.rand(300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_correlated(weight, own.diag()).float(), to_fp8(weight, 1.0).float())


def test_an_input_that_is_always_zero() -> None:
    weight, x = matrix(16, 32, 0), correlated(300, 32, 0)
    x[:, 5] = 0
    rounded = round_correlated(weight, correlation_of(x)).float()
    assert torch.isfinite(rounded).all()
    assert torch.equal(rounded[:, 5], to_fp8(weight[:, 5], 1.0).float())


def test_each_step_is_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with the definition: after each input, the others minimise the remaining error."""
    monkeypatch.setattr(quantisation, "INPUT_BLOCK", 8)
    weight, correlation = matrix(10, 21, 3).double(), correlation_of(correlated(500, 21, 3)).double()
    left, expected = weight.clone(), torch.zeros_like(weight)
    order = correlation.diagonal().argsort(descending=True).tolist()
    for number, index in enumerate(order):
        rest = order[number + 1 :]
        expected[:, index] = to_fp8(left[:, index], 1.0).double()
        moved = (left[:, index] - expected[:, index])[:, None] * correlation[index, rest]
        left[:, rest] += torch.linalg.solve(correlation[rest][:, rest], moved.t()).t() if rest else 0
    assert torch.equal(round_correlated(weight.float(), correlation.float()).double(), expected)


def test_statistics_accumulate_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    x = correlated(100, 16, 0)
    whole = observe(x, None)
    monkeypatch.setattr(quantisation, "ROW_CHUNK", 7)
    parts = None
    for part in x.bfloat16().split(30):
        parts = observe(part, parts)
    assert parts is not None
    assert parts.products is not None
    assert whole.products is not None
    assert parts.rows == whole.rows == 100
    assert float(parts.largest) == pytest.approx(float(x.abs().max()), rel=0.01)
    assert relative_error(parts.products, whole.products) < 0.01
    assert relative_error(whole.products, x.t() @ x) < 1e-5


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_overflowing_squares_are_rounded_to_nearest(size: float) -> None:
    seen = observe(size * correlated(10, 8, 0), None)
    assert 0 < float(seen.largest) < float("inf")
    assert seen.damped() is None


def test_linearly_dependent_inputs() -> None:
    """Such a matrix is singular, however many rows there are."""
    x = correlated(5000, 64, 0)
    x[:, 32:] = x[:, :32]
    weight = matrix(16, 64, 0)
    assert error(weight, round_correlated(weight, correlation_of(x)), x) < 0.5 * error(weight, to_fp8(weight, 1.0), x)


def test_correlations_are_collected_only_for_fp8() -> None:
    made = bundle("plain", width=32, heads=2, depth=4)
    images = torch.randn(3, 3, *made.preprocess.size)
    result = {name for name, seen in calibrate(made.model, images).items() if seen.correlation is not None}
    assert result == {f"{block}.{name}" for block in (1, 2) for name in ("qkv", "fc1", "fc2")} | {"3.qkv"}


def test_several_batches_equal_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bundle("plain", width=32, heads=2, depth=3)
    images = torch.randn(7, 3, *made.preprocess.size)
    whole = calibrate(made.model, images)
    monkeypatch.setattr(calibration, "BATCH", 2)
    for parts in (calibrate(made.model, images), calibrate(made.model, iter(images.split(3)))):
        for name, seen in whole.items():
            assert parts[name].scale == pytest.approx(seen.scale, rel=1e-5)
            if seen.correlation is not None:
                assert relative_error(parts[name].correlation, seen.correlation) < 1e-5


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_an_fp8_model_is_more_accurate(pool: str) -> None:
    made = bundle("plain", width=64, heads=2, depth=3, pool=pool)
    generator = torch.Generator().manual_seed(0)
    # Images of a few factors, so that the model's activations are correlated, like real ones.
    things = torch.randn(4, 3, *made.preprocess.size, generator=generator)

    def images(count: int) -> Tensor:
        return torch.einsum("bk,kchw->bchw", torch.randn(count, 4, generator=generator), things)

    seen, others = calibrate(made.model, images(400), spared=0), images(100)
    nearest = {name: model._replace(correlation=None) for name, model in seen.items()}

    @torch.inference_mode()
    def error(inputs: dict[str, InputCalibration], spared: int) -> float:
        numbers = EncoderPrecision(torch.float32, exact=True, inputs=inputs, spared=spared)
        return relative_error(FastModel(made.model, numbers)(others), made.model(others))

    assert error(seen, 0) < 0.95 * error(nearest, 0)
    assert error(seen, 1) < 0.95 * error(nearest, 1)
    assert error(seen, SPARED) < 0.7 * error(nearest, 0)
