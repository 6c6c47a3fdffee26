"""The CUDA encoder on a CPU: plain torch does the same arithmetic, so that the algebra can be checked exactly."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from tests.support.peers import relative_error
from tests.support.tiny_models import KINDS, bundle, pixels
from torch import Tensor

from vitrail.acceleration.cuda.fp8.calibration import MARGIN, calibrate
from vitrail.acceleration.cuda.fp8.matmul import Fp8Matmul
from vitrail.acceleration.cuda.fp8.quantisation import FP8_MAX, InputCalibration, to_fp8
from vitrail.acceleration.cuda.inference.encoder import LOW, MATMULS, EncoderPrecision, FastBlock
from vitrail.acceleration.cuda.inference.matmul import Matmul
from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.acceleration.folding import Affine
from vitrail.acceleration.planner import unsupported_by_fp8, unsupported_by_fused_encoder
from vitrail.errors import ConfigError, InputError
from vitrail.models.vit import ViT

FOLDED = [kind for kind in KINDS if not unsupported_by_fused_encoder(bundle(kind).model.config)]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def model_and_images(kind: str, dtype: torch.dtype, **changes: object) -> tuple[ViT, Tensor]:
    made = bundle(kind, **changes)
    images = made.preprocess.normalise(pixels(3, made.preprocess.channels))
    return made.model.to(dtype), images.to(dtype)


@torch.inference_mode()
def outputs(model: torch.nn.Module, images: Tensor) -> Tensor:
    result: Tensor = model(images)
    return result


# ── exact arithmetic ──


@pytest.mark.parametrize("kind", FOLDED)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("changes", [{}, {"layer_scale": 0.5, "depth": 4}], ids=["", "scaled"])
def test_the_outputs_are_the_models(kind: str, dtype: torch.dtype, changes: dict[str, object]) -> None:
    model, images = model_and_images(kind, dtype, **changes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = FastModel(model, EncoderPrecision(dtype, exact=True))
    kept = images.clone()
    for _ in range(2):  # one call must not affect the next
        assert relative_error(outputs(fast, images), outputs(model, images)) < TOLERANCE[dtype]
    assert torch.equal(images, kept)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu"])
def test_every_activation(activation: str) -> None:
    model, images = model_and_images("plain", torch.float64, activation=activation)
    assert (
        relative_error(
            outputs(FastModel(model, EncoderPrecision(torch.float64, exact=True)), images), outputs(model, images)
        )
        < 1e-10
    )


@pytest.mark.parametrize("without", ["qkv_bias", "proj_bias", "mlp_bias", "patch_bias"])
def test_layers_without_a_bias(without: str) -> None:
    model, images = model_and_images("plain", torch.float64, **{without: False})
    assert (
        relative_error(
            outputs(FastModel(model, EncoderPrecision(torch.float64, exact=True)), images), outputs(model, images)
        )
        < 1e-10
    )


UNUSUAL = [
    {"class_token": "last", "registers": 2, "norm_before_blocks": True},
    {"class_token": "last", "distillation_token": True, "registers": 1, "stem": "linear"},
    {"registers": 3, "position_covers": "class", "pool": "map", "pool_over": "all"},
    {"patch_size": (4, 8), "head_dim": 3, "mlp_width": 10, "representation": 7},
    {"patch_size": (8, 4), "norm_eps": 0.01, "final_norm": "none"},
    {"patch_size": (16, 32), "class_token": "none", "pool": "mean", "position": "none", "depth": 1},
]


@pytest.mark.parametrize("changes", UNUSUAL, ids=range(len(UNUSUAL)))
def test_unusual_tokens_and_patches(changes: dict[str, object]) -> None:
    model, images = model_and_images("plain", torch.float64, **changes)
    fast = FastModel(model, EncoderPrecision(torch.float64, exact=True))
    assert relative_error(outputs(fast, images), outputs(model, images)) < 1e-10


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("low", [False, True])
def test_an_empty_batch(pool: str, low: bool) -> None:
    model, images = low_model(pool=pool)
    numbers = EncoderPrecision(torch.float32, inputs=calibrate(model, images) if low else None)
    assert outputs(FastModel(model, numbers), images[:0]).shape == (0, 5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in ("rope", "relative", "every_block", "learned_2d", "no_head", "patches_of_layers")),
        *(("plain", changes) for changes in ({"norm_order": "post"}, {"qk_norm": True}, {"activation": "swiglu"})),
    ],
)
def test_unsupported_models_are_refused(kind: str, changes: dict[str, object]) -> None:
    model, images = model_and_images(kind, torch.float32, **changes)
    for make in (lambda: FastModel(model, EncoderPrecision()), lambda: calibrate(model, images)):
        with pytest.raises(ConfigError, match=r"the fast encoder does not support .*; use vitrail\.accelerate"):
            make()


def test_gelu_is_the_tanh_approximation_by_default() -> None:
    """It is cuBLASLt's; this bounds its error."""
    exact, images = model_and_images("plain", torch.float64)
    tanh, _ = model_and_images("plain", torch.float64, activation="gelu_tanh")
    result = outputs(FastModel(exact, EncoderPrecision(torch.float64)), images)
    assert relative_error(result, outputs(tanh, images)) < 1e-10
    assert 1e-6 < relative_error(result, outputs(exact, images)) < 2e-3


