"""What training leaves out changes no gradient, and cast matrices beside the trained ones change no bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.acceleration.tiny import KINDS, bundle, pixels
from torch import Tensor, nn

from vitrail.acceleration.shadow import Shadow
from vitrail.acceleration.shortcut import Shortcut, can_shorten
from vitrail.errors import ConfigError
from vitrail.models.vit import ViT

SHORT = [kind for kind in KINDS if can_shorten(bundle(kind).model.config) and bundle(kind).model.config.classes]


def given(kind: str, **changes: Any) -> tuple[ViT, Tensor, Tensor]:
    made = bundle(kind, **changes)
    pictures = made.preprocess.normalise(pixels(6, made.preprocess.channels))
    return made.model.train(), pictures, torch.arange(6) % 5


def gradients(model: ViT, forward: Callable[[Tensor], Tensor], pictures: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the logits and every gradient of a loss, with what is random drawn from the same seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    logits = forward(pictures)
    F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().clone(), **found}


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_scale": 0.5, "stochastic_depth": 0.4, "depth": 3, "qk_norm": True}],
    ids=["", "random"],
)
def test_every_gradient_is_the_models(kind: str, changes: dict[str, Any]) -> None:
    model, pictures, labels = given(kind, **changes)
    model, pictures = model.double(), pictures.double()
    expected = gradients(model, model, pictures, labels)
    found = gradients(model, Shortcut(model), pictures, labels)
    assert set(found) == set(expected) == {"logits", *(name for name, _ in model.named_parameters())}
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


def test_the_last_block_thinks_about_one_token() -> None:
    model, pictures, _ = given("plain")
    seen: list[int] = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    Shortcut(model)(pictures)
    assert seen == [9, 1]


@pytest.mark.parametrize("rate", ["attention_dropout", "proj_dropout", "mlp_dropout"])
def test_the_last_block_drops_what_the_model_drops(rate: str) -> None:
    model, pictures, _ = given("plain", depth=1, **{rate: 0.5})
    short = Shortcut(model)
    assert not torch.equal(short(pictures), short(pictures))
    model.eval()
    assert torch.equal(short(pictures), short(pictures))


@pytest.mark.parametrize("kind", ["plain", "linear"])
def test_a_model_that_is_resized_afterwards(kind: str) -> None:
    model, pictures, _ = given(kind)
    short = Shortcut(model)
    model.resize((32, 32))
    pictures = torch.cat([pictures, pictures.flip(0)], dim=2)
    assert torch.allclose(short(pictures), model(pictures), atol=1e-5)
    assert short(pictures[:0]).shape == (0, 5)


@pytest.mark.parametrize("kind", ["rope", "relative", "conv_stem", "sincos", "distilled", "mean_of_all", "every_rate"])
def test_what_would_be_computed_wrongly_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="reads more than one token, or its blocks need all of them; train the model"):
        Shortcut(bundle(kind).model)


def test_with_gradient_checkpointing() -> None:
    model, pictures, labels = given("plain", stochastic_depth=0.4, depth=3)
    expected = gradients(model, Shortcut(model), pictures, labels)
    model.gradient_checkpointing = True
    found = gradients(model, Shortcut(model), pictures, labels)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_under_autocast_the_stream_is_low() -> None:
    model, pictures, labels = given("plain", layer_scale=0.5, depth=3)
    seen: set[torch.dtype] = set()
    for block in model.blocks:
        block.norm1.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
        block.norm2.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
    exact = gradients(model, model, pictures, labels)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, Shortcut(model), pictures, labels)
    assert seen == {torch.bfloat16}
    assert (found["logits"].float() - exact["logits"]).norm() / exact["logits"].norm() < 0.05


def test_it_compiles_into_one_graph() -> None:
    torch.compiler.reset()
    model, pictures, labels = given("plain")
    expected = gradients(model, Shortcut(model), pictures, labels)
    compiled = torch.compile(Shortcut(model), fullgraph=True, backend="aot_eager")
    found = gradients(model, compiled, pictures, labels)
    assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in expected.items())


def test_which_models_are_shortened() -> None:
    assert {"plain", "linear", "resnet", "every_block", "learned_2d", "no_position"} <= set(SHORT)
    for kind in ("rope", "relative", "conv_stem", "sincos", "distilled", "mean_of_all", "every_token", "every_rate"):
        assert kind not in SHORT


# ── cast matrices ──


def trained(
    model: ViT, pictures: Tensor, labels: Tensor, shadow: Shadow | None, micros: int, *, short: bool = False
) -> list[Tensor]:
    """Train for some steps under autocast; return the losses."""
    forward: nn.Module = shadow or model
    if short:
        forward = Shortcut(model if shadow is None else shadow.model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        for part, names in zip(pictures.chunk(micros), labels.chunk(micros), strict=True):
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16):
                logits = forward(part)
            loss = F.cross_entropy(logits.float(), names) / micros
            loss.backward()
            losses.append(loss.detach())
            if shadow is not None:
                shadow.gather()
        optimizer.step()
        if shadow is not None:
            shadow.refresh()
    return losses


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "resnet", "conv_stem", "sincos", "rope"])
def test_training_with_a_shadow_gives_the_bits_of_autocast(kind: str, micros: int) -> None:
    (plain, pictures, labels), (model, _, _) = given(kind, stochastic_depth=0.3), given(kind, stochastic_depth=0.3)
    expected = trained(plain, pictures, labels, None, micros)
    found = trained(model, pictures, labels, Shadow(model, torch.bfloat16), micros)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_both_together() -> None:
    (plain, pictures, labels), (model, _, _) = given("plain"), given("plain")
    expected = trained(plain, pictures, labels, None, 1, short=True)
    found = trained(model, pictures, labels, Shadow(model, torch.bfloat16), 1, short=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_a_shadow_holds_cast_matrices_and_the_models_own_rest() -> None:
    model, _, _ = given("plain")
    before = [id(parameter) for parameter in model.parameters()]
    shadow = Shadow(model, torch.bfloat16)
    for name, module in shadow.model.named_modules():
        own = model.get_submodule(name)
        for (leaf, cast), (_, master) in zip(
            module.named_parameters(recurse=False), own.named_parameters(recurse=False), strict=True
        ):
            if isinstance(module, nn.Linear | nn.Conv2d):
                assert cast.dtype == torch.bfloat16, (name, leaf)
                assert torch.equal(cast, master.bfloat16())
            else:
                assert cast is master, (name, leaf)
    assert [id(parameter) for parameter in model.parameters()] == before
    assert shadow.training


def test_what_is_frozen_stays_so() -> None:
    model, pictures, labels = given("plain")
    model.head.requires_grad_(False)
    trained(model, pictures, labels, shadow := Shadow(model, torch.bfloat16), 1)
    assert not shadow.model.head.weight.requires_grad
    assert model.head.weight.grad is None
