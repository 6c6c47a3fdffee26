"""The fast encoder on a CUDA device. Run by hand with `make test-gpu`; CI has no GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.metrics import classified
from tests.support.peers import scramble
from torch import Tensor

import vitrail
from vitrail import Bundle, Preprocess, ViT, ViTConfig
from vitrail.acceleration.accelerate import Accelerated
from vitrail.acceleration.cuda.fp8.calibration import calibrate
from vitrail.acceleration.cuda.fp8.quantisation import observe, round_correlated, to_fp8
from vitrail.acceleration.cuda.graphs import SHAPES, CudaGraphs
from vitrail.acceleration.cuda.inference.encoder import MATMULS, EncoderPrecision
from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.acceleration.cuda.training.model import FusedTraining
from vitrail.acceleration.engine import CapturedModel, prepare
from vitrail.acceleration.planner import plan_of
from vitrail.data.sources.source import Arrays
from vitrail.errors import InputError
from vitrail.evaluation import evaluate_bundle
from vitrail.inference.features import ComputeOptions, FeatureRequest, gather
from vitrail.runtime import Precision, autocast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
SMALL: dict[str, Any] = {"image_size": 64, "patch_size": 16, "width": 128, "depth": 4, "heads": 2, "classes": 10}


def model_and_batch(batch: int = 8, **changes: Any) -> tuple[ViT, Tensor, Tensor]:
    """Return a model on the GPU, images, and the model's output in float64 on the CPU."""
    model = ViT(ViTConfig(**{**SMALL, **changes}))
    scramble(model)
    images = torch.randn(batch, 3, 64, 64)
    with torch.no_grad():
        exact = model.double()(images.double())
    return model.float().cuda(), images.cuda(), exact


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.cpu().double() - exact).norm() / exact.norm())


def plain_error(model: ViT, images: Tensor, exact: Tensor) -> float:
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        return error(model(images), exact)