def test_which_models_are_folded() -> None:
    assert {"plain", "linear", "linear_norm", "resnet", "sincos", "distilled", "every_token", "no_position"} <= set(
        FOLDED
    )
    for kind in ("rope", "relative", "conv_stem", "every_block", "learned_2d", "no_head"):
        assert kind not in FOLDED
    assert unsupported_by_fused_encoder(bundle("plain", activation="swiglu").model.config)
    assert unsupported_by_fused_encoder(bundle("plain", qk_norm=True).model.config)
    assert unsupported_by_fp8(bundle("plain").model.config)  # width 24
    assert not unsupported_by_fp8(bundle("plain", width=32, heads=2).model.config)
    assert unsupported_by_fp8(bundle("plain", width=32, heads=2, head_dim=12).model.config)
    assert unsupported_by_fp8(bundle("plain", width=32, heads=2, mlp_width=40).model.config)
    assert unsupported_by_fp8(bundle("plain", width=32, heads=2, qk_norm=True).model.config)


@pytest.mark.parametrize(("kind", "count"), [("plain", 1), ("linear", 1), ("mean_of_all", 8), ("distilled", 10)])
def test_the_last_block_computes_what_the_head_reads(kind: str, count: int) -> None:
    model, images = model_and_images(kind, torch.float32)
    fast = FastModel(model, EncoderPrecision(torch.float32, exact=True))
    with torch.inference_mode():
        assert fast.encode(images).shape[1] == count
    seen: list[int] = []
    fast.encoder.blocks[-1].register_forward_hook(lambda _, __, result: seen.append(len(result[0])))
    outputs(fast, images)
    assert seen == [count * len(images)]


def test_biases_are_deferred_until_a_norm_reads_the_stream() -> None:
    model, _ = model_and_images("plain", torch.float64)
    fast = FastModel(model, EncoderPrecision(torch.float64))
    first, second = (block for block in fast.encoder.blocks)
    biases = [(block.attn.proj.bias, block.mlp.fc2.bias) for block in model.blocks]
    assert torch.equal(first.shift1, torch.zeros_like(first.shift1))
    assert torch.allclose(first.shift2, biases[0][0])
    assert torch.allclose(second.shift1, biases[0][0] + biases[0][1])
    assert torch.allclose(fast.encoder.shift, sum(sum(pair) for pair in biases))


