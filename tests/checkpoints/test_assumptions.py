"""Fields that a file does not record: inferred, logged as assumptions, or an error; never guessed silently."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoints import TIMM_SMALL, assert_same_logits, tiny_bundle
from tests.support.peers import import_peer, scramble
from torch import nn

import vitrail
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.load import load
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT


def assumed(bundle: vitrail.Bundle) -> dict[str, Any]:
    return {assumption.field: assumption.value for assumption in bundle.assumptions}


def saved(peer: nn.Module, folder: Path) -> Path:
    torch.save(peer.state_dict(), folder / "vit.pth")
    return folder / "vit.pth"


# ── vit-pytorch: mean pooling takes all tokens ──


class MeanOfAll(nn.Module):
    """vit-pytorch's pool='mean' from when it still had a class token."""

    def __init__(self, peer: Any) -> None:
        super().__init__()
        self.peer = peer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        peer = self.peer
        tokens = peer.to_patch_embedding(x)
        tokens = torch.cat([peer.cls_token.expand(len(x), -1, -1), tokens], dim=1) + peer.pos_embedding
        return peer.mlp_head(peer.transformer(tokens).mean(dim=1))  # type: ignore[no-any-return]


def test_mean_pooling_of_vit_pytorch_takes_all_tokens(tmp_path: Path) -> None:
    peer = scramble(
        import_peer("vit_pytorch").ViT(
            image_size=32, patch_size=8, num_classes=7, dim=48, depth=2, heads=3, dim_head=16, mlp_dim=96
        )
    )
    file = saved(peer, tmp_path)
    mean = load(file, heads=3, overrides={"pool": "mean"})
    assert mean.model.config.pool_over == "all"
    assert "pool" not in assumed(mean)
    assert_same_logits(mean, MeanOfAll(peer))
    plain = load(file, heads=3)
    assert assumed(plain)["pool"] == "cls"
    assert_same_logits(plain, peer)
    patches = load(file, overrides={"heads": 3, "pool": "mean", "pool_over": "patches"})
    with pytest.raises(CheckpointError, match="pool_over='patches' with a class token"):
        convert(patches, tmp_path / "x.pt", to="lucidrains")


# ── heads ──


@pytest.mark.parametrize("family", ["timm", "torchvision", "transformers", "lucidrains"])
def test_heads_of_an_unpublished_size_must_be_set(family: str, tmp_path: Path) -> None:
    fields = {"stem": "linear_norm", "qkv_bias": False} if family == "lucidrains" else {}
    bundle = tiny_bundle(width=96, heads=3, norm_eps=1e-5 if family == "lucidrains" else 1e-6, **fields)
    if family == "transformers":
        convert(bundle, tmp_path / "hf", to="transformers")
        file = (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "vit.safetensors")
    else:
        file = convert(bundle, tmp_path / "vit.pth", to=family).target
    with pytest.raises(CheckpointError, match=r"width 96, 2 blocks.*; set it with --override heads=N .* divides 96"):
        load(file)
    opened = load(file, overrides={"heads": 3, "norm_eps": bundle.model.config.norm_eps})
    assert "heads" not in assumed(opened)
    assert_same_logits(opened, bundle.model)


def test_heads_of_a_published_size_are_assumed_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = ViT(ViTConfig(image_size=32, patch_size=16, width=192, depth=12, heads=3, classes=3))
    bundle = load(saved(model, tmp_path))
    assert (bundle.model.config.heads, assumed(bundle)["heads"]) == (3, 3)
    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert lines[0] == (
        "assumed: heads=3 (64 wide, as in the published models of this size); change it with --override heads=N"
    )
    assert bundle.provenance["assumed"] == [line.removeprefix("assumed: ") for line in lines]


def test_a_bundle_assumes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_bundle().save(tmp_path / "b")
    assert load(tmp_path / "b").assumptions == ()
    assert not caplog.records


# ── positions ──


@pytest.mark.parametrize("position", ["none", "sincos_2d", "rope_2d"])
def test_positions_without_a_table_must_be_set(position: str, tmp_path: Path) -> None:
    model = scramble(tiny_bundle(position=position).model)
    file = saved(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"no position table.*set it with --override position=sincos_2d"):
        load(file, heads=2)
    opened = load(file, heads=2, overrides={"position": position, "image_size": 32})
    assert_same_logits(opened, model)


def test_a_file_without_a_table_of_positions_is_noted_by_convert(tmp_path: Path) -> None:
    table = "".join(
        f'[[keys]]\ntheirs = "{name}"\nours = "{name}"\n' for name in tiny_bundle(position="none").model.state_dict()
    )
    (tmp_path / "mine.toml").write_text(f"[config]\nheads = 2\n{table}")
    convert(tiny_bundle(position="none"), tmp_path / "vit.pth", to="own", keys=tmp_path / "mine.toml")
    with pytest.raises(CheckpointError, match="--override position="):
        load(tmp_path / "vit.pth", keys=tmp_path / "mine.toml")


