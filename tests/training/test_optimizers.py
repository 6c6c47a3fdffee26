"""Weight decay, layer-wise learning rates, steps, clipping and freezing against their definitions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.config import ResNet, ViTConfig
from vitrail.models.vit import ViT
from vitrail.training.optimizers import (
    Optimizer,
    can_skip_step,
    clip_gradients,
    freeze,
    make_optimizer,
    parameter_groups,
    set_learning_rate,
    step_unless,
)
from vitrail.training.pretraining.mae import MaeSettings, MaskedAutoencoder


def small(**options: Any) -> ViT:
    fields = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "heads": 2, "classes": 3, "init": "timm"}
    return ViT(ViTConfig(**fields | options))


def names(model: nn.Module, group: str, config: Optimizer | None = None) -> set[str]:
    groups = parameter_groups(model, config or Optimizer(weight_decay=0.1))
    return {name for result in groups if result["name"] == group for name in result["param_names"]}


# ── weight decay ──

LINEAR = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
PLAIN_KERNELS = {"patch_embed.proj.weight", *(f"blocks.0.{layer}.weight" for layer in LINEAR), "head.weight"}
PLAIN_OTHERS = {
    "patch_embed.proj.bias",
    *(f"blocks.0.{layer}.bias" for layer in LINEAR),
    *(f"{norm}.{kind}" for norm in ("blocks.0.norm1", "blocks.0.norm2", "norm") for kind in ("weight", "bias")),
    "head.bias",
}
HYBRID = "patch_embed.backbone.stages.0.blocks.0"
POOL = ("attn_pool.q", "attn_pool.kv", "attn_pool.proj", "attn_pool.mlp.fc1", "attn_pool.mlp.fc2")


def both(*layers: str) -> set[str]:
    return {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


@pytest.mark.parametrize(
    ("options", "kernels", "others"),
    [
        ({}, set(), {"cls_token", "pos_embed"}),
        ({"registers": 2}, set(), {"cls_token", "pos_embed", "reg_token"}),
        (
            {"distillation_token": True},
            {"head_dist.weight"},
            {"cls_token", "pos_embed", "dist_token", "head_dist.bias"},
        ),
        ({"layer_scale": 1e-5}, set(), {"cls_token", "pos_embed", "blocks.0.ls1.gamma", "blocks.0.ls2.gamma"}),
        ({"qk_norm": True}, set(), {"cls_token", "pos_embed", *both("blocks.0.attn.q_norm", "blocks.0.attn.k_norm")}),
        ({"position": "learned_2d"}, set(), {"cls_token", "pos_embed_row", "pos_embed_col"}),
        ({"position": "relative"}, set(), {"cls_token", "blocks.0.attn.rel_pos"}),
        ({"position_at": "every_block"}, set(), {"cls_token", "blocks.0.pos_embed"}),
        ({"norm_before_blocks": True}, set(), {"cls_token", "pos_embed", *both("norm_pre")}),
        ({"representation": 4}, {"pre_logits.fc.weight"}, {"cls_token", "pos_embed", "pre_logits.fc.bias"}),
        (
            {"pool": "map", "class_token": "none"},
            {f"{layer}.weight" for layer in POOL},
            {"pos_embed", "attn_pool.latent", *both("attn_pool.norm"), *(f"{layer}.bias" for layer in POOL)},
        ),
        (
            {"stem": "conv_stem", "patch_size": 4},
            {f"patch_embed.backbone.{i}.conv.weight" for i in range(2)},
            {"cls_token", "pos_embed", *both(*(f"patch_embed.backbone.{i}.norm" for i in range(2)))},
        ),
        (
            {"stem": "resnet", "resnet": ResNet(depths=(1,), width_factor=0.5)},
            {
                "patch_embed.backbone.stem.conv.weight",
                f"{HYBRID}.downsample.conv.weight",
                *(f"{HYBRID}.conv{i}.weight" for i in (1, 2, 3)),
            },
            {
                "cls_token",
                "pos_embed",
                *both("patch_embed.backbone.stem.norm", f"{HYBRID}.downsample.norm"),
                *both(*(f"{HYBRID}.norm{i}" for i in (1, 2, 3))),
            },
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_only_kernels_decay(options: dict[str, Any], kernels: set[str], others: set[str]) -> None:
    model = small(**options)
    assert names(model, "decay") == PLAIN_KERNELS | kernels
    assert names(model, "no_decay") == PLAIN_OTHERS | others
    assert {name for name, _ in model.named_parameters()} == PLAIN_KERNELS | PLAIN_OTHERS | kernels | others
    decay = {group["name"]: group["weight_decay"] for group in parameter_groups(model, Optimizer(weight_decay=0.1))}
    assert decay == {"decay": 0.1, "no_decay": 0.0}


# ── layer-wise learning rate decay ──


def test_layer_decay_matches_beit() -> None:
    model = small(depth=3, registers=1, norm_before_blocks=True, pool="map", representation=4)
    groups = parameter_groups(model, Optimizer(layer_decay=0.5))
    scale = {name: group["lr_scale"] for group in groups for name in group["param_names"]}
    stem = ("patch_embed.proj.weight", "patch_embed.proj.bias", "cls_token", "reg_token", "pos_embed", "norm_pre.bias")
    assert {scale[name] for name in stem} == {0.5**4}
    for block in range(3):
        assert {scale[name] for name in scale if name.startswith(f"blocks.{block}.")} == {0.5 ** (3 - block)}
    rest = {
        name for name in scale if not name.startswith(("blocks.", "patch_embed.", "norm_pre.")) and name not in stem
    }
    assert {scale[name] for name in rest} == {1.0}
    assert {"head.weight", "norm.bias", "attn_pool.latent", "pre_logits.fc.weight"} <= rest
    assert [group["name"] for group in groups] == [
        f"{place}.{kind}"
        for place in ("stem", "blocks.0", "blocks.1", "blocks.2", "head")
        for kind in ("decay", "no_decay")
    ]


def test_a_bias_table_in_a_block_has_the_scale_of_its_block() -> None:
    groups = parameter_groups(small(depth=2, position_at="every_block"), Optimizer(layer_decay=0.1))
    scale = {name: group["lr_scale"] for group in groups for name in group["param_names"]}
    assert scale["blocks.0.pos_embed"] == pytest.approx(0.01)
    assert scale["blocks.1.pos_embed"] == pytest.approx(0.1)


def test_a_frozen_stem_does_not_change_the_scales() -> None:
    model = small(depth=3)
    freeze(model, ["patch_embed.*", "blocks.2.*"])
    groups = parameter_groups(model, Optimizer(layer_decay=0.5))
    scale = {name: group["lr_scale"] for group in groups for name in group["param_names"]}
    assert scale["cls_token"] == 0.5**4
    assert scale["blocks.0.mlp.fc1.weight"] == 0.5**3
    assert not any(name.startswith(("patch_embed", "blocks.2")) for name in scale)


def test_every_group_gets_its_scaled_learning_rate() -> None:
    optimizer = make_optimizer(small(depth=2), Optimizer(lr=0.3, layer_decay=0.5))
    assert [group["lr"] for group in optimizer.param_groups] == [
        pytest.approx(0.3 * scale) for scale in (0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 1, 1)
    ]
    set_learning_rate(optimizer, 0.8)
    assert [group["lr"] for group in optimizer.param_groups][::2] == [0.1, 0.2, 0.4, 0.8]


def test_groups_and_parameters_come_in_the_models_order() -> None:
    model = small(depth=2)
    order = [name for name, _ in model.named_parameters()]
    for group in parameter_groups(model, Optimizer()):
        assert group["param_names"] == sorted(group["param_names"], key=order.index)
        assert [id(model.get_parameter(name)) for name in group["param_names"]] == [id(p) for p in group["params"]]


# ── steps ──


def reference_step(
    config: Optimizer, weight: Tensor, gradient: Tensor, memory: dict[str, Tensor], t: int, lr: float, decay: float
) -> Tensor:
    """Return the weight after step t (from 1), by the papers' update rules in float64."""
    if config.kind == "sgd":
        gradient = gradient + decay * weight
        velocity = memory["v"] = gradient if t == 1 else config.momentum * memory["v"] + gradient
        return weight - lr * (gradient + config.momentum * velocity if config.nesterov else velocity)
    if config.kind == "adam":
        gradient = gradient + decay * weight
    else:
        weight = weight - lr * decay * weight
    beta1, beta2 = config.betas
    mean = memory["m"] = beta1 * memory.get("m", torch.zeros_like(weight)) + (1 - beta1) * gradient
    square = memory["s"] = beta2 * memory.get("s", torch.zeros_like(weight)) + (1 - beta2) * gradient**2
    return weight - lr * (mean / (1 - beta1**t)) / ((square / (1 - beta2**t)).sqrt() + config.eps)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize(
    "config",
    [
        Optimizer(kind="adamw", lr=0.01, weight_decay=0.3, betas=(0.8, 0.95), layer_decay=0.7),
        Optimizer(kind="adam", lr=0.01, weight_decay=0.1),
        Optimizer(kind="sgd", lr=0.1, weight_decay=0.05),
        Optimizer(kind="sgd", lr=0.1, weight_decay=0.05, momentum=0.5, nesterov=True),
        Optimizer(kind="sgd", lr=0.1, momentum=0.0),
    ],
    ids=lambda config: f"{config.kind}{'-nesterov' if config.nesterov else ''}" if config else None,
)
def test_steps_match_the_papers(config: Optimizer, fused: bool | None) -> None:
    model = small(depth=2)
    optimizer = make_optimizer(model, config, fused=fused)
    assert all(bool(group["fused"]) is (fused is None) for group in optimizer.param_groups)
    groups = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    memory: dict[str, dict[str, Tensor]] = {name: {} for name in expected}
    for t, rate in enumerate((0.01, 0.02, 0.005, 0.01), start=1):
        set_learning_rate(optimizer, rate)
        for name, parameter in model.named_parameters():
            # Not near 0, where Adam's quotient is dominated by rounding.
            parameter.grad = torch.randn_like(parameter).sign() * (0.1 + torch.rand_like(parameter))
            group = groups[name]
            expected[name] = reference_step(
                config,
                expected[name],
                parameter.grad.double(),
                memory[name],
                t,
                rate * group["lr_scale"],
                group["weight_decay"],
            )
        optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-6, atol=1e-6)


