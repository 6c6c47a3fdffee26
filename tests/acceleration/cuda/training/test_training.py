"""The fused training path has the model's gradients, up to rounding in low precision."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tests.support.peers import relative_error
from tests.support.tiny_models import KINDS, bundle, pixels
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.acceleration import planner
from vitrail.acceleration.cuda.attention import for_training
from vitrail.acceleration.cuda.training.block import _MixedNorm, _MixedSum
from vitrail.acceleration.cuda.training.gradients import gelu_gradient, joined_gradient
from vitrail.acceleration.cuda.training.model import FusedTraining
from vitrail.acceleration.cuda.training.short_attention import short_attention, short_attention_gradient
from vitrail.acceleration.planner import Hardware, can_checkpoint, hardware_of, is_short, unsupported_by_fused_training
from vitrail.errors import ConfigError, InputError
from vitrail.models.vit import ViT

FUSED = [
    kind
    for kind in KINDS
    if not unsupported_by_fused_training(bundle(kind).model.config) and bundle(kind).model.config.classes
]


def model_and_batch(kind: str, **changes: Any) -> tuple[ViT, Tensor, Tensor]:
    made = bundle(kind, **changes)
    images = made.preprocess.normalise(pixels(6, made.preprocess.channels))
    return made.model.train(), images, torch.arange(6) % 5


def gradients(model: ViT, forward: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the logits and every gradient of a loss, with a fixed random seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    logits = forward(images)
    logits = logits.flatten(2).mean(dim=2) if logits.ndim == 4 else logits
    logits = logits if logits.ndim == 2 else logits.mean(dim=1)
    F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels).backward()
    result = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().clone(), **result}


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_scale": 0.5, "stochastic_depth": 0.4, "depth": 3, "qk_norm": True}],
    ids=["", "random"],
)
def test_every_gradient_is_the_models(kind: str, changes: dict[str, Any]) -> None:
    model, images, labels = model_and_batch(kind, **changes)
    model, images = model.double(), images.double()
    expected = gradients(model, model, images, labels)
    actual = gradients(model, FusedTraining(model), images, labels)
    assert set(actual) == set(expected) == {"logits", *(name for name, _ in model.named_parameters())}
    for name, value in expected.items():
        assert torch.allclose(actual[name], value, rtol=1e-9, atol=1e-12), name


def test_the_last_block_computes_one_token() -> None:
    model, images, _ = model_and_batch("plain")
    seen: list[int] = []
    for block in model.blocks:
        block.mlp.fc2.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    FusedTraining(model)(images)
    assert seen == [9, 1]


@pytest.mark.parametrize("option", ["attention_dropout", "proj_dropout", "mlp_dropout"])
def test_stochastic_depth_matches_the_model(option: str) -> None:
    model, images, _ = model_and_batch("plain", depth=1, **{option: 0.5})
    short = FusedTraining(model)
    assert not torch.equal(short(images), short(images))
    model.eval()
    assert torch.equal(short(images), short(images))


@pytest.mark.parametrize("kind", ["plain", "linear"])
def test_a_model_that_is_resized_afterwards(kind: str) -> None:
    model, images, _ = model_and_batch(kind)
    short = FusedTraining(model)
    model.resize((32, 32))
    images = torch.cat([images, images.flip(0)], dim=2)
    assert torch.allclose(short(images), model(images), atol=1e-5)
    assert short(images[:0]).shape == (0, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert short(images[:0]).shape == (0, 5)


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        ("rope", "rotary positions"),
        ("relative", "relative positions"),
        ("post_norm", "post-norm blocks"),
        ("patches_of_layers", "heads that read several layers"),
    ],
)
def test_unsupported_models_are_refused(kind: str, lacks: str) -> None:
    made = bundle("plain", norm_order="post") if kind == "post_norm" else bundle(kind)
    with pytest.raises(ConfigError, match=f"the fused path does not support {lacks}; train the model itself"):
        FusedTraining(made.model)


def test_images_of_another_size_are_refused() -> None:
    model, images, _ = model_and_batch("plain")
    with pytest.raises(InputError) as expected:
        model(images[:, :, :8])
    with pytest.raises(InputError) as actual:
        FusedTraining(model)(images[:, :, :8])
    assert str(actual.value) == str(expected.value)


def test_with_gradient_checkpointing() -> None:
    model, images, labels = model_and_batch("plain", stochastic_depth=0.4, depth=3)
    expected = gradients(model, FusedTraining(model), images, labels)
    model.gradient_checkpointing = True
    computed: list[int] = []
    for number, block in enumerate(model.blocks):
        block.mlp.fc2.register_forward_pre_hook(lambda *_, number=number: computed.append(number))
    actual = gradients(model, FusedTraining(model), images, labels)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert computed == [0, 1, 2, 2, 1, 0]  # recomputed in the backward pass


@pytest.mark.parametrize(
    ("kind", "activation"), [("plain", "gelu"), ("mean_of_all", "gelu"), ("plain", "swiglu"), ("plain", "relu")]
)
def test_under_autocast(kind: str, activation: str) -> None:
    """The stream and the parameter gradients are float32, and as accurate as autocast's."""
    model, images, labels = model_and_batch(kind, layer_scale=0.5, depth=3, activation=activation)
    exact = gradients(model.double(), model, images.double(), labels)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        usual = gradients(model, model, images, labels)
        streams: list[torch.dtype] = []
        behind = model.norm if kind == "plain" else model.fc_norm  # its input is the stream after the blocks
        behind.register_forward_hook(lambda _, inputs, __: streams.append(inputs[0].dtype))
        result = gradients(model, FusedTraining(model), images, labels)
    assert streams == [torch.float32]
    assert set(result) == set(exact)
    for name, value in exact.items():
        assert name == "logits" or result[name].dtype == torch.float32
        off, allowed = ((some[name].double() - value).norm() / value.norm() for some in (result, usual))
        assert off < 0.02 + 2 * allowed, name


