"""Each family, both ways: we read the peer's files with the same logits, and the peer opens ours."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoints import TIMM_SMALL, assert_same_logits, assert_writes_back, google_arrays
from tests.support.peers import import_peer, relative_error, scramble
from torch import Tensor

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.formats import google, lucidrains, timm, torchvision, transformers
from vitrail.checkpoints.load import FAMILIES, load
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.errors import CheckpointError
from vitrail.models.config import ResNet, ViTConfig
from vitrail.models.vit import ViT

# ── timm ──


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reg_tokens": 4, "init_values": 1e-5, "no_embed_class": True},
        {"global_pool": "avg"},
        {"global_pool": "map", "class_token": False},
        {"qk_norm": True, "qkv_bias": False},
        {"pre_norm": True},
        {"num_classes": 0},
        {"in_chans": 1},
    ],
    ids=str,
)
def test_timm(options: dict[str, Any], tmp_path: Path) -> None:
    peer = scramble(import_peer("timm.models.vision_transformer").VisionTransformer(**{**TIMM_SMALL, **options}))
    torch.save(peer.state_dict(), tmp_path / "model.pth")
    overrides = {"heads": 2, **({"activation": "gelu"} if "pre_norm" in options else {})}
    bundle = load(tmp_path / "model.pth", overrides=overrides)
    assert bundle.provenance["family"] == "timm"
    assert_same_logits(bundle, peer)
    assert_writes_back(bundle, timm.FAMILY, peer)


def test_timm_distilled(tmp_path: Path) -> None:
    peer = scramble(import_peer("timm").create_model("deit_tiny_distilled_patch16_224", depth=2))
    torch.save({"model": peer.state_dict()}, tmp_path / "deit.pth")
    bundle = load(tmp_path / "deit.pth", heads=3)
    assert bundle.model.config.distillation_token
    assert_same_logits(bundle, peer)
    assert_writes_back(bundle, timm.FAMILY, peer)


@pytest.mark.parametrize("name", ["vit_tiny_r_s16_p8_224", "vit_small_r26_s32_224"])
def test_timm_hybrids(name: str, tmp_path: Path) -> None:
    peer = scramble(import_peer("timm").create_model(name, depth=2, num_classes=7))
    torch.save(peer.state_dict(), tmp_path / "hybrid.pth")
    bundle = load(tmp_path / "hybrid.pth", heads=peer.blocks[0].attn.num_heads)
    assert bundle.model.config.resnet_numerics == "timm"
    assert_same_logits(bundle, peer)
    assert_writes_back(bundle, timm.FAMILY, peer)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_timm_rope(prefix: str, tmp_path: Path) -> None:
    peer = scramble(import_peer("timm").create_model("vit_small_patch16_rope_224", depth=2, img_size=64)).eval()
    torch.save({f"{prefix}{name}": tensor for name, tensor in peer.state_dict().items()}, tmp_path / "rope.pth")
    bundle = load(tmp_path / "rope.pth", heads=6, image_size=64)
    assert bundle.provenance["family"] == "timm-rope"
    assert (bundle.model.config.position, bundle.model.config.heads) == ("rope_2d", 6)
    assert_same_logits(bundle, peer)
    assert_writes_back(bundle, timm.ROPE, peer)


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_rope_mixed_224", "vit_small_patch16_rope_ape_224", "vit_small_patch16_dinov3"]
)
def test_other_timm_rope_models_are_an_error(name: str, tmp_path: Path) -> None:
    torch.save(import_peer("timm").create_model(name, depth=1).state_dict(), tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"looks like timm, but \d of its \d+ tensors do not belong to it: "):
        load(tmp_path / "other.pth")


# ── torchvision ──


@pytest.mark.parametrize("representation", [None, 24])
@pytest.mark.parametrize("old_names", [False, True])
def test_torchvision(representation: int | None, old_names: bool, tmp_path: Path) -> None:
    module = import_peer("torchvision.models.vision_transformer")
    peer = scramble(module.VisionTransformer(32, 8, 2, 2, 128, 96, num_classes=7, representation_size=representation))
    state = peer.state_dict()
    if old_names:
        state = {k.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v for k, v in state.items()}
    torch.save(state, tmp_path / "vit.pth")
    bundle = load(tmp_path / "vit.pth", heads=2)
    assert bundle.provenance["family"] == "torchvision"
    assert_same_logits(bundle, peer)
    assert_writes_back(bundle, torchvision.FAMILY, peer)


def test_torchvision_conv_stem(tmp_path: Path) -> None:
    module = import_peer("torchvision.models.vision_transformer")
    stem = [module.ConvStemConfig(8, 3, 2), module.ConvStemConfig(16, 3, 2), module.ConvStemConfig(32, 3, 2)]
    peer = scramble(module.VisionTransformer(32, 8, 2, 2, 128, 96, num_classes=7, conv_stem_configs=stem))
    torch.save(peer.state_dict(), tmp_path / "vit.pth")
    bundle = load(tmp_path / "vit.pth", overrides={"heads": 2, "image_size": 32})
    assert_same_logits(bundle, peer)
    assert_writes_back(bundle, torchvision.FAMILY, peer)


# ── transformers ──

HF: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def legacy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Use the names from before version 5."""
    table = {
        ".layers.": ".encoder.layer.",
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    renamed = {}
    for name, tensor in state.items():
        for new, old in table.items():
            name = name.replace(new, old)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("old_names", [False, True])
def test_transformers(old_names: bool, tmp_path: Path) -> None:
    module = import_peer("transformers")
    names = {0: "cat", 1: "dog", 2: "<script>"}
    config = module.ViTConfig(**HF, id2label=names)
    peer = scramble(module.ViTForImageClassification(config))
    if old_names:
        torch.save(legacy(peer.state_dict()), tmp_path / "pytorch_model.bin")
        config.save_pretrained(tmp_path)
    else:
        peer.save_pretrained(tmp_path)
    module.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    bundle = load(tmp_path)
    assert bundle.classes == ("cat", "dog", "<script>")
    assert bundle.preprocess == Preprocess(size=(32, 32))
    assert bundle.model.config.norm_eps == 1e-12
    assert bundle.model.config.heads == 3
    assert_same_logits(bundle, peer)
    assert_writes_back(bundle, transformers.FAMILY, peer)


def test_transformers_bare_model_with_pooler(tmp_path: Path) -> None:
    module = import_peer("transformers")
    peer = scramble(module.ViTModel(module.ViTConfig(**HF)))
    peer.save_pretrained(tmp_path)
    bundle = load(tmp_path)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert relative_error(bundle.model(x), peer(x).pooler_output) <= 1e-5
        assert relative_error(bundle.model.features(x).tokens, peer(x).last_hidden_state) <= 1e-5


def test_transformers_deit(tmp_path: Path) -> None:
    module = import_peer("transformers")
    peer = scramble(module.DeiTForImageClassificationWithTeacher(module.DeiTConfig(**HF, num_labels=4)))
    peer.save_pretrained(tmp_path)
    bundle = load(tmp_path)
    assert_same_logits(bundle, peer)
    assert_writes_back(bundle, transformers.FAMILY, peer)


# ── vit-pytorch ──


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 16), (2, 40), (1, 48)])
def test_lucidrains(pool: str, heads: int, head_dim: int, tmp_path: Path) -> None:
    peer = scramble(
        import_peer("vit_pytorch").ViT(
            image_size=32, patch_size=8, num_classes=7, dim=48, depth=2, heads=heads, dim_head=head_dim, mlp_dim=96,
            pool=pool,
        )
    )  # fmt: skip
    torch.save(peer.state_dict(), tmp_path / "vit.pt")
    bundle = load(tmp_path / "vit.pt", heads=heads)
    assert bundle.provenance["family"] == "lucidrains"
    assert_same_logits(bundle, peer)
    if pool == "cls":
        assert_writes_back(bundle, lucidrains.FAMILY, peer)
    else:
        assert_writes_back(bundle, lucidrains.FAMILY, peer, strict=False)


