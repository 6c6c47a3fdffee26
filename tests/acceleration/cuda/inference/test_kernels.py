"""The Triton kernels compared with plain torch: in Triton's interpreter, or on a CUDA device.

Triton is a dependency of the tests only, on Linux: torch brings it along where it is built for CUDA.
"""

import os

import pytest
import torch
from tests.support.peers import relative_error
from tests.support.tiny_models import KINDS, bundle, pixels
from torch import Tensor

from vitrail.acceleration.cuda.fp8 import matmul as fp8_matmul
from vitrail.acceleration.cuda.fp8.calibration import calibrate
from vitrail.acceleration.cuda.fp8.quantisation import FP8, FP8_MAX, to_fp8
from vitrail.acceleration.cuda.inference import elementwise, encoder, matmul, model
from vitrail.acceleration.cuda.inference.elementwise import Form
from vitrail.acceleration.cuda.inference.encoder import EncoderPrecision
from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.acceleration.planner import unsupported_by_fused_encoder

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
if not ON_GPU:
    # Read when a kernel is defined, so set before the import.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not available on this system")
from vitrail.acceleration.cuda.inference import kernels  # noqa: E402

# The kernels rely on exp overflowing to infinity; NumPy, which interprets them, warns about it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # in the interpreter itself; an error in NumPy 2.4
]
FORMS: list[Form] = ["none", "gelu", "gelu_tanh", "quick_gelu", "relu"]
SIZES = [(1, 16), (5, 24), (33, 192), (7, 768)]
# bf16 has 8 bits, and the interpreter truncates instead of rounding; sums differ only in their order.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8 if ON_GPU else 2**-6}


def rows(count: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, width, generator=generator) * 3 + 1).to(dtype)


def same_but_for_one_step(actual: Tensor, expected: Tensor) -> bool:
    """Return whether fp8 values differ by at most one rounding step, and only a few of them."""
    target = expected.view(torch.uint8).int()
    steps = actual.cpu().view(torch.uint8).int() - target
    if not ON_GPU:
        # The interpreter does not carry when rounding up to a power of two, and flushes subnormals.
        steps = torch.where((steps == -8) | (steps == -7), 0, steps)[(target & 0b1111000) > 0b1000]
    return bool(steps.abs().max() <= 1) and float((steps != 0).float().mean()) < 0.02


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("branched", [False, True])
def test_norm(size: tuple[int, int], dtype: torch.dtype, shifted: bool, branched: bool) -> None:
    x, shift = rows(*size, dtype), rows(1, size[1], seed=1)[0] if shifted else None
    branch = rows(*size, dtype, seed=2) if branched else None
    on_device = [None if inputs is None else inputs.clone().to(DEVICE) for inputs in (x, shift, branch)]
    expected = elementwise.norm(x, 1e-6, shift=shift, branch=branch)
    actual = kernels.norm(on_device[0], 1e-6, shift=on_device[1], branch=on_device[2])
    assert actual.dtype == dtype
    assert relative_error(actual.cpu().float(), expected.float()) < TOLERANCE[dtype]
    if dtype == torch.float32 or ON_GPU or not branched:  # the stream changes only by the branch
        assert torch.equal(on_device[0].cpu(), x)


@pytest.mark.parametrize("branched", [False, True])
def test_norm_to_fp8(branched: bool) -> None:
    x, branch = rows(33, 192), rows(33, 192, seed=2) if branched else None
    largest = float(elementwise.norm(x.clone(), 1e-6, branch=branch).abs().max())
    for scale in (largest / FP8_MAX, largest / FP8_MAX / 4):  # with the second, many saturate
        expected = elementwise.norm(x.clone(), 1e-6, branch=branch, scale=scale)
        actual = kernels.norm(
            x.clone().to(DEVICE), 1e-6, branch=None if branch is None else branch.to(DEVICE), scale=scale
        )
        assert actual.dtype == FP8
        assert same_but_for_one_step(actual, expected)


def test_norm_of_rows_far_from_zero() -> None:
    """The variance is computed after subtracting the mean."""
    x = rows(4, 768) + 1000
    expected = torch.nn.functional.layer_norm(x.double(), (768,), eps=1e-6)
    assert relative_error(kernels.norm(x.to(DEVICE), 1e-6).cpu().double(), expected) < 1e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_activate(form: Form, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-30, 30, 5001), torch.tensor([-1e4, 1e4, 0.0])]).to(dtype)
    inputs = x.clone().to(DEVICE)
    actual = kernels.activate(inputs, form)
    assert actual.data_ptr() == inputs.data_ptr()
    expected = elementwise.activate(x.double(), form)
    assert torch.allclose(actual.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_the_fast_gelu_is_accurate_for_small_values() -> None:
    x = torch.linspace(-4, 0, 4001)[:-1]
    expected = torch.nn.functional.gelu(x.double())
    actual = kernels.activate(x.clone().to(DEVICE), "gelu").cpu().double()
    assert float((actual - expected).abs().max()) < 3e-7
    assert float(((actual - expected) / expected).abs().max()) < 2e-3


@pytest.mark.parametrize("form", FORMS)
def test_activate_to_fp8(form: Form) -> None:
    x = rows(9, 1000)
    result = kernels.activate(x.to(DEVICE), form, scale=0.05)
    assert same_but_for_one_step(result, elementwise.activate(x, form, scale=0.05))


def images_of(layout: str, channels: int, size: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, channels, *size, generator=generator)
    match layout:
        case "channels last":
            return x.contiguous(memory_format=torch.channels_last)
        case "a part":
            return torch.randn(5, channels + 1, size[0] + 1, size[1] + 3, generator=generator)[1:4, 1:, 1:, 3:]
        case "one for all":
            return x[:1].expand(3, -1, -1, -1)
    return x


@pytest.mark.parametrize("layout", ["usual", "channels last", "a part", "one for all"])
@pytest.mark.parametrize(
    ("patch", "channels", "size"), [((4, 4), 3, (16, 24)), ((3, 5), 1, (12, 10)), ((8, 16), 4, (8, 32))], ids=str
)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (0, 3), (5, 2)])
def test_cut_patches(
    layout: str, patch: tuple[int, int], channels: int, size: tuple[int, int], before: int, after: int
) -> None:
    x = images_of(layout, channels, size)
    expected = elementwise.cut_patches(x, patch, torch.float32, before=before, after=after)
    actual = kernels.cut_patches(x.to(DEVICE), patch, torch.float32, before=before, after=after)
    assert torch.equal(actual.cpu(), expected)
    assert not expected[:, :before].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", TOLERANCE, ids=str)