@pytest.mark.parametrize("changes", [{}, {"pool": "mean"}, {"layer_scale": 0.5, "class_token": "last"}], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu"])
@pytest.mark.parametrize("exact_gelu", [False, True])
def test_bf16(changes: dict[str, Any], activation: str, exact_gelu: bool) -> None:
    model, images, exact = model_and_batch(**changes, activation=activation)
    fast = vitrail.accelerate(model, exact=exact_gelu)
    result = fast(images)
    assert isinstance(fast.model, FastModel)
    assert result.isfinite().all()
    assert error(result, exact) < 2 * plain_error(model, images, exact)
    assert torch.equal(fast(images), result)


def test_exact_gelu_fused_into_a_matmul() -> None:
    model, images, exact = model_and_batch()
    with torch.inference_mode():
        result = FastModel(model, EncoderPrecision(exact=True, fused=True))(images)
    assert error(result, exact) < 2 * plain_error(model, images, exact)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("position", ["learned_1d", "rope_2d"])  # the fused encoder, and autocast
def test_graphs_are_bit_identical(batch: int, position: str) -> None:
    model, images, _ = model_and_batch(batch, position=position)
    captured = vitrail.accelerate(model)
    plain = Accelerated(captured.model, images.device, graphs=False)
    for inputs in (images, images.flip(0), torch.randn_like(images)):
        assert torch.equal(captured(inputs), plain(inputs))
    assert captured.graphs is not None
    assert len(captured.graphs.captured) == 1


def test_an_output_is_not_overwritten_by_the_next_call() -> None:
    model, images, _ = model_and_batch()
    fast = vitrail.accelerate(model)
    first = fast(images)
    kept = first.clone()
    second = fast(images.flip(0))
    smaller = fast(images[:3])  # another graph, in the same memory
    torch.cuda.synchronize()
    assert torch.equal(first, kept)
    assert not torch.equal(second, first)
    assert len({output.data_ptr() for output in (first, second, smaller)}) == 3


def test_only_the_first_batch_sizes_are_captured() -> None:
    model, _, _ = model_and_batch()
    fast = vitrail.accelerate(model)
    images = torch.randn(SHAPES + 4, 3, 64, 64, device="cuda")
    outputs = {count: fast(images[:count]) for count in range(1, SHAPES + 5)}
    assert fast.graphs is not None
    assert [key.shape[0] for key in fast.graphs.captured] == list(range(1, SHAPES + 1))
    for count, expected in outputs.items():
        assert torch.equal(fast(images[:count]), expected)
    assert fast(images[:0]).shape == (0, 10)


def test_without_memory_for_a_graph_it_runs_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    model, images, _ = model_and_batch()
    fast = vitrail.accelerate(model)
    expected = fast(images)
    monkeypatch.setattr(CudaGraphs, "_capture", fail)
    small = fast(images[:2])
    monkeypatch.undo()
    assert torch.equal(Accelerated(fast.model, images.device, graphs=False)(images[:2]), small)
    assert torch.equal(fast(images), expected)
    fast(images[:4])
    assert fast.graphs is not None
    assert len(fast.graphs.captured) == 1  # further captures would fail too


def test_a_graph_that_does_not_fit_leaves_its_memory_to_the_batch() -> None:
    """There is memory for the output or for the graph's copy of the input, but not for both."""
    x = torch.zeros(2**27, device="cuda")  # 512 MiB
    graphs = CudaGraphs(lambda x: x + 1, x.device)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 3 * 2**28
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        assert graphs(x).sum() == len(x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not graphs.captured


def test_it_can_be_captured_by_the_caller() -> None:
    model, images, _ = model_and_batch()
    fast = vitrail.accelerate(model)
    expected, graph = fast(images), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = fast(images)
    graph.replay()
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(1, 3, 64, 64), "the model is on cuda:0, the images on cpu"),
        (torch.zeros(1, 3, 64, 32), "takes images of 64×64 pixels, found 64×32"),
        (torch.zeros(3, 64, 64), "found 3 axes"),
        ([[0.0]], "expected a tensor of images, found list"),
    ],
)
def test_wrong_images_raise_the_models_error(wrong: Any, message: str) -> None:
    model, images, _ = model_and_batch()
    fast = vitrail.accelerate(model)
    moved = isinstance(wrong, Tensor) and "images on cpu" not in message
    with pytest.raises(InputError, match=message):
        fast(wrong.cuda() if moved else wrong)
    with pytest.raises(InputError, match="expected normalised floating-point images"):
        fast(images.byte())
    assert fast(images).isfinite().all()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no fp8"
)
@pytest.mark.parametrize("weight_scales", ["tensor", "row"])
@pytest.mark.parametrize("low", [("qkv", "fc1", "fc2"), MATMULS], ids=len)
@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("fused", [None, False, True])
def test_fp8(weight_scales: str, low: tuple[str, ...], pool: str, fused: bool | None) -> None:
    """The GPU gives the same as plain torch on the CPU, up to the order of sums and bf16 rounding."""
    model, images, exact = model_and_batch(pool=pool)
    inputs = calibrate(model, images, low=frozenset(low))
    numbers = EncoderPrecision(inputs=inputs, low=frozenset(low), weight_scales=weight_scales, fused=fused)
    with torch.inference_mode():
        result = FastModel(model, numbers)(images)
        by_hand = FastModel(model.cpu(), numbers)(images.cpu())
    assert result.isfinite().all()
    assert error(result, exact) < 0.2
    assert error(result, exact) < 1.5 * error(by_hand, exact)


def test_weights_are_rounded_as_well_as_on_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4000, 8, generator=generator) @ torch.randn(8, 300, generator=generator)
    rows += 0.3 * torch.randn(4000, 300, generator=generator)
    weight = 20 * torch.randn(64, 300, generator=generator)
    known, known_here = observe(rows.cuda().bfloat16(), None).damped(), observe(rows, None).damped()
    assert known is not None
    assert known_here is not None
    result, here = round_correlated(weight.cuda(), known).cpu(), round_correlated(weight, known_here)
    right = (rows @ weight.t()).double()
    errors = [error(rows @ rounded.float().t(), right) for rounded in (result, here, to_fp8(weight, 1.0))]
    assert errors[0] < 1.05 * errors[1] < 0.5 * errors[2]


def test_fused_training() -> None:
    model, images, exact = model_and_batch()
    model.train()
    with torch.autocast("cuda", torch.bfloat16):
        logits = FusedTraining(model)(images)
    logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert error(logits.detach(), exact) < 3 * plain_error(model, images, exact)


