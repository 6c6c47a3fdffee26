"""Same weights, same logits: our model against timm, torchvision, vit-pytorch and transformers."""

from typing import Any

import pytest
import torch
from tests.support.peer_models import LUCIDRAINS, SMALL, TORCHVISION, TRANSFORMERS, timm_vit
from tests.support.peers import import_peer, relative_error, rename, scramble
from torch import Tensor, nn

from vitrail.models.config import ConvLayer, ResNet, ViTConfig
from vitrail.models.variants import variant_config
from vitrail.models.vit import ViT

TOLERANCE = 1e-5


def assert_same(config: ViTConfig, peer: nn.Module, state: dict[str, Tensor]) -> None:
    ours = ViT(config).eval()
    ours.load_state_dict(state)
    x = torch.randn(2, config.channels, *config.image_size)
    with torch.no_grad():
        expected = peer(x)
        assert relative_error(ours(x), expected) <= TOLERANCE
        traced = ours.trace(x, attention=range(config.depth))
        assert relative_error(traced.logits, expected) <= TOLERANCE


# ── timm: the names are the same, so the weights load as they are ──


def timm_model(name: str, **options: Any) -> nn.Module:
    model: nn.Module = import_peer("timm").create_model(name, **options)
    return scramble(model)


@pytest.mark.parametrize(
    ("name", "paper"),
    [
        ("vit_tiny_patch16_224", "Ti/16"),
        pytest.param("vit_small_patch16_224", "S/16", marks=pytest.mark.slow),
        pytest.param("vit_base_patch16_224", "B/16", marks=pytest.mark.slow),
    ],
)
def test_timm_variants(name: str, paper: str) -> None:
    peer = timm_model(name)
    assert_same(variant_config(paper), peer, peer.state_dict())


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param(
            {"img_size": (32, 48), "patch_size": (8, 16)},
            {"image_size": (32, 48), "patch_size": (8, 16)},
            id="oblong",
        ),
        pytest.param(
            {"reg_tokens": 4, "init_values": 0.1, "no_embed_class": True},
            {"registers": 4, "layer_scale": 0.1, "position_covers": "patches"},
            id="registers-layerscale",
        ),
        pytest.param({"reg_tokens": 2}, {"registers": 2, "position_covers": "all"}, id="registers-with-positions"),
        pytest.param({"global_pool": "avg"}, {"pool": "mean", "final_norm": "after_pool"}, id="gap"),
        pytest.param({"global_pool": "avg", "fc_norm": False}, {"pool": "mean"}, id="gap-norm-first"),
        pytest.param({"global_pool": "map", "class_token": False}, {"pool": "map", "class_token": "none"}, id="map"),
        pytest.param({"global_pool": "map"}, {"pool": "map"}, id="map-patches"),
        pytest.param(
            {"global_pool": "map", "pool_include_prefix": True},
            {"pool": "map", "pool_over": "all"},
            id="map-all-tokens",
        ),
        pytest.param(
            {"global_pool": "avg", "pool_include_prefix": True},
            {"pool": "mean", "pool_over": "all", "final_norm": "after_pool"},
            id="gap-all-tokens",
        ),
        pytest.param({"qk_norm": True}, {"qk_norm": True}, id="qk-norm"),
        pytest.param({"pre_norm": True}, {"norm_before_blocks": True, "patch_bias": False}, id="norm-pre"),
        pytest.param(
            {"qkv_bias": False, "proj_bias": False},
            {"qkv_bias": False, "proj_bias": False, "mlp_bias": False},
            id="no-bias",
        ),
        pytest.param({"in_chans": 13}, {"channels": 13}, id="13-channels"),
        pytest.param({"num_classes": 0}, {"classes": 0}, id="no-head"),
    ],
)
def test_timm_options(options: dict[str, Any], fields: dict[str, Any]) -> None:
    peer = timm_vit(**options)
    assert_same(ViTConfig(**{**SMALL, **fields}), peer, peer.state_dict())


@pytest.mark.parametrize("activation", ["gelu_tanh", "quick_gelu", "relu"])
def test_timm_activations(activation: Any) -> None:
    peer = timm_vit(act_layer=activation)
    assert_same(ViTConfig(**SMALL, activation=activation), peer, peer.state_dict())


def test_timm_swiglu() -> None:
    layers = import_peer("timm.layers")
    peer = timm_vit(mlp_layer=layers.SwiGLUPacked, act_layer="silu", mlp_ratio=4.0)
    assert_same(ViTConfig(**SMALL, activation="swiglu", mlp_width=96), peer, peer.state_dict())


def test_timm_rope() -> None:
    peer = timm_model("vit_small_patch16_rope_224", depth=3, img_size=(64, 96))
    table = {r"(blocks\.\d+)\.gamma_([12])": r"\1.ls\2.gamma", r"(.*)": r"\1"}
    config = ViTConfig(
        image_size=(64, 96),
        width=384,
        depth=3,
        heads=6,
        position="rope_2d",
        rope_theta=100.0,
        layer_scale=1e-5,
    )
    assert_same(config, peer, rename(peer.state_dict(), table))