# ── timm's bare files ──


@pytest.mark.parametrize(
    ("options", "field", "right"),
    [
        ({"act_layer": "quick_gelu"}, "activation", "quick_gelu"),
        ({"act_layer": "relu"}, "activation", "relu"),
        ({"act_layer": "silu"}, "activation", None),
        ({"global_pool": "max"}, "pool", None),
        ({"global_pool": "avg", "fc_norm": False}, "pool", "mean"),
    ],
    ids=str,
)
def test_assumptions_about_bare_timm_files(
    options: dict[str, Any], field: str, right: str | None, tmp_path: Path
) -> None:
    """Each assumption is logged; overriding it, where supported, gives timm's outputs."""
    peer = scramble(import_peer("timm").create_model("vit_base_patch16_224", **TIMM_SMALL, **options)).eval()
    file = saved(peer, tmp_path)
    bundle = load(file, heads=2)
    assert {field, "norm_eps", "preprocess.mean"} <= set(assumed(bundle))
    if right is not None:
        opened = load(file, heads=2, overrides={field: right})
        assert field not in assumed(opened)
        assert_same_logits(opened, peer)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vit_base_patch16_clip_quickgelu_224", "--override activation=quick_gelu"),
        ("vit_pe_core_tiny_patch16_384", "Perception Encoder"),
        ("vit_pe_spatial_tiny_patch16_512", "Perception Encoder"),
        ("vit_base_patch16_rpn_224", "--override norm_order=pre"),
    ],
)
def test_ambiguous_bare_files(name: str, words: str, tmp_path: Path) -> None:
    peer = scramble(import_peer("timm").create_model(name, depth=1, num_classes=3))
    heads = peer.blocks[0].attn.num_heads
    with pytest.raises(CheckpointError, match=words):
        load(saved(peer, tmp_path), heads=heads)
    if "pe_" in name:  # also with the GELU set
        with pytest.raises(CheckpointError, match=words):
            load(tmp_path / "vit.pth", heads=heads, overrides={"activation": "gelu"})


def test_preprocessing_assumptions_are_logged_and_can_be_overridden(tmp_path: Path) -> None:
    file = saved(tiny_bundle().model, tmp_path)
    bundle = load(file, heads=2)
    assert assumed(bundle)["preprocess.mean"] == (0.5, 0.5, 0.5)
    assert any("DeiT's have mean 0.485" in line for line in bundle.provenance["assumed"])
    overrides = {"preprocess.mean": [0.485, 0.456, 0.406], "preprocess.std": 0.25, "preprocess.resize": "squash"}
    opened = load(file, heads=2, overrides=overrides)
    assert (opened.preprocess.mean, opened.preprocess.std) == ((0.485, 0.456, 0.406), (0.25, 0.25, 0.25))
    assert not [field for field in assumed(opened) if field.startswith("preprocess.")]
    with pytest.raises(ConfigError, match=r"no option 'maen'.*did you mean 'preprocess\.mean'"):
        load(file, heads=2, overrides={"preprocess.maen": 0.5})


# ── timm configs ──


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale_attn_norm": True},
        {"norm_layer": "rmsnorm"},
        {"attn_layer": "diff"},
        {"embed_norm_layer": "layernorm"},
        {"global_pool": "avgmax"},
        {"use_rot_pos_emb": True},
        {"pos_embed": "rope"},
        {"a_word_of_tomorrow": 1},
    ],
    ids=str,
)
def test_every_argument_of_a_timm_config_is_used_or_an_error(arguments: dict[str, Any], tmp_path: Path) -> None:
    timm = import_peer("timm")
    peer = timm.create_model("vit_base_patch16_224", **TIMM_SMALL)
    timm.models.save_for_hf(peer, tmp_path, model_args={**TIMM_SMALL, **arguments})
    (name, _) = arguments.popitem()
    with pytest.raises(CheckpointError, match=f"its config has {name}"):
        load(tmp_path)


def test_every_argument_of_timm_is_handled() -> None:
    """A new argument in timm fails here, so that someone decides how to handle it."""
    import inspect

    from vitrail.checkpoints.timm_config import _FOLLOWED, _IN_SHAPES, _IN_TRAINING, _ONLY

    timm = import_peer("timm.models.vision_transformer")
    theirs = set(inspect.signature(timm.VisionTransformer.__init__).parameters) - {"self"}
    assert theirs == {*_FOLLOWED, *_IN_SHAPES, *_IN_TRAINING, *_ONLY}