def test_older_versions_of_lucidrains(tmp_path: Path) -> None:
    """Names with `fn` and position tables with a batch axis, as older versions wrote them."""
    peer = scramble(
        import_peer("vit_pytorch").ViT(
            image_size=32, patch_size=8, num_classes=7, dim=64, depth=2, heads=1, dim_head=32, mlp_dim=96
        )
    )
    older = {}
    for name, tensor in peer.state_dict().items():
        name = re.sub(r"(layers\.\d+\.0)\.(to_qkv|to_out)", r"\1.fn.\2", name)
        name = re.sub(r"(layers\.\d+\.1)\.net\.0\.", r"\1.norm.", name)
        name = re.sub(r"(layers\.\d+\.1)\.net\.1\.", r"\1.fn.net.0.", name)
        name = re.sub(r"(layers\.\d+\.1)\.net\.4\.", r"\1.fn.net.3.", name)
        older[name] = tensor[None] if name in ("cls_token", "pos_embedding") else tensor
    torch.save(older, tmp_path / "old.pt")
    assert_same_logits(load(tmp_path / "old.pt", heads=1), peer)


# ── DINOv2 in transformers' names ──


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("kind", ["Dinov2Model", "Dinov2WithRegistersModel", "Dinov2ForImageClassification"])
@pytest.mark.parametrize("old_names", [False, True])
def test_dinov2_in_transformers(swiglu: bool, kind: str, old_names: bool, tmp_path: Path) -> None:
    module = import_peer("transformers")
    prefix = "Dinov2WithRegisters" if "Registers" in kind else "Dinov2"
    options = {k: v for k, v in HF.items() if k != "intermediate_size"}
    config = getattr(module, f"{prefix}Config")(**options, use_swiglu_ffn=swiglu)
    peer = scramble(getattr(module, kind)(config))
    if old_names:
        state = {
            name.replace("attention.q_proj", "attention.attention.query")
            .replace("attention.k_proj", "attention.attention.key")
            .replace("attention.v_proj", "attention.attention.value")
            .replace("attention.o_proj", "attention.output.dense")
            .replace("mlp.down_proj", "mlp.weights_out"): tensor
            for name, tensor in peer.state_dict().items()
        }
        for gate in [name for name in state if "gate_proj" in name]:  # one tensor in older files
            joined = torch.cat([state.pop(gate), state.pop(gate.replace("gate_proj", "up_proj"))])
            state[gate.replace("gate_proj", "weights_in")] = joined
        torch.save(state, tmp_path / "pytorch_model.bin")
        config.save_pretrained(tmp_path)
    else:
        peer.save_pretrained(tmp_path)
    bundle = load(tmp_path)
    assert bundle.provenance["family"] == "dinov2-transformers"
    assert any("mask_token" in note for note in bundle.provenance["notes"])
    body = getattr(peer, "dinov2", peer)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = body(x)
        assert relative_error(bundle.model(x), expected.pooler_output) <= 1e-5
        tokens = expected.last_hidden_state
        assert relative_error(bundle.model.features(x).tokens, tokens) <= 1e-5