def test_gradients_of_deep_models_are_as_accurate_as_autocasts() -> None:
    """Rounding the stream to bf16 in every block would increase the error of this head's gradients by 1.7×."""
    model, images, labels = model_and_batch("plain", depth=12)
    exact = gradients(model.double(), model, images.double(), labels)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        usual, result = (gradients(model, forward, images, labels) for forward in (model, FusedTraining(model)))

    def off(some: dict[str, Tensor], names: list[str]) -> float:
        squares = sum((some[name].double() - exact[name]).square().sum() for name in names)
        return float((squares / sum(exact[name].square().sum() for name in names)).sqrt())

    for part in ("head", "patch_embed", "pos_embed", "cls_token", "blocks"):
        names = [name for name in exact if name.startswith(part)]
        assert off(result, names) < 1.2 * off(usual, names), part


def test_the_stream_is_not_saved_for_backward() -> None:
    model, images, _ = model_and_batch("plain", depth=3)
    kept: list[Tensor] = []

    def keep(some: Tensor) -> Tensor:
        kept.append(some)
        return some

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda some: some), torch.autocast("cpu", torch.bfloat16):
        FusedTraining(model)(images)
    tokens = [some.dtype for some in kept if some.shape == (6, 9, model.config.width)]
    assert tokens
    assert set(tokens) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("every_block", {}),
        ("no_position", {}),
        ("plain", {"patch_dropout": 0.3}),
        ("mean_of_all", {"layer_scale": 0.5}),
    ],
)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_kinds_under_autocast(kind: str, changes: dict[str, Any], low: torch.dtype) -> None:
    model, images, labels = model_and_batch(kind, depth=3, **changes)
    with torch.autocast("cpu", low):
        usual, result = (gradients(model, forward, images, labels) for forward in (model, FusedTraining(model)))
    exact = gradients(model, model, images, labels)
    off, allowed = (
        sum(((some[name] - value).norm() / value.norm()).item() for name, value in exact.items())
        for some in (result, usual)
    )
    assert off < 1.5 * allowed


def test_without_autocast_in_bf16() -> None:
    model, images, _ = model_and_batch("plain")
    low = model.bfloat16()(images.bfloat16())
    result = FusedTraining(model)(images.bfloat16())
    assert result.dtype == low.dtype == torch.bfloat16
    assert relative_error(result.detach().float(), low.detach().float()) < 0.03
    result.sum().backward()


@pytest.mark.parametrize(
    "frozen", [("patch_embed", "pos_embed", "cls_token", "blocks.0."), ()], ids=["a stem", "nothing"]
)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpointing_under_autocast(frozen: tuple[str, ...], compiled: bool) -> None:
    """Recomputation in the backward pass, outside autocast, gives the same values."""
    torch.compiler.reset()
    model, images, labels = model_and_batch("plain", depth=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen or "nothing"))
    results = []
    for again in (False, True):
        model.gradient_checkpointing = again
        forward: Any = FusedTraining(model)
        if compiled and again:
            forward = torch.compile(forward, fullgraph=True, backend="aot_eager")
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(forward(images).float(), labels)
        loss.backward()
        results.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert set(results[0]) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(
        torch.allclose(results[1][name], value, atol=1e-2 * value.abs().max()) for name, value in results[0].items()
    )


