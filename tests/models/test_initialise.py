"""Initialisation: each parameter's distribution against the peer's, and the paper's against its definition."""

import math
from typing import Any

import pytest
import torch
from tests.support.peer_models import LUCIDRAINS, TORCHVISION
from tests.support.peers import import_peer, rename
from torch import nn

from vitrail.models.config import ConvLayer, ViTConfig
from vitrail.models.vit import ViT

SIZE: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 192, "depth": 2, "heads": 3, "classes": 100}


def spread(tensor: torch.Tensor) -> tuple[float, float]:
    """Return standard deviation and maximum, which distinguish normal, truncated and uniform distributions."""
    return float(tensor.double().square().mean().sqrt()), float(tensor.abs().max())


def assert_alike(ours: dict[str, torch.Tensor], peer: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == peer.keys()
    for name, tensor in ours.items():
        assert tensor.shape == peer[name].shape, name
        (std, top), (peer_std, peer_top) = spread(tensor), spread(peer[name])
        few = 0.4 if tensor.numel() < 1000 else 0.06
        assert std == pytest.approx(peer_std, rel=few, abs=1e-9), name
        assert top == pytest.approx(peer_top, rel=0.5, abs=1e-9), name


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("pool", ["cls", "map"])
def test_timm(pool: Any) -> None:
    theirs = {"cls": "token", "map": "map"}[pool]
    peer = import_peer("timm.models.vision_transformer").VisionTransformer(
        img_size=32, patch_size=8, embed_dim=192, depth=2, num_heads=3, num_classes=100, reg_tokens=4,
        init_values=1e-5, global_pool=theirs,
    )  # fmt: skip
    ours = ViT(ViTConfig(**SIZE, init="timm", registers=4, layer_scale=1e-5, pool=pool))
    assert_alike(parameters(ours), parameters(peer))


def test_timm_distilled() -> None:
    peer = import_peer("timm").create_model("deit_tiny_distilled_patch16_224", depth=1)
    config = ViTConfig(width=192, depth=1, heads=3, distillation_token=True, init="timm")
    assert_alike(parameters(ViT(config)), parameters(peer))


def test_timm_hybrid() -> None:
    peer = import_peer("timm").create_model("vit_small_r26_s32_224", depth=1)
    ours = ViT(
        ViTConfig(
            patch_size=(32, 32),
            width=384,
            depth=1,
            heads=6,
            stem="resnet",
            resnet={"depths": (2, 2, 2, 2)},
            init="timm",
        )
    )
    assert_alike(parameters(ours), parameters(peer))


@pytest.mark.parametrize("representation", [None, 128])
@pytest.mark.parametrize("stem", ["conv", "conv_stem"])
def test_torchvision(representation: int | None, stem: Any) -> None:
    module = import_peer("torchvision.models.vision_transformer")
    layers = (ConvLayer(channels=48, stride=2), ConvLayer(channels=96, stride=4)) if stem == "conv_stem" else None
    peer = module.VisionTransformer(
        32, 8, 2, 3, 192, 768, num_classes=100, representation_size=representation,
        conv_stem_configs=[module.ConvStemConfig(c.channels, c.kernel, c.stride) for c in layers] if layers else None,
    )  # fmt: skip
    config = ViTConfig(**SIZE, init="torchvision", representation=representation, stem=stem, conv_stem=layers)
    assert_alike(parameters(ViT(config)), rename(parameters(peer), TORCHVISION))


def test_lucidrains() -> None:
    peer = import_peer("vit_pytorch").ViT(
        image_size=32, patch_size=8, num_classes=100, dim=192, depth=2, heads=3, mlp_dim=768, dim_head=64
    )
    state = rename(parameters(peer), LUCIDRAINS)
    state["cls_token"], state["pos_embed"] = state["cls_token"][None], state["pos_embed"][None]
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].reshape(192, 3, 8, 8)
    ours = ViT(ViTConfig(**SIZE, init="lucidrains", stem="linear_norm", qkv_bias=False, norm_eps=1e-5))
    assert_alike(parameters(ours), state)


def test_paper() -> None:
    """Flax's definitions. Query, key and value are three D -> D layers, not one D -> 3D layer."""
    D, hidden, inputs = 192, 768, 3 * 8 * 8
    config = ViTConfig(**SIZE, representation=96, registers=1)
    model = parameters(ViT(config))
    xavier = {
        "blocks.1.attn.qkv.weight": math.sqrt(6 / (D + D)),
        "blocks.1.attn.proj.weight": math.sqrt(6 / (D + D)),
        "blocks.1.mlp.fc1.weight": math.sqrt(6 / (D + hidden)),
        "blocks.1.mlp.fc2.weight": math.sqrt(6 / (D + hidden)),
    }
    for name, bound in xavier.items():
        assert 0.98 * bound < model[name].abs().max() <= bound, name
        assert spread(model[name])[0] == pytest.approx(bound / math.sqrt(3), rel=0.02), name
    for name, fan in (("patch_embed.proj.weight", inputs), ("pre_logits.fc.weight", D)):
        std, top = spread(model[name])
        assert std == pytest.approx(math.sqrt(1 / fan), rel=0.03), name
        assert top <= 2 / 0.8796 * math.sqrt(1 / fan), name
    assert spread(model["pos_embed"])[0] == pytest.approx(0.02, rel=0.06)
    assert spread(model["blocks.0.mlp.fc1.bias"])[0] == pytest.approx(1e-6, rel=0.1)
    for name in (
        "cls_token",
        "head.weight",
        "head.bias",
        "patch_embed.proj.bias",
        "blocks.0.attn.qkv.bias",
        "norm.bias",
    ):
        assert not model[name].any(), name
    assert (model["norm.weight"] == 1).all()


@pytest.mark.parametrize("init", ["paper", "timm", "torchvision", "lucidrains"])
def test_head_bias(init: Any) -> None:
    model = ViT(ViTConfig(**SIZE, init=init, head_bias=-10.0, distillation_token=True))
    model.reset_head(7)
    assert model.head.bias.tolist() == model.head_dist.bias.tolist() == [-10.0] * 7
    assert not (parameters(model)["blocks.0.mlp.fc1.bias"] == -10).any()


def test_paper_initialises_each_half_of_swiglu_as_one_layer() -> None:
    model = parameters(ViT(ViTConfig(**SIZE, activation="swiglu")))
    bound = math.sqrt(6 / (192 + 768))
    assert 0.98 * bound < model["blocks.0.mlp.fc1.weight"].abs().max() <= bound


def test_paper_hybrid_starts_its_bottlenecks_as_identities() -> None:
    config = ViTConfig(
        image_size=64, patch_size=16, stem="resnet", resnet={"depths": (1, 1, 1)}, width=48, heads=3, depth=1
    )
    model = parameters(ViT(config))
    last = [name for name in model if name.endswith("norm3.weight")]
    assert len(last) == 3
    assert not any(model[name].any() for name in last)
    root = model["patch_embed.backbone.stem.conv.weight"]
    assert spread(root)[0] == pytest.approx(math.sqrt(1 / (3 * 49)), rel=0.03)


def test_same_seed_same_weights() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(parameters(ViT(ViTConfig(**SIZE))))
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
