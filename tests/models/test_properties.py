"""Properties of every config, tested on random ones."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.config_strategies import configs
from tests.support.peers import scramble

from vitrail.models.config import ViTConfig
from vitrail.models.initialise import SCHEMES, role_of
from vitrail.models.position import METHODS, resample_grid, resample_kernel, resample_offsets
from vitrail.models.stems import patchify, unpatchify
from vitrail.models.vit import ViT

# Deterministic examples, so that only a code change can make a test fail; the slow tests try more.
quick = settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
far = settings(quick, max_examples=500)


def image(config: ViTConfig, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, config.channels, *config.image_size)


@quick
@given(configs())
def test_builds_runs_and_trains(config: ViTConfig) -> None:
    assert_learns(config)


@pytest.mark.slow
@far
@given(configs())
def test_builds_runs_and_trains_slow(config: ViTConfig) -> None:
    assert_learns(config)


def assert_learns(config: ViTConfig) -> None:
    """Forward and backward in training mode with random dropout rates: every gradient exists and is finite."""
    torch.manual_seed(0)
    model = ViT(config).train()
    out = model(image(config))
    outputs = config.classes or config.pooled_width
    kept = config.special_tokens + max(1, round(config.patches * (1 - config.patch_dropout)))
    shapes: dict[str, tuple[int, ...]] = {"none": (3, kept, outputs), "patches": (3, config.patches, outputs)}
    if config.pool == "patches" and config.classes:
        shapes["patches"] = (3, outputs, *config.grid)
    assert out.shape == shapes.get(config.pool, (3, outputs))
    assert out.isfinite().all()
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


# In such a small network all ReLU units may be inactive, so ReLU is excluded.
connected = st.sampled_from(["gelu", "gelu_tanh", "quick_gelu", "swiglu"]).flatmap(
    lambda activation: configs(init="timm", patch_dropout=0.0, activation=activation)
)


@quick
@given(connected)
def test_every_parameter_gets_a_gradient(config: ViTConfig) -> None:
    assert_every_parameter_matters(config)


@pytest.mark.slow
@far
@given(connected)
def test_every_parameter_gets_a_gradient_slow(config: ViTConfig) -> None:
    assert_every_parameter_matters(config)


def assert_every_parameter_matters(config: ViTConfig) -> None:
    """With random weights, a gradient of exactly zero would mean that the parameter is not connected."""
    torch.manual_seed(0)
    model = scramble(ViT(config))
    out = model(image(config))
    (out * torch.randn(out.shape)).sum().backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert {name for name in silent if not excused(name, config)} == set()


def excused(name: str, config: ViTConfig) -> bool:
    """Return whether a zero gradient is mathematically expected."""
    single = config.tokens == 1  # softmax over a single token is always 1
    attention = ("attn.q_norm", "attn.k_norm", "attn.rel_pos")
    if single and (any(part in name for part in attention) or "cls_token" in name):
        return True
    # Softmax ignores what is equal for all keys, such as the bias of the key norm without positions.
    if "k_norm.bias" in name:
        return True
    # Without a second patch there is no pair; and a class token does not depend on the last block's patches.
    if "rel_pos" in name:
        unread = config.pool == "cls" and name.startswith(f"blocks.{config.depth - 1}.")
        return config.patches == 1 or unread
    # The pool's query has a single key.
    one_key = (config.patches if config.pool_over == "patches" else config.tokens) == 1
    if config.pool == "map" and one_key and name.startswith(("attn_pool.latent", "attn_pool.q.")):
        return True
    # A LayerNorm over a single value returns its bias.
    if "norm_in" in name or "patch_embed.proj" in name:
        return config.stem == "linear_norm" and config.channels * config.patch_size[0] * config.patch_size[1] == 1
    return False


@quick
@given(configs())
def test_config_json_round_trip(config: ViTConfig) -> None:
    assert ViTConfig.from_json(config.to_json()) == config


@quick
@given(configs(), st.data())
def test_tracing_changes_nothing(config: ViTConfig, data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = scramble(ViT(config))
    x = image(config)
    layers = data.draw(st.lists(st.integers(0, config.depth - 1), unique=True))
    with torch.no_grad():
        plain, traced = model(x), model.trace(x, attention=layers, tokens=layers)
    assert (plain - traced.logits).abs().max() <= 1e-5 * max(1.0, float(plain.abs().max()))
    assert set(traced.attention) == set(traced.tokens) == set(layers)
    for weights in traced.attention.values():
        assert weights.shape == (3, config.heads, config.tokens, config.tokens)
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)


@quick
@given(configs(stem="conv"), st.data())
def test_resized_models_work(config: ViTConfig, data: st.DataObject) -> None:
    model = scramble(ViT(config))
    grid, patch = (data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5))) for _ in range(2))
    size = (grid[0] * patch[0], grid[1] * patch[1])
    model.resize(size, patch, method=data.draw(st.sampled_from(sorted(METHODS))))
    assert model.config == config.replace(image_size=size, patch_size=patch)
    fresh = ViT(model.config)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    assert {n: b.shape for n, b in model.named_buffers()} == {n: b.shape for n, b in fresh.named_buffers()}
    with torch.no_grad():
        assert model(image(model.config)).isfinite().all()


@quick
@given(configs())
def test_every_parameter_has_a_role_in_every_scheme(config: ViTConfig) -> None:
    with torch.device("meta"):
        names = [name for name, _ in ViT(config).named_parameters()]
    roles = {role_of(name) for name in names} - {"layer_scale"}
    assert all(roles <= set(scheme) for scheme in SCHEMES.values())


small = st.integers(1, 6)


@given(small, small, small, small, st.integers(1, 4), st.sampled_from(["chw", "hwc"]))
def test_patchify_and_unpatchify(rows: int, columns: int, h: int, w: int, channels: int, order: str) -> None:
    """Patch n is in row n // columns, and holds the same pixels as a slice of the image."""
    x = torch.randn(2, channels, rows * h, columns * w)
    patches = patchify(x, (h, w), order)
    assert torch.equal(unpatchify(patches, (rows, columns), (h, w), channels, order), x)
    for n in range(rows * columns):
        r, c = divmod(n, columns)
        piece = x[:, :, r * h : (r + 1) * h, c * w : (c + 1) * w]
        expected = piece if order == "chw" else piece.permute(0, 2, 3, 1)
        assert torch.equal(patches[:, n], expected.flatten(1))