@pytest.mark.parametrize("name", ["vit_pe_core_tiny_patch16_384", "vit_pe_spatial_tiny_patch16_512", "vit_of_tomorrow"])
def test_unsupported_timm_names(name: str, tmp_path: Path) -> None:
    timm = import_peer("timm")
    exists = name != "vit_of_tomorrow"
    peer = timm.create_model(name if exists else "vit_tiny_patch16_224", depth=1)
    timm.models.save_for_hf(peer, tmp_path)
    if not exists:
        config = tmp_path / "config.json"
        config.write_text(config.read_text().replace("vit_tiny_patch16_224", name))
    with pytest.raises(CheckpointError, match=f"timm's {name} is not a plain ViT"):
        load(tmp_path)


# ── torchvision's early convolutions ──


def early(module: Any, strides: tuple[int, ...], channels: tuple[int, ...], size: int = 32, **more: Any) -> Any:
    layers = [module.ConvStemConfig(c, 3, s, **more) for c, s in zip(channels, strides, strict=True)]
    return scramble(module.VisionTransformer(size, 8, 2, 2, 128, 96, num_classes=7, conv_stem_configs=layers))


def test_strides_of_a_conv_stem_must_be_set(tmp_path: Path) -> None:
    module = import_peer("torchvision.models.vision_transformer")
    peer = early(module, (2, 2, 1, 2), (8, 16, 16, 32))
    file = saved(peer, tmp_path)
    with pytest.raises(CheckpointError, match="set the image size with --override image_size=224"):
        load(file, heads=2)
    bundle = load(file, heads=2, overrides={"image_size": 32})
    assert assumed(bundle)["conv_stem"] == (2, 2, 1, 2)
    assert assumed(bundle)["conv_stem.activation"] == "relu"
    assert_same_logits(bundle, peer)
    other = saved(early(module, (4, 1, 2), (8, 16, 32)), tmp_path)
    assert load(other, heads=2, overrides={"image_size": 32}).model.config.patch_size == (8, 8)
    odd = saved(early(module, (2, 2, 2, 1), (8, 16, 32, 64)), tmp_path)
    with pytest.raises(CheckpointError, match=r"4 convolutions have a total stride of 8.* conv_stem = "):
        load(odd, heads=2, overrides={"image_size": 32})
    stem = [{"channels": c, "kernel": 3, "stride": s} for c, s in ((8, 2), (16, 2), (32, 2), (64, 1))]
    opened = load(odd, heads=2, overrides={"image_size": 32, "conv_stem": stem})
    assert "conv_stem" not in assumed(opened)


# ── transformers' bare files ──


@pytest.mark.parametrize(
    ("options", "overrides"),
    [({"hidden_act": "quick_gelu"}, {"activation": "quick_gelu"}), ({"layer_norm_eps": 1e-3}, {"norm_eps": 1e-3})],
    ids=str,
)
def test_assumptions_about_bare_transformers_files(
    options: dict[str, Any], overrides: dict[str, Any], tmp_path: Path
) -> None:
    module = import_peer("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = module.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=3, **options)
    peer = scramble(module.ViTForImageClassification(config)).eval()
    file = saved(peer, tmp_path)
    assert {"activation", "norm_eps", "pool", "preprocess.mean"} <= set(assumed(load(file, heads=4)))
    assert_same_logits(load(file, heads=4, overrides=overrides), peer)
    bare = saved(scramble(module.ViTModel(config)), tmp_path)
    assert assumed(load(bare, heads=4))["pre_logits"] == "tanh"


def test_a_transformers_folder_assumes_only_what_it_leaves_out(tmp_path: Path) -> None:
    module = import_peer("transformers")
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 96}
    peer = module.ViTForImageClassification(module.ViTConfig(**sizes, image_size=32, patch_size=8))
    peer.save_pretrained(tmp_path)
    assert {field.partition(".")[0] for field in assumed(load(tmp_path))} == {"preprocess"}
    module.ViTModel(peer.config).save_pretrained(tmp_path)  # its config records the pooler's activation
    assert {field.partition(".")[0] for field in assumed(load(tmp_path))} == {"preprocess"}


def test_a_timm_folder_assumes_nothing(tmp_path: Path) -> None:
    timm = import_peer("timm")
    options = {**TIMM_SMALL, "global_pool": "avg", "reg_tokens": 2}
    timm.models.save_for_hf(timm.create_model("vit_base_patch16_224", **options), tmp_path, model_args=options)
    assert assumed(load(tmp_path)) == {}