def test_patches_are_cast_as_they_are_cut(dtype: torch.dtype, target: torch.dtype) -> None:
    x = images_of("usual", 3, (16, 16)).to(dtype)
    expected = elementwise.cut_patches(x, (8, 8), target, before=1)
    actual = kernels.cut_patches(x.to(DEVICE), (8, 8), target, before=1)
    assert actual.dtype == expected.dtype == target
    assert relative_error(actual.cpu().float(), expected.float()) <= TOLERANCE[target]


@pytest.mark.parametrize("size", [(1, 1, 16), (3, 5, 24), (2, 65, 192)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_add_table(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, table = rows(size[0] * size[1], size[2], dtype).view(size), rows(*size[1:], seed=1)
    inputs = tokens.clone().to(DEVICE)
    actual = kernels.add_table(inputs, table.to(DEVICE))
    assert actual.data_ptr() == inputs.data_ptr()
    expected = elementwise.add_table(tokens, table)
    assert relative_error(actual.cpu().float(), expected.float()) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", ["none", "gelu"])
@pytest.mark.parametrize("size", [(70, 48, 40), (32, 96, 64), (3, 16, 16)], ids=str)
def test_multiply(form: Form, size: tuple[int, int, int]) -> None:
    M, N, K = size
    dtype = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter cannot multiply bf16
    x, weight, bias = rows(M, K, dtype), rows(N, K, dtype, 1) / K**0.5, rows(1, N, dtype, 2)[0]
    tiling = {"BM": 32, "BN": 32, "BK": 32, "GROUP": 2}
    actual = kernels.multiply(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), form, tiling=tiling)
    expected = elementwise.activate(x.double() @ weight.double().t() + bias.double(), form)
    assert relative_error(actual.cpu().double(), expected) < TOLERANCE[dtype]
    low = kernels.multiply(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), form, scale=0.1, tiling=tiling)
    assert same_but_for_one_step(low, to_fp8(expected.float(), 0.1))


def take_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the fast encoder call the kernels, as on a GPU, for everything except matmuls."""
    for module in (encoder, matmul, fp8_matmul):
        monkeypatch.setattr(module, "activate", kernels.activate)
    monkeypatch.setattr(encoder, "norm", kernels.norm)
    monkeypatch.setattr(model, "cut_patches", kernels.cut_patches)
    monkeypatch.setattr(model, "add_table", kernels.add_table)


@pytest.mark.skipif(ON_GPU, reason="on a GPU the encoder takes the kernels by itself")
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not unsupported_by_fused_encoder(bundle(kind).model.config)]
)
@pytest.mark.parametrize("count", [1, 3])
def test_every_kind_of_model_with_the_kernels(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, except for the matmuls. Tests the memory layouts that the kernels rely on."""
    made = bundle(kind)
    images = made.preprocess.normalise(pixels(count, made.preprocess.channels))
    fast = FastModel(made.model, EncoderPrecision(torch.float32, exact=True))
    with torch.inference_mode():
        expected = fast(images)
        take_kernels(monkeypatch)
        assert relative_error(fast(images), expected) < 1e-5


@pytest.mark.skipif(ON_GPU, reason="on a GPU the encoder takes the kernels by itself")
@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("low", [False, True])
def test_the_encoder_with_the_kernels(pool: str, low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, except for the matmuls."""
    made = bundle("plain", width=32, heads=2, depth=3, pool=pool)
    images = made.preprocess.normalise(pixels(3))
    inputs = calibrate(made.model, images) if low else None
    fast = FastModel(made.model, EncoderPrecision(torch.float32, exact=True, inputs=inputs))
    with torch.inference_mode():
        expected = fast(images)
        take_kernels(monkeypatch)
        actual = fast(images)
    # In fp8 the interpreter halves values that are rounded up to a power of two.
    assert relative_error(actual, expected) < (0.3 if low else 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="the interpreter cannot multiply fp8")
def test_multiply_fp8() -> None:
    x, weight = to_fp8(rows(40, 64), 0.1), to_fp8(rows(48, 64, seed=1), 0.1)
    bias = rows(1, 48, torch.bfloat16, 2)[0]
    actual = kernels.multiply(
        x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), "gelu", sum_scale=0.001,
        tiling={"BM": 32, "BN": 32, "BK": 32, "GROUP": 2},
    )  # fmt: skip
    expected = elementwise.activate(x.double() @ weight.double().t() * 0.001 + bias.double(), "gelu")
    assert relative_error(actual.cpu().double(), expected) < TOLERANCE[torch.bfloat16]