def test_timm_distilled() -> None:
    peer = timm_model("deit_tiny_distilled_patch16_224", depth=2)
    config = variant_config("Ti/16").replace(depth=2, distillation_token=True)
    assert_same(config, peer, peer.state_dict())


@pytest.mark.parametrize(
    ("name", "paper", "fields"),
    [
        ("vit_tiny_r_s16_p8_224", "R+Ti/16", {}),
        pytest.param("vit_small_r26_s32_224", "R26+S/32", {}, marks=pytest.mark.slow),
        pytest.param("vit_base_r50_s16_224", "R50+B/16", {"depth": 2}, marks=pytest.mark.slow),
    ],
)
def test_timm_hybrids(name: str, paper: str, fields: dict[str, Any]) -> None:
    peer = timm_model(name, num_classes=1000, **fields)
    config = variant_config(paper).replace(**fields)
    assert config.resnet is not None
    config = config.replace(resnet=config.resnet.replace(numerics="timm"))
    root = {r"patch_embed\.backbone\.(conv|norm)\.(.*)": r"patch_embed.backbone.stem.\1.\2", r"(.*)": r"\1"}
    assert_same(config, peer, rename(peer.state_dict(), root))


# ── torchvision ──


@pytest.mark.parametrize("representation", [None, 24])
@pytest.mark.parametrize("stem", ["conv", "conv_stem"])
def test_torchvision(representation: int | None, stem: Any) -> None:
    module = import_peer("torchvision.models.vision_transformer")
    layers = (ConvLayer(channels=8, stride=2), ConvLayer(channels=16, kernel=5, stride=4))
    peer = scramble(
        module.VisionTransformer(
            32, 8, 3, 3, 48, 96, num_classes=7, representation_size=representation,
            conv_stem_configs=[module.ConvStemConfig(c.channels, c.kernel, c.stride) for c in layers]
            if stem == "conv_stem" else None,
        )
    )  # fmt: skip
    config = ViTConfig(
        **SMALL,
        mlp_width=96,
        representation=representation,
        stem=stem,
        conv_stem=layers if stem == "conv_stem" else None,
    )
    assert_same(config, peer, rename(peer.state_dict(), TORCHVISION))


# ── vit-pytorch ──


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 16), (2, 40), (1, 48)])
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_lucidrains(pool: Any, heads: int, head_dim: int) -> None:
    peer = scramble(
        import_peer("vit_pytorch").ViT(
            image_size=(32, 48), patch_size=(8, 16), num_classes=7, dim=48, depth=3, heads=heads, dim_head=head_dim,
            mlp_dim=96, pool=pool,
        )
    )  # fmt: skip
    state = rename(peer.state_dict(), LUCIDRAINS)
    state["pos_embed"] = state["pos_embed"][None]
    if pool == "mean":
        del state["cls_token"]  # an empty tensor
    else:
        state["cls_token"] = state["cls_token"][None]
    kernel = state["patch_embed.proj.weight"].reshape(48, 8, 16, 3)  # its patches are (p1 p2 c)
    state["patch_embed.proj.weight"] = kernel.permute(0, 3, 1, 2)
    config = ViTConfig(
        image_size=(32, 48), patch_size=(8, 16), width=48, depth=3, heads=heads, head_dim=head_dim, mlp_width=96,
        classes=7, stem="linear_norm", class_token="first" if pool == "cls" else "none", pool=pool, qkv_bias=False,
        out_proj=not (heads == 1 and head_dim == 48), norm_eps=1e-5,
    )  # fmt: skip
    assert_same(config, peer, state)


# ── transformers ──


def test_transformers() -> None:
    module = import_peer("transformers")
    peer = scramble(
        module.ViTForImageClassification(
            module.ViTConfig(
                hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96, image_size=32,
                patch_size=8, num_labels=7,
            )
        )
    )  # fmt: skip
    state = rename(peer.state_dict(), TRANSFORMERS)
    for i in range(3):
        for kind in ("weight", "bias"):
            state[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat([state.pop(f"blocks.{i}.attn.{p}.{kind}") for p in "qkv"])

    class Logits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = peer(x).logits
            return logits

    assert_same(ViTConfig(**SMALL, mlp_width=96, norm_eps=1e-12), Logits(), state)


def test_the_two_numerics_of_the_hybrid_differ_slightly() -> None:
    """Google's and timm's epsilons give nearly, but not exactly, the same outputs."""

    def build(numerics: Any) -> ViTConfig:
        stem = ResNet(depths=(1, 1), numerics=numerics)
        return ViTConfig(**{**SMALL, "image_size": 64}, stem="resnet", resnet=stem)

    google = ViT(build("google")).eval()
    scramble(google)
    timm = ViT(build("timm")).eval()
    timm.load_state_dict(google.state_dict())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert 0 < relative_error(google(x), timm(x)) < 1e-2
