"""Each option, tested alone, has its intended effect: what an end-to-end comparison can miss."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from tests.support.peers import scramble
from torch import nn

from vitrail.models.config import ResNet, ViTConfig
from vitrail.models.position import METHODS, resample_grid
from vitrail.models.stages import cost
from vitrail.models.stems import ResNetBackbone
from vitrail.models.vit import ViT

TINY: dict[str, Any] = {"image_size": (12, 20), "patch_size": 4, "width": 24, "depth": 2, "heads": 3, "classes": 5}
POSITIONS = ["none", "learned_1d", "learned_2d", "relative", "sincos_2d", "rope_2d"]


def tiny(**fields: Any) -> ViT:
    model = ViT(ViTConfig(**{**TINY, **fields}))
    scramble(model)
    return model.eval()


def images() -> torch.Tensor:
    return torch.randn(4, 3, 12, 20)


@pytest.mark.parametrize("token", ["first", "last", "none"])
def test_tokens_follow_the_layout(token: Any) -> None:
    pool, distillation = ("mean", False) if token == "none" else ("cls", True)
    model = tiny(class_token=token, distillation_token=distillation, registers=2, position="none", pool=pool)
    with torch.no_grad():
        for number, parameter in ((1.0, model.cls_token), (2.0, model.dist_token), (3.0, model.reg_token)):
            if parameter is not None:
                parameter.fill_(number)
        tokens, _ = model.embed(images())
        patches = model.patch_embed(images())
    layout = model.config.layout
    assert (tokens[:, layout.registers] == 3).all()
    assert tokens[:, layout.registers].shape[1] == 2
    if distillation:
        assert (tokens[:, layout.class_token] == 1).all()
        assert (tokens[:, layout.distillation_token] == 2).all()
    assert tokens[:, layout.patches].shape == patches.shape


@pytest.mark.parametrize("token", ["first", "last"])
def test_each_head_reads_its_own_token(token: Any) -> None:
    model, x = tiny(class_token=token, distillation_token=True, registers=1), images()
    tokens, layout = model.features(x).tokens, model.config.layout
    by_class, by_distillation = model.distilled(x)
    assert torch.allclose(by_class, model.head(tokens[:, layout.class_token]), atol=1e-6)
    assert model.head_dist is not None
    assert torch.allclose(by_distillation, model.head_dist(tokens[:, layout.distillation_token]), atol=1e-6)


@pytest.mark.parametrize("token", ["first", "last", "none"])
@pytest.mark.parametrize("over", ["patches", "all"])
def test_mean_pooling_follows_pool_over(token: Any, over: Any) -> None:
    model = tiny(class_token=token, registers=2, pool="mean", pool_over=over)
    result = model.features(images())
    chosen = result.tokens[:, model.config.layout.patches] if over == "patches" else result.tokens
    assert torch.allclose(result.pooled, chosen.mean(1), atol=1e-6)


@pytest.mark.parametrize("over", ["patches", "all"])
def test_map_pooling_can_be_traced(over: Any) -> None:
    model = tiny(class_token="last", registers=2, pool="map", pool_over=over)
    result = model.trace(images())
    assert result.pooling is not None
    assert result.pooling.shape == (4, 3, 15 if over == "patches" else 18)
    assert torch.allclose(result.pooling.sum(-1), torch.ones(()), atol=1e-5)
    assert tiny().trace(images()).pooling is None
    pool = model.attn_pool
    assert pool is not None
    tokens = model.features(images()).tokens
    assert torch.allclose(pool.traced(tokens)[0], pool(tokens), atol=1e-5)


@pytest.mark.parametrize("token", ["first", "last", "none"])
@pytest.mark.parametrize("covers", ["patches", "class", "all"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_resize_carries_patches_and_keeps_the_rest(token: Any, covers: Any, method: Any) -> None:
    model = tiny(class_token=token, position_covers=covers, registers=2, pool="mean", position_at="every_block")
    old = [block.pos_embed.detach().clone() for block in model.blocks]
    model.resize((28, 16), method=method)
    for block, before in zip(model.blocks, old, strict=True):
        after = block.pos_embed
        special = before.shape[1] - 15
        if token == "last":
            kept, rows, carried = (before[:, 15:], after[:, 28:]), before[:, :15], after[:, :28]
        else:
            kept, rows, carried = (before[:, :special], after[:, :special]), before[:, special:], after[:, special:]
        assert torch.equal(*kept)
        assert torch.equal(carried, resample_grid(rows, (3, 5), (7, 4), method))


@pytest.mark.parametrize("rate", ["embed_dropout", "attention_dropout", "proj_dropout", "mlp_dropout"])
def test_each_dropout_acts_where_it_should(rate: str) -> None:
    """Each rate alone changes the output in training but not in evaluation; a rate near 1 stops its signal."""
    model, x = tiny(**{rate: 0.5}), images()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.allclose(model(x), model(x))
    nearly_all = tiny(**{rate: 0.999999}).train()
    block = nearly_all.blocks[0]
    tokens, places = nearly_all.embed(x)
    match rate:
        case "embed_dropout":
            assert (tokens == 0).float().mean() > 0.99
        case "attention_dropout":
            value = torch.zeros(24)
            assert torch.allclose(block.attn(tokens, places), block.attn.proj(value).expand(4, 16, 24), atol=1e-5)
        case "proj_dropout":
            assert (block.attn(tokens, places) == 0).float().mean() > 0.99
        case "mlp_dropout":
            assert (block.mlp(tokens) == 0).float().mean() > 0.99
            assert [block.mlp.drop1.p, block.mlp.drop2.p] == [0.999999, 0.999999]


def test_stochastic_depth_skips_both_branches() -> None:
    model = tiny(stochastic_depth=0.999999).train()
    tokens, places = model.embed(images())
    assert torch.equal(model.blocks[1](tokens, places), tokens)
    assert not torch.equal(model.blocks[0](tokens, places), tokens)


def test_patch_dropout_draws_for_each_image() -> None:
    _, places = tiny(patch_dropout=0.5).train().embed(images())
    assert places.kept is not None
    assert len({tuple(row.tolist()) for row in places.kept}) > 1


@pytest.mark.parametrize("stem", ["conv", "linear_norm"])
def test_every_layer_norm_has_the_eps_of_the_config(stem: Any) -> None:
    for fields in ({"pool": "map"}, {"final_norm": "after_pool"}):
        model = tiny(stem=stem, norm_eps=0.125, qk_norm=True, norm_before_blocks=True, **fields)
        norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
        assert len(norms) >= 2 * 4 + 2
        assert {norm.eps for norm in norms} == {0.125}


def test_gradient_checkpointing_recomputes_blocks() -> None:
    """If enabled, the backward pass runs every block again."""
    model, x = tiny().train(), images()
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for block in model.blocks:
        block.register_forward_pre_hook(count)
    model(x).sum().backward()
    assert calls == 2
    model.gradient_checkpointing = True
    model(x).sum().backward()
    assert calls == 2 + 4


def test_a_new_head_follows_the_init_scheme() -> None:
    model = tiny(init="paper")
    model.reset_head(7)
    assert not model.head.weight.any()
    assert not model.head.training
    assert {block.config.classes for block in model.blocks} == {7}
    model = tiny(init="timm")
    model.reset_head(700)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("stem", ["conv", "linear", "linear_norm", "conv_stem", "resnet"])
def test_cost_of_every_kind(position: Any, stem: Any) -> None:
    config = ViTConfig(image_size=32, patch_size=16, width=48, depth=3, heads=3, position=position, stem=stem)
    spent = cost(config)
    assert spent.parameters == sum(p.numel() for p in ViT(config).parameters())
    assert spent.flops > 2 * 3 * 12 * 48 * 48 * 5


@pytest.mark.parametrize("position", POSITIONS)
def test_to_empty_recomputes_buffers(position: Any) -> None:
    """After meta device, `to_empty` and loading weights, the computed buffers are restored."""
    model, x = tiny(position=position), images()
    with torch.device("meta"):
        empty = ViT(model.config)
    empty = empty.to_empty(device="cpu").eval()
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(x), model(x))


@pytest.mark.parametrize("position", POSITIONS)
def test_functional_calls(position: Any) -> None:
    """Per-sample gradients and ensembles call a model with other weights."""
    model, x = tiny(position=position), images()
    weights = {name: 0.5 * p.detach() for name, p in model.named_parameters()}
    result = torch.func.functional_call(model, weights, (x,))
    model.load_state_dict(weights, strict=False)
    assert torch.allclose(result, model(x), atol=1e-6)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu"])
def test_copies(activation: Any) -> None:
    model, x = tiny(activation=activation, position="rope_2d"), images()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x), model(x))
        assert twin.config == model.config


def test_attention_weights_are_exact_in_low_precision() -> None:
    model, x = tiny().to(torch.bfloat16), images().to(torch.bfloat16)
    weights = model.trace(x, attention=(0,)).attention[0]
    assert weights.dtype == torch.float32
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-6)


def test_a_failed_change_changes_nothing() -> None:
    model, x = tiny(), images()
    before = model(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.models.vit.resized_tables", _out_of_memory)
        with pytest.raises(MemoryError):
            model.resize(24, 6)
    assert torch.equal(model(x), before)
    assert model.config == ViTConfig(**TINY)


def _out_of_memory(*_: Any) -> None:
    raise MemoryError


def test_resolved_configs_mean_the_same() -> None:
    for fields in (
        {},
        {"stem": "conv_stem"},
        {"stem": "resnet", "patch_size": 16, "image_size": 32},
        {"position": "rope_2d"},
    ):
        config = ViTConfig(**{**TINY, **fields})
        resolved = config.resolved()
        assert resolved.head_dim is not None
        assert resolved.mlp_width is not None
        twin = ViT(resolved)
        twin.load_state_dict(ViT(config).state_dict())
        assert resolved.layout == config.layout


def test_googles_hybrid_against_a_plain_reference() -> None:
    """On a faint image the epsilons matter: StdConv's 1e-5 outside the square root, GroupNorm's 1e-6."""
    backbone = scramble(ResNetBackbone(3, ResNet(depths=(1, 1))))
    x = 1e-4 * torch.randn(2, 3, 32, 32)
    state = {name: tensor.double() for name, tensor in backbone.state_dict().items()}

    def conv(x: torch.Tensor, name: str, stride: int = 1) -> torch.Tensor:
        kernel = state[f"{name}.weight"]
        flat = kernel.flatten(1)
        kernel = (kernel - flat.mean(1)[:, None, None, None]) / (flat.std(1, correction=0)[:, None, None, None] + 1e-5)
        size, k = x.shape[-1], kernel.shape[-1]
        total = max(0, (-(-size // stride) - 1) * stride + k - size)
        x = nn.functional.pad(x, (total // 2, total - total // 2) * 2)
        return nn.functional.conv2d(x, kernel, stride=stride)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        B, C, H, W = x.shape
        groups = x.reshape(B, 32, -1)
        groups = (groups - groups.mean(2, keepdim=True)) / (groups.var(2, correction=0, keepdim=True) + 1e-6).sqrt()
        weight, bias = (state[f"{name}.{kind}"][:, None, None] for kind in ("weight", "bias"))
        normed: torch.Tensor = groups.reshape(B, C, H, W) * weight + bias
        return normed

    y = norm(conv(x.double(), "stem.conv", 2), "stem.norm").relu()
    y = nn.functional.max_pool2d(nn.functional.pad(y, (0, 1, 0, 1), value=float("-inf")), 3, 2)
    for stage, stride in ((0, 1), (1, 2)):
        unit = f"stages.{stage}.blocks.0"
        shortcut = norm(conv(y, f"{unit}.downsample.conv", stride), f"{unit}.downsample.norm")
        y = norm(conv(y, f"{unit}.conv1"), f"{unit}.norm1").relu()
        y = norm(conv(y, f"{unit}.conv2", stride), f"{unit}.norm2").relu()
        y = (norm(conv(y, f"{unit}.conv3"), f"{unit}.norm3") + shortcut).relu()
    result = backbone(x)
    assert (result - y).abs().max() <= 1e-4 * y.abs().max()