# ── overrides ──


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"heads": "abc"}, "heads is 'abc': input should be a valid integer"),
        ({"heads": 0}, "heads is 0: input should be greater than 0"),
        ({"heads": 2.5}, "heads is 2.5: "),
        ({"patch_size": "big"}, "patch_size is 'big': expected one integer, or two"),
        ({"pool": "max"}, "pool is 'max': input should be 'cls', 'mean', 'map', 'none' or 'patches'"),
        ({"norm_eps": "small"}, "norm_eps is 'small': "),
    ],
    ids=str,
)
def test_invalid_overrides(overrides: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = saved(tiny_bundle().model, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(file, overrides={"heads": 2, **overrides})


def test_overrides_of_a_bundle(tmp_path: Path) -> None:
    grey = tiny_bundle(channels=1)
    with pytest.raises(CheckpointError, match=r"prepares images of 32×32 pixels in 3 channels .* before you save it"):
        grey.save(tmp_path / "b")  # it could not be loaded again
    grey.preprocess = grey.preprocess.with_channels(1)
    grey.save(tmp_path / "b")
    (mean,) = grey.preprocess.mean
    same = {"heads": 2, "pool": "cls", "preprocess.mean": mean}
    assert load(tmp_path / "b", overrides=same).preprocess.mean == (mean,)
    with pytest.raises(CheckpointError, match=rf"a bundle, which records preprocess\.mean=\({mean},\)"):
        load(tmp_path / "b", overrides={"preprocess.mean": 0.4})


def test_one_integer_is_a_square_patch(tmp_path: Path) -> None:
    peer = scramble(
        import_peer("vit_pytorch").ViT(
            image_size=32, patch_size=8, num_classes=7, dim=48, depth=2, heads=3, dim_head=16, mlp_dim=96, channels=1
        )
    )
    file = saved(peer, tmp_path)
    with pytest.raises(CheckpointError, match="set them with --override patch_size=8 --override channels=1"):
        load(file, heads=3)
    assert_same_logits(load(file, heads=3, overrides={"patch_size": 8, "channels": 1}), peer)
    timm = saved(tiny_bundle().model, tmp_path)
    assert load(timm, heads=2, overrides={"patch_size": 8}).model.config.patch_size == (8, 8)


# ── dtypes ──


def test_a_float8_bundle_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_bundle().save(tmp_path / "b")
    state = load_file(tmp_path / "b" / "model.safetensors")
    state["norm.weight"] = state["norm.weight"].to(torch.float8_e4m3fn)
    save_file(state, tmp_path / "b" / "model.safetensors")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    config["vitrail"].pop("weights_sha256", None)  # as in a bundle that was edited on purpose
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"has float8_e4m3fn values in norm\.weight; save the model in float32"):
        load(tmp_path / "b")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "float64"])
def test_convert_writes_the_requested_dtype(dtype: Any, tmp_path: Path) -> None:
    bundle = tiny_bundle()
    convert(bundle, tmp_path / "other", dtype=dtype)
    assert bundle.model.head.weight.dtype == torch.float32
    kept = load(tmp_path / "other", dtype="keep").model.head.weight.dtype
    assert kept != torch.float32
    convert(tmp_path / "other", tmp_path / "same")
    assert load(tmp_path / "same", dtype="keep").model.head.weight.dtype == kept
    convert(tmp_path / "other", tmp_path / "plain", dtype="float32")
    assert load(tmp_path / "plain", dtype="keep").model.head.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "float64"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_bundles_of_any_dtype_compute(dtype: Any, precision: Any, tmp_path: Path) -> None:
    tiny_bundle().save(tmp_path / "b")
    bundle = load(tmp_path / "b", dtype=dtype)
    image = np.zeros((32, 32, 3), np.uint8)
    actual = vitrail.Classifier(bundle, device="cpu", precision=precision)(image)
    expected = vitrail.Classifier(tmp_path / "b", device="cpu")(image)
    assert abs(actual.probability - expected.probability) < 0.05
    assert bundle.model.head.weight.dtype != torch.float32


# ── equivalent norms ──


def test_a_norm_after_class_token_pooling_moves_before_it(tmp_path: Path) -> None:
    fields = {"stem": "linear_norm", "qkv_bias": False, "norm_eps": 1e-5}
    bundle = tiny_bundle(final_norm="after_pool", **fields)
    done = convert(bundle, tmp_path / "vit.pt", to="lucidrains")
    assert done.change <= 1e-6
    again = load(tmp_path / "vit.pt", heads=2)
    assert_same_logits(again, bundle.model)
    with pytest.raises(CheckpointError, match="cannot express final_norm='after_pool'"):
        convert(
            tiny_bundle(final_norm="after_pool", pool="mean", class_token="none", **fields),
            tmp_path / "x.pt",
            to="lucidrains",
        )