# ── google: no package to compare with, so the table in numpy and a model of ours ──


def linen(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Number the layers of a block as linen does."""
    table = {"MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0", "LayerNorm_2": "LayerNorm_1"}
    renamed = {}
    for name, array in arrays.items():
        for old, new in {**table, "MlpBlock_3": "MlpBlock_0"}.items():
            name = name.replace(old, new)
        renamed[name] = array
    return renamed


def scanned(arrays: dict[str, np.ndarray[Any, Any]], depth: int) -> dict[str, np.ndarray[Any, Any]]:
    """Stack the blocks along a leading axis."""
    rest = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    leaves = [name.removeprefix("Transformer/encoderblock_0/") for name in arrays if "encoderblock_0/" in name]
    stacked = {
        f"Transformer/encoderblock/{leaf}": np.stack(
            [arrays[f"Transformer/encoderblock_{i}/{leaf}"] for i in range(depth)]
        )
        for leaf in leaves
    }
    return {**rest, **stacked}


FORMS: dict[str, Any] = {
    "original": lambda arrays: arrays,
    "linen": linen,
    "scanned": lambda arrays: scanned(linen(arrays), 2),
    "opt": lambda arrays: {f"opt/target/{name}": array for name, array in arrays.items()},
    "params": lambda arrays: {f"params/img/{name}": array for name, array in arrays.items()},
    "position-inside": lambda arrays: {
        name.replace("posembed_input/pos_embedding", "pos_embedding"): array for name, array in arrays.items()
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("representation", [None, 24])
def test_google(form: str, representation: int | None, tmp_path: Path) -> None:
    config = ViTConfig(
        image_size=(32, 32), patch_size=(8, 8), width=48, depth=2, heads=3, classes=7, activation="gelu_tanh",
        representation=representation,
    )  # fmt: skip
    model = ViT(config)
    scramble(model)
    arrays = google_arrays(model)
    np.savez(tmp_path / "vit.npz", **FORMS[form](arrays))
    bundle = load(tmp_path / "vit.npz")
    assert bundle.provenance["family"] == "google"
    assert bundle.model.config == config
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(bundle.model(x), model(x))
    written = google.FAMILY.write(bundle.model.state_dict(), config)
    assert set(written) == set(arrays)
    assert all(np.array_equal(written[name].numpy(), array) for name, array in arrays.items())


def test_google_position_table_without_a_row_for_the_class_token(tmp_path: Path) -> None:
    model = ViT(ViTConfig(image_size=(32, 32), patch_size=(8, 8), width=48, depth=2, heads=3, activation="gelu_tanh"))
    scramble(model)
    with torch.no_grad():
        model.pos_embed[:, :1] = 0
    arrays = google_arrays(model)
    arrays["pos_embedding"] = arrays.pop("Transformer/posembed_input/pos_embedding")[:, 1:]
    np.savez(tmp_path / "vit.npz", **arrays)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(load(tmp_path / "vit.npz").model(x), model(x))


def test_google_map_head(tmp_path: Path) -> None:
    """big_vision's MAPHead_0: a probe, an attention with an axis for the heads, a norm and an MLP."""
    config = ViTConfig(
        image_size=(32, 32), patch_size=(8, 8), width=48, depth=1, heads=3, classes=7, activation="gelu_tanh",
        pool="map", class_token="none",
    )  # fmt: skip
    model = ViT(config)
    scramble(model)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    plain = ViT(config.replace(pool="mean"))
    shared = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("attn_pool.")}
    plain.load_state_dict(shared)
    arrays = google_arrays(plain)
    head = "MAPHead_0/"
    attention = f"{head}MultiHeadDotProductAttention_0/"
    arrays[f"{head}probe"] = state["attn_pool.latent"]
    kernels = {"query": state["attn_pool.q.weight"], "key": state["attn_pool.kv.weight"][:48]}
    kernels["value"] = state["attn_pool.kv.weight"][48:]
    biases = {"query": state["attn_pool.q.bias"], "key": state["attn_pool.kv.bias"][:48]}
    biases["value"] = state["attn_pool.kv.bias"][48:]
    for part in ("query", "key", "value"):
        arrays[f"{attention}{part}/kernel"] = kernels[part].T.reshape(48, 3, 16)
        arrays[f"{attention}{part}/bias"] = biases[part].reshape(3, 16)
    arrays[f"{attention}out/kernel"] = state["attn_pool.proj.weight"].T.reshape(3, 16, 48)
    arrays[f"{attention}out/bias"] = state["attn_pool.proj.bias"]
    arrays[f"{head}LayerNorm_0/scale"] = state["attn_pool.norm.weight"]
    arrays[f"{head}LayerNorm_0/bias"] = state["attn_pool.norm.bias"]
    for i, leaf in ((0, "fc1"), (1, "fc2")):
        arrays[f"{head}MlpBlock_0/Dense_{i}/kernel"] = state[f"attn_pool.mlp.{leaf}.weight"].T
        arrays[f"{head}MlpBlock_0/Dense_{i}/bias"] = state[f"attn_pool.mlp.{leaf}.bias"]
    np.savez(tmp_path / "map.npz", **arrays)
    bundle = load(tmp_path / "map.npz")
    assert bundle.model.config == config
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(bundle.model(x), model(x))
    written = google.FAMILY.write(bundle.model.state_dict(), config)
    assert set(written) == set(arrays)
    assert all(np.array_equal(written[name].numpy(), array) for name, array in arrays.items())