@given(small, small, st.sampled_from(sorted(METHODS)))
def test_resampling_to_the_same_grid_is_the_identity(rows: int, columns: int, method: str) -> None:
    table = torch.randn(1, rows * columns, 5)
    assert resample_grid(table, (rows, columns), (rows, columns), method) is table
    kernel = torch.randn(4, 3, rows, columns)
    assert resample_kernel(kernel, (rows, columns)) is kernel
    offsets = torch.randn(2 * rows * columns - 1, 4)
    assert resample_offsets(offsets, (rows, columns), (rows, columns)) is offsets


@given(small, small, small, small, st.sampled_from(sorted(METHODS)))
def test_resampling_keeps_a_constant(rows: int, columns: int, to_rows: int, to_columns: int, method: str) -> None:
    """Every method gives weights that sum to 1."""
    table = torch.full((1, rows * columns, 3), 0.7)
    out = resample_grid(table, (rows, columns), (to_rows, to_columns), method)
    assert out.shape == (1, to_rows * to_columns, 3)
    assert torch.allclose(out, torch.tensor(0.7), atol=1e-5)


@given(small, small, st.integers(0, 6), st.integers(0, 6))
def test_an_enlarged_patch_gives_the_same_embedding(h: int, w: int, more_h: int, more_w: int) -> None:
    """FlexiViT's guarantee: resizing patch and kernel keeps the embedding."""
    patch, kernel, new = torch.randn(2, 3, h, w), torch.randn(5, 3, h, w), (h + more_h, w + more_w)
    larger = torch.nn.functional.interpolate(patch, new, mode="bilinear")
    before = torch.einsum("bchw,dchw->bd", patch, kernel)
    after = torch.einsum("bchw,dchw->bd", larger, resample_kernel(kernel, new))
    assert torch.allclose(before, after, atol=1e-4, rtol=1e-4)