def test_a_missing_learning_rate_or_no_parameters_raises() -> None:
    model = small()
    with pytest.raises(ConfigError, match="no learning rate"):
        make_optimizer(model, Optimizer())
    freeze(model, ["*"])
    count = len(list(model.parameters()))
    with pytest.raises(ConfigError, match=f"all {count} parameters are frozen"):
        make_optimizer(model, Optimizer(lr=0.1))


def test_fused_only_where_torch_has_it() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert not make_optimizer(model, Optimizer(lr=0.1)).param_groups[0]["fused"]
    with pytest.raises(ConfigError, match="parameters are on meta"):
        make_optimizer(model, Optimizer(lr=0.1), fused=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "sgd", "betas": (0.9, 0.95)}, r"betas \(0.9, 0.95\) has no effect with kind 'sgd'"),
        ({"kind": "adamw", "momentum": 0.5}, "momentum 0.5 has no effect with kind 'adamw'"),
        ({"kind": "adam", "nesterov": True}, "nesterov True has no effect"),
        ({"kind": "sgd", "nesterov": True, "momentum": 0.0}, "momentum is 0.0"),
        ({"kind": "sdg"}, "did you mean 'sgd'"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"learning_rate": 1.0}, "has no option 'learning_rate'"),
    ],
)
def test_contradictions_raise(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Optimizer(**fields)


def test_a_config_round_trips_through_json() -> None:
    for config in (
        Optimizer(),
        Optimizer(kind="sgd", lr=0.03, nesterov=True),
        Optimizer(betas=[0.9, 0.95], max_grad_norm=1),
    ):
        assert Optimizer.from_json(config.to_json()) == config


# ── clipping ──


@pytest.mark.parametrize("limit", [0.5, 1.0, 1e9, None])
def test_clipping_matches_the_definition(limit: float | None) -> None:
    model = small()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model.norm.bias.grad = None
    with_gradient = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in with_gradient.values()))
    assert float(clip_gradients(model.parameters(), limit)) == pytest.approx(norm, rel=1e-6)
    factor = 1.0 if limit is None else min(1.0, limit / norm)
    for name, gradient in with_gradient.items():
        torch.testing.assert_close(model.get_parameter(name).grad.double(), gradient * factor, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(wrong: float) -> None:
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.full((2, 2), wrong)
    assert not math.isfinite(clip_gradients(layer.parameters(), 1.0))


def test_no_gradients_have_norm_zero() -> None:
    assert clip_gradients(nn.Linear(2, 2).parameters(), 1.0) == 0.0


# ── freezing ──


def test_everything_but_the_head() -> None:
    model = small()
    frozen = freeze(model, ("*", "!head.*"))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    assert frozen == [name for name, _ in model.named_parameters() if not name.startswith("head.")]
    assert names(model, "decay") == {"head.weight"}
    assert names(model, "no_decay") == {"head.bias"}


def test_only_what_matches_is_frozen() -> None:
    model = small(depth=12)
    frozen = freeze(model, ("blocks.1.*", "patch_embed.*"))
    assert frozen
    assert all(name.startswith(("blocks.1.", "patch_embed.")) for name in frozen)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == set(frozen)
    assert freeze(model, ()) == []


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (("head",), r"no parameter matches 'head'; did you mean 'head\.\*'"),
        (("block.*",), r"did you mean 'blocks\.\*'"),
        (("*", "!heads.*"), r"no parameter matches 'heads\.\*'; did you mean 'head\.\*'"),
        (("zzz",), "no parameter matches 'zzz'; there is cls_token, pos_embed"),
        (("!head.*",), r"put '\*' before it"),
    ],
)
def test_a_pattern_without_matches_raises(patterns: tuple[str, ...], words: str) -> None:
    model = small()
    with pytest.raises(ConfigError, match=words):
        freeze(model, patterns)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_a_skipped_step_changes_nothing(kind: str) -> None:
    """The steps around it are unaffected."""
    layer, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(layer.state_dict())
    optimizers = [make_optimizer(model, Optimizer(kind=kind, lr=0.1)) for model in (layer, other)]
    assert all(can_skip_step(optimizer) for optimizer in optimizers)
    for bad in (False, True, False):
        for model, optimizer in zip((layer, other), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            if bad:
                model.weight.grad = torch.full_like(model.weight, float("nan"))
        step_unless(torch.tensor(bad), optimizers[0])
        if not bad:
            optimizers[1].step()
        assert all(torch.equal(one, two) for one, two in zip(layer.parameters(), other.parameters(), strict=True))
    assert not hasattr(optimizers[0], "found_inf")


def test_only_fused_optimizers_can_skip_a_step() -> None:
    assert not can_skip_step(make_optimizer(nn.Linear(2, 2), Optimizer(kind="adamw", lr=0.1), fused=False))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_encoder_of_a_pretraining_module_is_grouped_like_a_model(kind: Any) -> None:
    model = ViT(ViTConfig(image_size=8, patch_size=2, width=16, depth=2, heads=2, classes=0, stem="conv"))
    module = MaskedAutoencoder(model, MaeSettings(decoder_width=8, decoder_depth=1, decoder_heads=1))
    config = Optimizer(kind=kind, lr=1.0, layer_decay=0.5)
    alone = {name: group["name"] for group in parameter_groups(model, config) for name in group["param_names"]}
    inside = {name: group["name"] for group in parameter_groups(module, config) for name in group["param_names"]}
    assert alone["blocks.1.attn.qkv.weight"] == ("blocks.1.matrices" if kind == "muon" else "blocks.1.decay")
    assert {name: inside[f"encoder.{name}"] for name in alone} == alone
    assert {name for name in inside if not name.startswith("encoder.") and "matrices" in inside[name]} == set()