def test_bf16_is_as_accurate_as_autocast() -> None:
    model, images = model_and_images("plain", torch.float32, depth=6)
    exact = outputs(model, images)
    with torch.autocast("cpu", torch.bfloat16):
        usual = relative_error(outputs(model, images).float(), exact)
        result = outputs(FastModel(model, EncoderPrecision()), images)  # also under autocast, as in engines
    assert relative_error(result.float(), exact) < 3 * usual
    assert torch.equal(result, outputs(FastModel(model, EncoderPrecision()), images))


def test_autocast_around_it_changes_nothing() -> None:
    model, images = model_and_images("plain", torch.float32)
    fast = FastModel(model, EncoderPrecision(torch.float32))
    expected = outputs(fast, images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(outputs(fast, images), expected)


def test_wrong_images_raise_the_models_error() -> None:
    model, images = model_and_images("plain", torch.float32)
    with pytest.raises(InputError, match="this model takes images of 16×32 pixels, found 16×16"):
        outputs(FastModel(model, EncoderPrecision()), images[..., :16])


# ── fp8 ──


def low_model(**changes: object) -> tuple[ViT, Tensor]:
    return model_and_images("plain", torch.float32, width=32, heads=2, depth=3, **changes)


def scales_of(model: ViT, images: Tensor | list[Tensor]) -> dict[str, float]:
    return {name: statistics.scale for name, statistics in calibrate(model, images).items()}


def test_calibration_finds_the_maxima() -> None:
    model, images = low_model()
    scales = scales_of(model, images)
    assert set(scales) == {f"{block}.{name}" for block in range(3) for name in MATMULS}
    assert all(type(scale) is float for scale in scales.values())
    seen: dict[str, float] = {}

    def keep(name: str) -> object:
        return lambda _, inputs: seen.__setitem__(name, float(inputs[0].abs().max()))

    plain = copy.deepcopy(model)
    for number, block in enumerate(plain.blocks):
        block.attn.proj.register_forward_pre_hook(keep(f"{number}.proj"))
        block.mlp.fc2.register_forward_pre_hook(keep(f"{number}.fc2"))
    outputs(plain, images)
    for name in ("0.proj", "0.fc2", "1.proj", "1.fc2"):  # in the last block, only of the token that is read
        assert scales[name] * FP8_MAX / MARGIN == pytest.approx(seen[name], rel=1e-4)
    for name in ("2.proj", "2.fc2"):
        assert scales[name] * FP8_MAX / MARGIN <= seen[name] * 1.0001
    assert scales_of(model, images.double()) == pytest.approx(scales, rel=1e-5)
    # Several batches equal a larger one.
    assert scales_of(model, list(images.split(1))) == pytest.approx(scales, rel=1e-5)


@pytest.mark.parametrize("images", [[], torch.zeros(0, 3, 16, 32), [torch.zeros(0, 3, 16, 32)]], ids=range(3))
def test_calibration_without_images(images: object) -> None:
    model, _ = low_model()
    with pytest.raises(InputError, match="no images to calibrate fp8"):
        calibrate(model, images)


@pytest.mark.parametrize("maximum", [0.0, float("nan")])
def test_calibration_rejects_unusable_maxima(maximum: float) -> None:
    model, images = low_model(activation="relu")
    torch.nn.init.zeros_(model.blocks[0].mlp.fc1.weight)
    torch.nn.init.constant_(model.blocks[0].mlp.fc1.bias, maximum)
    with pytest.raises(InputError, match=rf"the input of 0\.fc2 has maximum {maximum}, which cannot be scaled to fp8"):
        calibrate(model, images)


def test_fp8_saturates() -> None:
    assert to_fp8(torch.tensor([1e4, -1e4, 1.0]), 2.0).float().tolist() == [FP8_MAX, -FP8_MAX, 0.5]


@pytest.mark.parametrize("weight_scales", ["tensor", "row"])
@pytest.mark.parametrize("correlation", [None, torch.eye(16)], ids=["nearest", "correlated"])
def test_a_matrix_of_zeros_in_fp8(weight_scales: str, correlation: Tensor | None) -> None:
    folded = Affine(torch.zeros(16, 16, dtype=torch.float64), torch.arange(16, dtype=torch.float64))
    product = Fp8Matmul(folded, torch.float32, InputCalibration(0.1, correlation), weight_scales)
    assert torch.equal(product(to_fp8(torch.ones(2, 16), 0.1)), torch.arange(16.0).expand(2, 16))


@pytest.mark.parametrize("weight_scales", ["tensor", "row"])
@pytest.mark.parametrize("low", [LOW, frozenset(MATMULS), frozenset({"fc2"}), frozenset({"qkv", "proj"})], ids=sorted)
@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("spared", [0, 1])
def test_fp8_stays_close(weight_scales: str, low: frozenset[str], pool: str, spared: int) -> None:
    """A three-bit mantissa has a relative error of at most 1/16; sums of many values have less."""
    model, images = low_model(pool=pool)
    statistics = calibrate(model, images, low=low, spared=spared)
    numbers = EncoderPrecision(torch.float32, inputs=statistics, low=low, weight_scales=weight_scales, spared=spared)
    fast = FastModel(model, numbers)
    for index, block in enumerate(fast.encoder.blocks[:2]):
        kinds = {name: type(getattr(block, name)) for name in MATMULS}
        assert kinds == {name: Fp8Matmul if name in low and index >= spared else Matmul for name in MATMULS}
    error = relative_error(outputs(fast, images), outputs(model, images))
    assert 1e-5 < error < 0.1


def test_fp8_scales_cancel() -> None:
    """The output does not depend on the scale."""
    model, images = low_model(pool="mean")
    inputs = calibrate(model, images)
    model, images = model.double(), images.double()
    base = FastModel(model, EncoderPrecision(torch.float64, inputs=inputs))
    twice = {name: statistics._replace(scale=statistics.scale * 2) for name, statistics in inputs.items()}
    other = FastModel(model, EncoderPrecision(torch.float64, inputs=twice))
    # Doubling the scale only changes the exponent, except for a few values that underflow.
    assert relative_error(outputs(other, images), outputs(base, images)) < 0.02


def test_no_fp8_after_selecting_the_token() -> None:
    model, images = low_model()
    fast = FastModel(model, EncoderPrecision(inputs=calibrate(model, images), low=frozenset(MATMULS)))
    last = fast.encoder.blocks[-1]
    assert isinstance(last, FastBlock)
    assert isinstance(last.q, Fp8Matmul)
    assert isinstance(last.kv, Fp8Matmul)
    assert [type(part) for part in (last.proj, last.fc1, last.fc2)] == [Matmul] * 3


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("fused", "in_bf16", "in_fp8"), [(None, False, True), (False, False, False), (True, True, True)]
)
def test_activations_are_fused_in_fp8_and_elsewhere_on_request(
    low: bool, exact: bool, fused: bool | None, in_bf16: bool, in_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the requested fusion; on a CPU it has no effect."""
    model, images = low_model()
    calls: list[tuple[str, bool]] = []
    for product in (Matmul, Fp8Matmul):
        plain = product.activated

        def recorded(self: Any, *arguments: Any, fused: bool = False, plain: Any = plain) -> Any:
            calls.append((type(self).__name__, fused))
            return plain(self, *arguments, fused=fused)

        monkeypatch.setattr(product, "activated", recorded)
    inputs = calibrate(model, images) if low else None
    calls.clear()
    outputs(FastModel(model, EncoderPrecision(torch.float32, exact=exact, inputs=inputs, fused=fused)), images)
    high = ("Matmul", in_bf16 and exact)
    # The first block is not in fp8, nor is anything after selecting the token.
    assert calls == [high, ("Fp8Matmul", in_fp8) if low else high, high]


def test_the_precision_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EncoderPrecision().exact = True