@pytest.mark.skipif(not can_checkpoint(), reason="torch 2.11's compiler keeps it all, so training takes another path")
@pytest.mark.slow
def test_compiled_checkpointing_saves_no_more_than_the_models() -> None:
    """Only the inputs of the blocks are saved."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    parted = aot_autograd(  # the compiler without code generation
        fw_compiler=lambda graph, _: graph.forward, bw_compiler=lambda graph, _: graph.forward,
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    made = bundle("plain", depth=4)
    model, images = made.model.train(), made.preprocess.normalise(pixels(64))
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    model.gradient_checkpointing = True
    kept: list[int] = []
    for forward in (model, FusedTraining(model)):
        torch.compiler.reset()
        compiled = torch.compile(forward, fullgraph=True, backend=parted)
        tensors: dict[int, Tensor] = {}  # one may be saved twice

        def keep(tensor: Tensor, into: dict[int, Tensor] = tensors) -> Tensor:
            into[tensor.data_ptr()] = tensor
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            compiled(images)
        kept.append(sum(t.numel() * t.element_size() for at, t in tensors.items() if at not in parameters))
    torch.compiler.reset()
    assert 0 < kept[1] <= kept[0]


def test_losses_match_the_models() -> None:
    """Over some steps in bf16, losses stay as close to float32 as autocast's."""
    losses: dict[str, list[float]] = {}
    for way in ("exact", "autocast", "hastened"):
        model, images, labels = model_and_batch("plain", depth=3)
        forward: nn.Module = FusedTraining(model) if way == "hastened" else model
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        losses[way] = []
        for _ in range(12):
            with torch.autocast("cpu", torch.bfloat16, enabled=way != "exact"):
                logits = forward(images)
            loss = F.cross_entropy(logits.float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[way].append(float(loss.detach()))
    exact, autocast, hastened = (torch.tensor(losses[way]) for way in ("exact", "autocast", "hastened"))
    assert exact[-1] < exact[0] / 2
    assert (hastened - exact).abs().max() < 0.03 + 2 * (autocast - exact).abs().max()


def test_frozen_parameters_get_no_gradient() -> None:
    model, images, labels = model_and_batch("plain")
    for part in (model.head, model.blocks[0].norm1, model.blocks[1].mlp.fc1, model.blocks[1].attn.qkv.bias):
        part.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        result = gradients(model, FusedTraining(model), images, labels)
    assert set(result) == {"logits", *(name for name, p in model.named_parameters() if p.requires_grad)}


@pytest.mark.slow
def test_it_compiles_into_one_graph() -> None:
    torch.compiler.reset()
    model, images, labels = model_and_batch("plain")
    expected = gradients(model, FusedTraining(model), images, labels)
    compiled = torch.compile(FusedTraining(model), fullgraph=True, backend="aot_eager")
    actual = gradients(model, compiled, images, labels)
    assert all(torch.allclose(actual[name], value, atol=1e-5) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
def test_the_kinds_that_compile(low: bool) -> None:
    torch.compiler.reset()
    model, images, labels = model_and_batch("mean_of_all", stochastic_depth=0.3)
    compiled = torch.compile(FusedTraining(model), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        expected = gradients(model, FusedTraining(model), images, labels)
        actual = gradients(model, compiled, images, labels)
    assert all(torch.allclose(actual[name], value, atol=1e-2 if low else 1e-5) for name, value in expected.items())


def test_which_models_can_be_fused() -> None:
    assert {"rope", "relative", "conv_stem", "cnn", "patches_of_layers"} == {
        kind for kind in KINDS if unsupported_by_fused_training(bundle(kind).model.config)
    }


@pytest.mark.parametrize(
    ("queries", "keys", "trusted"),
    [(197, 197, True), (65, 65, True), (64, 64, False), (192, 192, False), (128, 128, False), (1, 197, False)],
)
def test_cudnn_is_excluded_for_faulty_lengths(queries: int, keys: int, trusted: bool) -> None:
    result = for_training(queries, keys)
    assert (SDPBackend.CUDNN_ATTENTION in result) == trusted
    assert {SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH} <= set(result)


def test_every_block_chooses_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the caller has set one: the choice is part of the compiled graph."""
    calls: list[tuple[int, int]] = []
    inside: list[bool] = []

    def chosen(queries: int, keys: int) -> list[SDPBackend]:
        calls.append((queries, keys))
        return [SDPBackend.MATH]

    def attend(*args: Any, **options: Any) -> Tensor:
        inside.append(torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled())
        return attention(*args, **options)

    attention = F.scaled_dot_product_attention
    monkeypatch.setattr("vitrail.acceleration.cuda.training.block.for_training", chosen)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    model, images, _ = model_and_batch("plain", depth=3)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        FusedTraining(model)(images)
    assert calls == [(9, 9), (9, 9), (1, 9)]
    assert inside == [True] * 3


# ── autograd functions ──


@pytest.mark.parametrize("along", [0.0, 3.0], ids=["noise", "along the output"])
def test_the_gradient_of_a_norm_needs_only_its_output(along: float) -> None:
    x = (5 + 3 * torch.randn(4, 7, 64)).requires_grad_()
    exact = x.detach().double().requires_grad_()
    expected = F.layer_norm(exact, (64,), eps=1e-6)
    gradient = (torch.randn(4, 7, 64) + along * expected.detach().float()).bfloat16()
    expected.backward(gradient.double())
    kept: list[Tensor] = []

    def keep(some: Tensor) -> Tensor:
        kept.append(some)
        return some

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda some: some):
        actual = _MixedNorm.apply(x, 1e-6)
    actual.backward(gradient)
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual.detach(), expected.detach()) < 2**-8
    assert relative_error(x.grad, exact.grad) < 2**-9 * (1 + 3 * along)
    assert {tuple(some.shape): some.dtype for some in kept} == {(4, 7, 64): torch.bfloat16, (4, 7, 1): torch.float32}


@pytest.mark.parametrize("branch", [torch.bfloat16, torch.float32])
def test_a_sum_is_exact_and_its_gradient_is_rounded_once(branch: torch.dtype) -> None:
    x, y = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8).to(branch).requires_grad_()
    summed, gradient = _MixedSum.apply(x, y), torch.randn(5, 8)
    assert torch.equal(summed, x + y.float())
    summed.backward(gradient)
    assert (x.grad.dtype, y.grad.dtype) == (torch.float32, branch)
    assert torch.equal(x.grad, gradient.bfloat16().float())
    assert torch.equal(y.grad.float(), x.grad)


def test_the_derivative_of_gelu() -> None:
    x = torch.linspace(-40, 40, 100_001)[:, None]
    exact = x.double().requires_grad_()
    F.gelu(exact).sum().backward()
    slope, summed = gelu_gradient(torch.ones_like(x), x)
    assert (slope - exact.grad).abs().max() < 2.5e-4
    assert torch.allclose(summed, slope.sum(dim=0), rtol=1e-4)
    far = torch.tensor([[-300.0, 300.0, float("nan")]])
    assert torch.allclose(gelu_gradient(torch.ones_like(far), far)[0][:, :2], torch.tensor([[0.0, 1.0]]), atol=1e-3)
    assert gelu_gradient(torch.ones_like(far), far)[0][:, 2].isnan().all()


def test_concatenated_gradients() -> None:
    parts = [torch.randn(7, 4) for _ in range(3)]
    joined, summed = joined_gradient(*parts)
    assert torch.equal(joined, torch.cat(parts, dim=1))
    assert torch.allclose(summed, joined.sum(dim=0))


def test_sums_over_many_tokens_are_in_float32() -> None:
    """In bf16 a sum of thousands would lose the last terms."""
    x = torch.rand(5000, 4).bfloat16()
    for rows, summed in (gelu_gradient(x, x), joined_gradient(x, x, x)):
        assert summed.dtype == torch.float32
        assert torch.allclose(summed.double(), rows.double().sum(dim=0), rtol=1e-5)


def test_the_custom_operators_pass_opcheck() -> None:
    x = torch.randn(6, 4, dtype=torch.bfloat16)
    torch.library.opcheck(gelu_gradient, (x, x.flip(0)))
    torch.library.opcheck(joined_gradient, (x, x.flip(0), x.flip(1)))


@pytest.mark.parametrize("turned", [0, 1])
def test_gradients_are_contiguous_for_any_strides(turned: int) -> None:
    """As the kernels write them; compiled code relies on it."""
    inputs = [torch.randn(6, 4, dtype=torch.bfloat16), torch.randn(6, 4, dtype=torch.bfloat16)]
    expected = gelu_gradient(*inputs)
    inputs[turned] = inputs[turned].t().contiguous().t()
    actual = gelu_gradient(*inputs)
    assert actual[0].is_contiguous()
    assert all(map(torch.equal, actual, expected))
    torch.library.opcheck(gelu_gradient, tuple(inputs))
    assert joined_gradient(*[inputs[turned]] * 3)[0].is_contiguous()


@pytest.mark.parametrize(("tokens", "heads", "width"), [(64, 3, 16), (1, 1, 8), (7, 2, 4)])
def test_short_attention_equals_attention(tokens: int, heads: int, width: int) -> None:
    qkv = torch.randn(2, tokens, 3 * heads * width, dtype=torch.float64).requires_grad_()
    query, key, value = qkv.unflatten(-1, (3, heads, width)).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    seen, lse = short_attention(qkv.detach(), heads)
    assert torch.allclose(seen, expected, atol=1e-6)  # weights are float32
    scores = query @ key.mT * width**-0.5
    assert torch.allclose(lse, scores.exp().sum(dim=-1).log2().float(), atol=1e-5)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    actual, summed = short_attention_gradient(gradient, qkv.detach(), seen, lse, heads)
    assert torch.allclose(actual, qkv.grad, atol=1e-6)
    assert summed.dtype == torch.float32
    assert torch.allclose(summed.double(), qkv.grad.sum(dim=(0, 1)), atol=1e-4)
    torch.library.opcheck(short_attention, (qkv.detach(), heads))
    torch.library.opcheck(short_attention_gradient, (gradient, qkv.detach(), seen, lse, heads))


def test_which_attention_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ((64, 64), (9, 16), (64, 24), (197, 64), (272, 64), (273, 64), (128, 128), (129, 128))
    assert [is_short(*case) for case in cases] == [True, True, False, True, True, False, True, False]
    monkeypatch.setattr("vitrail.acceleration.planner.MAX_SHORT", 64)
    assert [is_short(*case) for case in ((64, 64), (65, 64))] == [True, False]


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [((9, 0), "3.6.0", True), ((8, 0), "3.6.0", False), ((10, 0), "3.6.0", False), ((9, 0), "3.60.1", False)],
)
def test_where_short_attention_is_used(
    capability: tuple[int, int], version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where it was verified: on a Hopper GPU, and not on an AMD GPU with the same capability number."""
    triton = ModuleType("triton")
    triton.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(planner, "_kernel_error", lambda _: "")
    assert hardware_of(torch.device("cuda")).short_attention is expected
    monkeypatch.setattr(planner, "_kernel_error", lambda _: "no compiler")
    assert not hardware_of(torch.device("cuda")).short_attention
    monkeypatch.setattr(planner, "_kernel_error", lambda _: "")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not hardware_of(torch.device("cuda")).short_attention
    assert hardware_of(torch.device("cpu")).short_attention


def test_torch_attention_is_used_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.acceleration.cuda.training.model.hardware_of", lambda _: Hardware("cuda"))
    monkeypatch.setattr("vitrail.acceleration.cuda.training.block.is_short", lambda *_: True)
    monkeypatch.setattr("vitrail.acceleration.cuda.training.block.short_attention", lambda *_: pytest.fail("was taken"))
    model, images, _ = model_and_batch("plain")
    with torch.autocast("cpu", torch.bfloat16):
        FusedTraining(model)(images)


@pytest.mark.parametrize("kind", ["plain", "mean_of_all"])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"attention_dropout": 0.5}], ids=str)
def test_with_short_attention(kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are as accurate as autocast's; not used with QK norm or dropout."""
    taken: list[int] = []

    def short(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        taken.append(heads)
        return cast("tuple[Tensor, Tensor]", short_attention(qkv, heads))

    monkeypatch.setattr("vitrail.acceleration.cuda.training.block.is_short", lambda *_: True)
    monkeypatch.setattr("vitrail.acceleration.cuda.training.block.short_attention", short)
    model, images, labels = model_and_batch(kind, depth=3, **changes)
    with torch.autocast("cpu", torch.bfloat16):
        result = gradients(model, FusedTraining(model), images, labels)
        usual = gradients(model, model, images, labels)
    assert len(taken) == (0 if changes else 3 if kind == "mean_of_all" else 2)
    if "attention_dropout" in changes:  # the last block draws for one token only
        return
    exact = gradients(model.double(), model, images.double(), labels)
    assert set(result) == set(exact)
    for name, value in exact.items():
        assert name == "logits" or result[name].dtype == torch.float32
        if name.endswith("k_norm.bias"):  # added to all keys alike, it has no effect: its gradient is noise
            continue
        off, allowed = ((some[name].double() - value).norm() / value.norm() for some in (result, usual))
        assert off < 0.03 + 2 * allowed, name


@pytest.mark.slow
def test_short_attention_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.acceleration.cuda.training.block.is_short", lambda *_: True)
    torch.compiler.reset()
    model, images, labels = model_and_batch("mean_of_all")
    compiled = torch.compile(FusedTraining(model), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model, FusedTraining(model), images, labels)
        actual = gradients(model, compiled, images, labels)
    assert all(torch.allclose(actual[name], value, atol=1e-2) for name, value in expected.items())
