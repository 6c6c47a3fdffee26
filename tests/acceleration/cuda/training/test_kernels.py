"""The Triton kernels of the fused training path compared with plain torch: in Triton's interpreter, or on a GPU.

Triton is a dependency of the tests only, on Linux: torch brings it along where it is built for CUDA.
"""

import os
from types import SimpleNamespace

import pytest
import torch
from tests.support.peers import relative_error
from torch import Tensor

from vitrail.acceleration.cuda.training.gradients import gelu_gradient, joined_gradient
from vitrail.acceleration.cuda.training.short_attention import short_attention, short_attention_gradient
from vitrail.acceleration.planner import hardware_of

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
if not ON_GPU:
    # Read when a kernel is defined, so set before the import.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not available on this system")
from vitrail.acceleration.cuda.training import gradient_kernels, short_attention_kernels  # noqa: E402

# In NumPy, which interprets the kernels; an error in NumPy 2.4.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")
SIZES = [(1, 16), (5, 24), (33, 192), (7, 768), (2000, 40)]
# bf16 has 8 bits, and the interpreter truncates instead of rounding; sums differ only in their order.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8 if ON_GPU else 2**-6}


def rows(count: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, width, generator=generator) * 3 + 1).to(dtype)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradient_of_gelu_and_its_sum(size: tuple[int, int]) -> None:
    gradient, x = rows(*size, seed=1), rows(*size)
    expected, expected_sum = gelu_gradient(gradient, x)
    actual, actual_sum = gradient_kernels.gelu_gradient(gradient.to(DEVICE), x.to(DEVICE))
    # The terms of the polynomial cancel, which amplifies rounding: a GPU uses fused multiply-add.
    assert ((actual.cpu() - expected).abs() <= gradient.abs() * (2e-4 if ON_GPU else 1e-5) + 1e-5).all()
    assert torch.allclose(actual_sum.cpu(), actual.cpu().sum(dim=0), rtol=1e-4, atol=1e-3)
    assert actual_sum.shape == expected_sum.shape


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_concatenated_gradients(size: tuple[int, int]) -> None:
    parts = [rows(*size, seed=number) for number in range(3)]
    expected, expected_sum = joined_gradient(*parts)
    actual, actual_sum = gradient_kernels.joined_gradient(*(part.to(DEVICE) for part in parts))
    assert torch.equal(actual.cpu(), expected)
    assert torch.allclose(actual_sum.cpu(), expected_sum, rtol=1e-5, atol=1e-3)


FEW = [
    *((64, 3, 64), (1, 1, 16), (5, 2, 32), (50, 2, 64), (65, 1, 16), (70, 1, 128)),
    *((128, 1, 32), (160, 1, 64), (196, 1, 64), (197, 2, 64), (240, 1, 64), (257, 1, 64), (272, 1, 64)),
]
if ON_GPU:  # each is compiled separately, and may be miscompiled
    FEW += [(tokens, 2, 64) for tokens in (2, 17, 33, 49, 80, 81, 96, 101, 113, 129, 144, 145, 150, 161, 170, 177, 192)]
    FEW += [(tokens, 2, 64) for tokens in (193, 201, 208, 209, 224, 225, 250, 256, 258, 265)]
    FEW += [(64, 2, 16), (128, 2, 16), (97, 2, 32), (64, 2, 128), (65, 2, 128), (128, 2, 128)]
    FEW += [*((197, heads, 64) for heads in (3, 6, 12, 16)), (257, 16, 64), (64, 6, 64), (64, 12, 64), (50, 12, 64)]


