"""The model on a CUDA device. Run by hand with `make test-gpu`; CI has no GPU."""

from typing import Any

import pytest
import torch
from tests.support.peers import scramble
from tests.support.tiny_models import BASIC_KINDS, TINY

from vitrail.models.config import ViTConfig
from vitrail.models.variants import variant_config
from vitrail.models.vit import ViT
from vitrail.runtime import autocast, choose_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture
def _exact_float32() -> Any:
    """Disable TF32, which would round float32 matmul inputs to 10 bits."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("kind", BASIC_KINDS)
@pytest.mark.usefixtures("_exact_float32")
def test_the_same_outputs_as_on_the_cpu(kind: str) -> None:
    model, x = scramble(ViT(ViTConfig(**{**TINY, **BASIC_KINDS[kind]}))), torch.randn(4, 3, 16, 32)
    with torch.no_grad():
        expected = model(x)
        actual = model.cuda()(x.cuda())
    assert torch.allclose(actual.cpu(), expected, atol=1e-4)


@pytest.mark.parametrize("kind", BASIC_KINDS)
def test_training_step_in_bf16(kind: str) -> None:
    device = choose_device("cuda")
    model = ViT(ViTConfig(**{**TINY, **BASIC_KINDS[kind]}, init="timm")).to(device).train()
    with autocast(device, "bf16"):
        loss = model(torch.randn(4, 3, 16, 32, device=device)).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["plain", "rope", "relative", "every_rate"])
def test_compiled(kind: str) -> None:
    torch.compiler.reset()
    model = scramble(ViT(ViTConfig(**{**TINY, **BASIC_KINDS[kind]}))).cuda()
    x = torch.randn(4, 3, 16, 32, device="cuda")
    with torch.no_grad():
        assert torch.allclose(torch.compile(model, fullgraph=True)(x), model(x), atol=1e-2)


def test_resize_stays_on_the_device() -> None:
    model = ViT(variant_config("Ti/16").replace(position="rope_2d", depth=1)).cuda()
    model.resize(96, 8)
    model.reset_head(3)
    assert model(torch.randn(1, 3, 96, 96, device="cuda")).shape == (1, 3)


def test_tracing_one_layer_costs_the_memory_of_one_layer() -> None:
    """At 384 pixels, tracing one layer's attention must not take more memory in a deeper model."""
    peaks = []
    for depth in (4, 12):
        model = ViT(variant_config("vit_tiny_patch16_384").replace(depth=depth)).cuda().eval()
        x = torch.randn(1, 3, 384, 384, device="cuda")
        with torch.no_grad():
            model.trace(x, attention=(1,))
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model.trace(x, attention=(1,))
            peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.05 * peaks[0]