@pytest.mark.parametrize("depths", [(), (2, 1)])
@pytest.mark.parametrize("old_shapes", [False, True])
def test_google_hybrids(depths: tuple[int, ...], old_shapes: bool, tmp_path: Path) -> None:
    config = ViTConfig(
        image_size=(32, 32), patch_size=(8, 8), width=48, depth=1, heads=3, classes=7, activation="gelu_tanh",
        stem="resnet", resnet=ResNet(depths=depths, width_factor=0.5),
    )  # fmt: skip
    model = ViT(config)
    scramble(model)
    arrays = google_arrays(model)
    for name, tensor in model.state_dict().items():
        if not name.startswith("patch_embed.backbone."):
            continue
        leaf = name.removeprefix("patch_embed.backbone.")
        leaf = leaf.replace("stem.conv", "conv_root").replace("stem.norm", "gn_root")
        leaf = leaf.replace("downsample.conv", "conv_proj").replace("downsample.norm", "gn_proj").replace("norm", "gn")
        parts = leaf.split(".")
        if parts[0] == "stages":
            parts = [f"block{int(parts[1]) + 1}", f"unit{int(parts[3]) + 1}", *parts[4:]]
        if "conv" in parts[-2]:
            parts[-1], array = "kernel", tensor.numpy().transpose(2, 3, 1, 0)
        else:
            parts[-1], array = {"weight": "scale", "bias": "bias"}[parts[-1]], tensor.numpy()
            array = array.reshape(1, 1, 1, -1) if old_shapes else array
        arrays["/".join(parts)] = array
    np.savez(tmp_path / "hybrid.npz", **arrays)
    bundle = load(tmp_path / "hybrid.npz")
    assert bundle.model.config == config
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(bundle.model(x), model(x))
    written = google.FAMILY.write(bundle.model.state_dict(), config)
    assert {name: tensor.numel() for name, tensor in written.items()} == {n: a.size for n, a in arrays.items()}
    assert all(np.array_equal(written[n].numpy().reshape(-1), a.reshape(-1)) for n, a in arrays.items())