# The interpreter cannot multiply bf16 matrices.
@pytest.mark.parametrize("dtype", TOLERANCE if ON_GPU else [torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "heads", "width"), FEW)
@pytest.mark.slow
def test_short_attention(tokens: int, heads: int, width: int, dtype: torch.dtype) -> None:
    if ON_GPU and dtype == torch.float32 and tokens * width > 64 * 64:
        pytest.skip("float32 is not used in training, and this size may exceed an SM's shared memory")
    if not hardware_of(DEVICE).short_attention:
        pytest.skip("these kernels are verified only on some GPUs and versions of Triton")
    generator = torch.Generator().manual_seed(0)
    images = 128 if ON_GPU else 3  # enough to keep all SMs busy
    qkv = torch.randn(images, tokens, 3 * heads * width, generator=generator).to(dtype)
    gradient = torch.randn(images, tokens, heads * width, generator=generator).to(dtype)
    # A GPU multiplies float32 in TF32, which has 11 bits; in bf16 both sides round the weights, and more.
    tolerance = 5 * (2**-10 if ON_GPU and dtype == torch.float32 else TOLERANCE[dtype])
    seen, lse = short_attention_kernels.short_attention(qkv.to(DEVICE), heads)
    assert (seen.dtype, lse.dtype) == (dtype, torch.float32)
    expected_seen, expected_totals = short_attention(qkv, heads)
    assert relative_error(seen.cpu().float(), expected_seen.float()) < tolerance
    assert relative_error(lse.cpu(), expected_totals) < tolerance
    actual, summed = short_attention_kernels.short_attention_gradient(
        gradient.to(DEVICE), qkv.to(DEVICE), seen, lse, heads
    )
    again = short_attention_kernels.short_attention_gradient(gradient.to(DEVICE), qkv.to(DEVICE), seen, lse, heads)
    assert torch.equal(again[0], actual)
    target, expected_sum = short_attention_gradient(gradient, qkv, expected_seen, expected_totals, heads)
    parts = zip(actual.cpu().chunk(3, dim=-1), target.chunk(3, dim=-1), strict=True)
    for number, (part, expected) in enumerate(parts):
        if tokens == 1 and number < 2:  # a single token attends only to itself, so query and key have no gradient
            assert part.abs().max() < (0.05 if dtype == torch.bfloat16 else 1e-2 if ON_GPU else 1e-5)
        else:
            assert relative_error(part.float(), expected.float()) < tolerance
    assert summed.dtype == torch.float32
    atol = 1e-2 if ON_GPU else 1e-3  # with many more images
    assert torch.allclose(summed.cpu(), actual.cpu().float().sum(dim=(0, 1)), rtol=1e-4, atol=atol)
    assert expected_sum.shape == summed.shape


def test_a_kernel_that_spills_is_refused() -> None:
    short_attention_kernels._check_compiled(SimpleNamespace(n_spills=0))
    with pytest.raises(RuntimeError, match="gradients may be wrong"):
        short_attention_kernels._check_compiled(SimpleNamespace(n_spills=3))


def test_too_many_tokens_are_refused() -> None:
    qkv = torch.randn(1, 273, 3 * 64)
    with pytest.raises(ValueError, match="273 tokens"):
        short_attention_kernels.short_attention(qkv.to(DEVICE), 1)
    with pytest.raises(ValueError, match="heads of width 24"):
        short_attention_kernels.short_attention_gradient(qkv, qkv[:, :3, :72].to(DEVICE), qkv, qkv, 1)


def test_short_attention_equals_attention() -> None:
    """In float32, compared with torch's attention and autograd, with peaked weights."""
    if not hardware_of(DEVICE).short_attention:
        pytest.skip("these kernels are verified only on some GPUs and versions of Triton")
    heads, width, tokens = 2, 64, 50 if ON_GPU else 197  # limited by shared memory in float32
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(1, tokens, 3 * heads * width, generator=generator)
    qkv[:, ::7] *= 3
    gradient = torch.randn(1, tokens, heads * width, generator=generator)
    seen, lse = short_attention_kernels.short_attention(qkv.to(DEVICE), heads)
    actual, _ = short_attention_kernels.short_attention_gradient(gradient.to(DEVICE), qkv.to(DEVICE), seen, lse, heads)
    inputs = qkv.requires_grad_()
    query, key, value = inputs.unflatten(-1, (3, heads, width)).permute(2, 0, 3, 1, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    expected.backward(gradient)
    # Scores reach 40, and their absolute error is the relative error of the weights: with TF32's 11 bits, or with 24.
    tolerance = 2**-5 if ON_GPU else 1e-5
    assert relative_error(seen.cpu(), expected.detach()) < tolerance
    for part, target in zip(actual.cpu().chunk(3, dim=-1), inputs.grad.chunk(3, dim=-1), strict=True):
        assert relative_error(part, target) < tolerance
