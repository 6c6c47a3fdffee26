"""The pool `patches`: logits for every patch, from one or several layers, against plain PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from tests.support.config_strategies import configs
from tests.support.peers import relative_error, scramble
from tests.support.tiny_models import KINDS, TINY
from torch import Tensor, nn

from vitrail.models.checks import per_token
from vitrail.models.config import ViTConfig
from vitrail.models.initialise import SCHEMES
from vitrail.models.stages import _FlopCounter, cost, stages
from vitrail.models.vit import ViT

SMALL: dict[str, Any] = {
    "image_size": (12, 20), "patch_size": 4, "width": 24, "depth": 3, "heads": 3, "classes": 5, "pool": "patches"
}  # fmt: skip
LAYERS = [(), (-1,), (0, 2), (0, 1, 2), (-2, -1)]
TOKENS: list[dict[str, Any]] = [
    {},
    {"registers": 2},
    {"class_token": "last", "registers": 3},
    {"class_token": "none"},
    {"class_token": "none", "registers": 1},
]
quick = settings(deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow])


def build(**fields: Any) -> ViT:
    model = ViT(ViTConfig(**{**SMALL, **fields}))
    scramble(model)
    return model


def reference(model: ViT, x: Tensor) -> Tensor:
    """Compute the logits patch by patch, from the tokens of each layer."""
    config = model.config
    layers = [layer % config.depth for layer in config.head_layers] or [config.depth - 1]
    tokens = model.trace(x, tokens=layers).tokens
    first = {"first": int(config.class_token == "first") + config.registers, "last": 0, "none": config.registers}
    rows, columns = config.grid
    result = []
    for patch in range(rows * columns):
        vectors = [tokens[layer][:, first[config.class_token] + patch] for layer in layers]
        for norm in (model.norm, model.fc_norm):
            if isinstance(norm, nn.LayerNorm):
                vectors = [F.layer_norm(v, (config.width,), norm.weight, norm.bias, config.norm_eps) for v in vectors]
        vector = torch.cat(vectors, dim=1)
        if config.representation:
            vector = torch.tanh(F.linear(vector, model.pre_logits.fc.weight, model.pre_logits.fc.bias))
        result.append(F.linear(vector, model.head.weight, model.head.bias))
    return torch.stack(result, dim=2).reshape(len(x), config.classes, rows, columns)


# ── the outputs ──


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("fields", TOKENS, ids=lambda fields: " ".join(f"{k}={v}" for k, v in fields.items()) or "cls")
def test_outputs_and_gradients_are_those_of_plain_torch(fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    model = build(**fields, head_layers=layers).double()
    assert model.head.weight.shape == (5, 24 * max(1, len(layers)))
    x = torch.randn(2, 3, 12, 20, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 5, 3, 5, dtype=torch.float64)
    actual, expected = model(x), reference(model, x)
    assert actual.shape == (2, 5, 3, 5)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.trace(x).logits, expected, rtol=1e-12, atol=1e-12)
    inputs = [x, *model.parameters()]
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (actual, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])


@quick
@given(configs(pool="patches", classes=5))
def test_every_config(config: ViTConfig) -> None:
    assert_reference(config)


@pytest.mark.slow
@settings(quick, max_examples=500)
@given(configs(pool="patches", classes=5))
def test_every_config_slow(config: ViTConfig) -> None:
    assert_reference(config)


def assert_reference(config: ViTConfig) -> None:
    torch.manual_seed(0)
    model = scramble(ViT(config)).double()
    x = torch.randn(2, config.channels, *config.image_size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(model, x), rtol=1e-9, atol=1e-9)
    assert ViTConfig.from_json(config.to_json()) == config
    resolved = ViT(config.resolved()).double().eval()
    resolved.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(resolved(x), model(x))


def test_a_planted_patch_is_found_where_it_is() -> None:
    """Without attention between patches, the logits of a patch depend on its pixels only."""
    model = build(position="none", head_layers=(0, 2))
    for block in model.blocks:
        nn.init.zeros_(block.attn.proj.weight)
    x = torch.zeros(1, 3, 12, 20)
    x[:, :, 4:8, 12:16] = 1.0  # row 1, column 3
    difference = (model(x) - model(torch.zeros_like(x))).abs().sum(dim=1)[0]
    assert difference.nonzero().tolist() == [[1, 3]]


def test_a_resnet_gives_logits_for_its_feature_map() -> None:
    config = ViTConfig(**{**TINY, **KINDS["cnn"], "pool": "patches"})
    model = scramble(ViT(config))
    x = torch.randn(2, 3, 16, 32)
    with torch.no_grad():
        grid = model.features(x, as_grid=True).tokens
        expected = F.conv2d(grid, model.head.weight[:, :, None, None], model.head.bias)
        assert relative_error(model(x), expected) < 1e-5


# ── the methods of the model ──


def test_features_are_the_input_of_the_head() -> None:
    model, x = build(head_layers=(0, 2), registers=1), torch.randn(2, 3, 12, 20)
    features = model.features(x)
    assert (features.pooled.shape, features.tokens.shape) == ((2, 15, 48), (2, 17, 24))
    assert torch.equal(model.head(features.pooled).transpose(1, 2).unflatten(2, (3, 5)), model(x))
    assert torch.equal(features.pooled[..., 24:], features.tokens[:, 2:])
    for layer in (0, 2):
        alone = model.features(x, layer=layer)
        assert torch.equal(alone.pooled, alone.tokens[:, 2:])
    assert torch.equal(model.features(x, layer=0).pooled, features.pooled[..., :24])
    assert model.features(x, as_grid=True).tokens.shape == (2, 24, 3, 5)
    model.reset_head(0)
    assert torch.equal(model(x), features.pooled)


def test_a_new_head_and_another_size() -> None:
    model = build(head_layers=(0, -1))
    model.reset_head(7)
    assert (model.head.weight.shape, model(torch.randn(1, 3, 12, 20)).shape) == ((7, 48), (1, 7, 3, 5))
    head = model.head
    model.resize((24, 8))
    assert model(torch.randn(1, 3, 24, 8)).shape == (1, 7, 6, 2)
    assert model.head is head


def test_deeper_models_keep_layers_from_the_end() -> None:
    config = ViTConfig(**SMALL, head_layers=(-2, -1))
    assert (config.layers_read, config.replace(depth=12).layers_read) == ((1, 2), (10, 11))
    assert config.resolved().head_layers == (1, 2)
    assert ViTConfig(**SMALL).resolved().head_layers == ()
    assert ViTConfig(**SMALL).layers_read == (2,)


def test_gradient_checkpointing_changes_nothing() -> None:
    model, x = (
        build(head_layers=(0, 1, 2), attention_dropout=0.3, stochastic_depth=0.3).train(),
        torch.randn(2, 3, 12, 20),
    )
    results = []
    for switch in (False, True):
        model.gradient_checkpointing = switch
        torch.manual_seed(1)
        results.append(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize("init", SCHEMES)
def test_the_head_is_initialised(init: Any) -> None:
    head = ViT(ViTConfig(**SMALL, head_layers=(0, 1, 2), init=init)).head
    assert (head.weight.abs().max() == 0) == (init in ("paper", "torchvision"))
    if init == "lucidrains":  # torch's default, by the number of inputs
        assert 0.9 * 72**-0.5 < head.weight.abs().max() <= 72**-0.5


@pytest.mark.parametrize("layers", [(), (1, 4), (0, 1, 2, 3, 4)], ids=str)
def test_the_cost_is_that_of_all_layers(layers: tuple[int, ...]) -> None:
    config = ViTConfig(**{**SMALL, "depth": 5, "head_layers": layers})
    with torch.device("meta"):
        model, x = ViT(config).eval().to("meta"), torch.empty(1, 3, 12, 20)
    with torch.no_grad(), (counter := _FlopCounter()):
        model(x)
    spent = cost(config)
    assert spent.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert spent.flops == counter.total


def test_stages() -> None:
    named = {stage.name: stage for stage in stages(build(head_layers=(0, -1)), torch.zeros(1, 3, 12, 20))}
    assert named["pooled"].shape == (1, 15, 48)
    assert named["pooled"].meaning == "every patch, after layers 0, 2"
    assert named["logits"].shape == (1, 5, 3, 5)
    assert named["logits"].meaning == "a score for each of 5 classes in each patch"


def test_it_does_not_classify_images() -> None:
    assert "logits for each of its 15 patches (pool = 'patches'), not for the image; pool=cls" in per_token(
        ViTConfig(**SMALL)
    )
    assert "reads one vector per image" in per_token(ViTConfig(**SMALL, head_layers=(0, 2)))
    assert per_token(ViTConfig(**{**SMALL, "classes": 0})) == ""


# ── torch.compile and torch.export ──

DENSE = ("patches", "patches_of_layers")


def dense(kind: str) -> nn.Module:
    return scramble(ViT(ViTConfig(**{**TINY, **KINDS[kind]})))


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph(kind: str, backend: str) -> None:
    torch.compiler.reset()
    model, x = dense(kind), torch.randn(2, 3, 16, 32)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert relative_error(compiled(x), model(x)) < 1e-5
    model.train()
    gradients = [torch.autograd.grad(each(x).square().sum(), list(model.parameters())) for each in (compiled, model)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", DENSE)
def test_export_with_a_dynamic_batch(kind: str) -> None:
    model = dense(kind)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.randn(3, 3, 16, 32),), dynamic_shapes={"x": {0: batch}})
    for count in (1, 2, 7):
        x = torch.randn(count, 3, 16, 32)
        with torch.no_grad():
            assert relative_error(program.module()(x), model(x)) < 1e-5