# ── where the fast encoder is used ──


def test_engines_use_the_fast_encoder() -> None:
    model, _, _ = model_and_batch()
    rotary = ViT(ViTConfig(**SMALL, position="rope_2d")).cuda()
    assert isinstance(prepare(model, plan_of(model, "bf16")), FastModel)
    assert prepare(model, plan_of(model, "float32")) is model
    assert not isinstance(prepare(model, plan_of(model, "fp16")), FastModel)
    assert not isinstance(prepare(rotary, plan_of(rotary, "bf16")), FastModel)


def named(**changes: Any) -> Bundle:
    model = ViT(ViTConfig(**{**SMALL, **changes}))
    scramble(model)
    return Bundle(model, Preprocess(size=(64, 64)), tuple("0123456789"))


def noise(count: int = 70) -> Arrays:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 64, 64, 3), np.uint8)
    return Arrays(pixels, np.arange(count) % 10, tuple("0123456789"))


def test_evaluation() -> None:
    exact = classified(evaluate_bundle(named(), noise(), device="cuda", workers=0))
    result = classified(evaluate_bundle(named(), noise(), device="cuda", precision="bf16", workers=0))
    assert result.loss == pytest.approx(exact.loss, rel=0.02)


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("position", ["learned_1d", "rope_2d"])
def test_an_evaluation_runs_as_cuda_graphs(precision: Precision, position: str) -> None:
    model, images, _ = model_and_batch(8, position=position)
    model.eval()
    plan = plan_of(model, precision, "evaluate")
    assert plan.graphs
    prepared = prepare(model, plan)
    captured = CapturedModel(prepared, images.device, precision)
    with torch.inference_mode():
        for count in (8, 5, 8, 8):
            for _ in range(2):  # each in its own context, whose cache of cast weights is freed
                with autocast(images.device, precision):
                    result, expected = captured(images[:count]), prepared(images[:count])
                assert error(result, expected.cpu().double()) < 1e-2
    assert [key.shape[0] for key in captured.graphs.captured] == [8]


def test_a_graph_outlives_the_workspaces_of_cublas() -> None:
    """torch.compile frees them when it captures a training step; their memory then belongs to others."""
    model, images, _ = model_and_batch(64)
    prepared = prepare(model.eval(), plan_of(model, "bf16", "evaluate"))
    captured = CapturedModel(prepared, images.device, "bf16")
    with torch.inference_mode(), autocast(images.device, "bf16"):
        expected = captured(images)
        torch._C._cuda_clearCublasWorkspaces()
        others = [torch.zeros(2**22, device="cuda") for _ in range(64)]
        for _ in range(3):
            assert torch.equal(captured(images), expected)
    assert not any(other.any() for other in others)


@pytest.mark.parametrize(
    "feature_request",
    [
        FeatureRequest(),
        FeatureRequest("class"),
        FeatureRequest("patches", layer=1),
        FeatureRequest("patches", raw=True),
    ],
)
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_features(feature_request: FeatureRequest, pool: str) -> None:
    exact = gather(named(pool=pool), noise(), feature_request, ComputeOptions("cuda", workers=0)).features
    result = gather(
        named(pool=pool), noise(), feature_request, ComputeOptions("cuda", precision="bf16", workers=0)
    ).features
    assert result.shape == exact.shape
    assert error(torch.from_numpy(result), torch.from_numpy(exact).double()) < 0.03


@pytest.mark.parametrize("stem", ["conv", "linear_norm"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_images_of_any_floating_point_dtype(stem: str, precision: Any) -> None:
    model, images, exact = model_and_batch(stem=stem)
    fast = vitrail.accelerate(model, precision, calibration=images.double())
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert error(fast(images.to(dtype)), exact) < (0.05 if precision == "bf16" else 0.2)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_graphs_are_bit_identical_in_fp8(batch: int) -> None:
    model, images, _ = model_and_batch(batch)
    captured = vitrail.accelerate(model, "fp8", calibration=images)
    plain = Accelerated(captured.model, images.device, graphs=False)
    for inputs in (images, images.flip(0)):
        assert torch.equal(captured(inputs), plain(inputs))