# ── what a family cannot express ──


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_stands_in_the_way_is_named(family: Any) -> None:
    model = ViT(ViTConfig(image_size=32, patch_size=8, width=48, depth=1, heads=3, norm_order="post"))
    with pytest.raises(
        CheckpointError, match=rf"{family.name} cannot express .*norm_order='post' \(supported: 'pre'\)"
    ):
        family.write(model.state_dict(), model.config)


# ── bundles, and timm opening them ──


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"image_size": (32, 48), "patch_size": (8, 16), "activation": "gelu_tanh"},
        {"registers": 2, "layer_scale": 0.1, "position_covers": "patches"},
        {"pool": "mean", "final_norm": "after_pool", "class_token": "none"},
        {"pool": "map", "channels": 1},
        {"mlp_width": 100, "qkv_bias": False, "qk_norm": True},
    ],
    ids=str,
)
def test_timm_opens_a_bundle(fields: dict[str, Any], tmp_path: Path) -> None:
    config = ViTConfig(
        **{"image_size": 32, "patch_size": 8, "width": 48, "depth": 2, "heads": 3, "classes": 3, **fields}
    )
    model = ViT(config)
    scramble(model)
    numbers = {"channels": 1, "mean": (0.5,), "std": (0.5,)} if config.channels == 1 else {}
    preprocess = Preprocess(**{"size": config.image_size, "mean": IMAGENET_MEAN, "std": IMAGENET_STD, **numbers})
    bundle = Bundle(model, preprocess, ("a", "b", "c"), {"made": "by a test"})
    bundle.save(tmp_path / "bundle")
    peer = import_peer("timm").create_model(f"local-dir:{tmp_path / 'bundle'}", pretrained=True).eval()
    x = torch.randn(2, config.channels, *config.image_size)
    with torch.no_grad():
        assert relative_error(peer(x), model(x)) <= 1e-5
    assert peer.pretrained_cfg["label_names"] == ["a", "b", "c"]
    assert tuple(peer.pretrained_cfg["input_size"]) == (config.channels, *config.image_size)
    again = load(tmp_path / "bundle")
    assert torch.equal(again.model(x), model(x))
    assert (again.classes, again.preprocess) == (("a", "b", "c"), preprocess)
    assert again.model.config == config.resolved()
    assert again.provenance["made"] == "by a test"
