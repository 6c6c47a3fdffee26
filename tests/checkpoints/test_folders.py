"""Folders written by the peers: their configs are used, and unsupported options are errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.checkpoints import TIMM_SMALL, assert_same_logits, tiny_bundle
from tests.support.peers import import_peer, relative_error, scramble

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.load import load
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.vit import ViT

HF: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}


def timm_folder(folder: Path, name: str = "vit_base_patch16_224", **options: Any) -> Any:
    """Save a model as timm prepares it for the hub, with its arguments."""
    timm = import_peer("timm")
    arguments = {**TIMM_SMALL, **options} if name == "vit_base_patch16_224" else options
    peer = scramble(timm.create_model(name, **arguments)).eval()
    timm.models.save_for_hf(peer, folder, model_args=arguments)
    return peer


@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 4},
        {"act_layer": "gelu_tanh"},
        {"act_layer": "quick_gelu"},
        {"act_layer": "relu"},
        {"global_pool": "avg", "fc_norm": False},
        {"global_pool": "avg", "fc_norm": False, "pool_include_prefix": True},
        {"global_pool": "token", "fc_norm": True},
        {"global_pool": "avg", "reg_tokens": 2, "no_embed_class": True},
        {"global_pool": "map", "class_token": False},
        {"img_size": (16, 64)},
        {"img_size": 64, "in_chans": 1},
        {"qk_norm": True, "embed_dim": 96, "num_heads": 3},
    ],
    ids=str,
)
def test_timm_configs_are_used(options: dict[str, Any], tmp_path: Path) -> None:
    peer = timm_folder(tmp_path, **options)
    bundle = load(tmp_path)
    assert_same_logits(bundle, peer)
    assert bundle.preprocess.size == bundle.model.config.image_size
    assert bundle.preprocess.channels == bundle.model.config.channels
    image = Image.fromarray(np.zeros((50, 60, 3), np.uint8))
    assert bundle.model(bundle.preprocess(image)[None]).shape == (1, 7)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("vit_base_patch16_224", {"global_pool": "max"}, "global_pool 'max', which is not supported"),
        ("vit_base_patch16_224", {"act_layer": "silu"}, "activation 'silu', which is not supported"),
        ("vit_base_patch16_rpn_224", {"depth": 1}, "is not a plain ViT"),
    ],
)
def test_unsupported_timm_options(name: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    timm_folder(tmp_path, name, **options)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


@pytest.mark.parametrize("name", ["vit_base_patch16_clip_quickgelu_224", "vit_huge_patch14_224", "test_vit3"])
def test_fields_implied_by_the_architecture_name(name: str, tmp_path: Path) -> None:
    peer = timm_folder(tmp_path, name, depth=1, num_classes=5)
    assert_same_logits(load(tmp_path), peer)


def transformers_folder(folder: Path, kind: str = "ViTForImageClassification", **options: Any) -> Any:
    module = import_peer("transformers")
    config = module.DeiTConfig if kind.startswith("DeiT") else module.ViTConfig
    peer = scramble(getattr(module, kind)(config(**{**HF, **options}))).eval()
    peer.save_pretrained(folder)
    return peer


def test_relu_both_ways(tmp_path: Path) -> None:
    peer = transformers_folder(tmp_path, hidden_act="relu")
    assert_same_logits(load(tmp_path), peer)
    bundle = tiny_bundle(activation="relu", norm_eps=1e-12)
    convert(bundle, tmp_path / "again", to="transformers")
    assert_same_logits(
        bundle, import_peer("transformers").ViTForImageClassification.from_pretrained(tmp_path / "again")
    )


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("ViTForImageClassification", {"hidden_act": "silu"}, "activation 'silu', which is not supported"),
        ("ViTModel", {"pooler_act": "gelu"}, "pooler_act 'gelu'; only tanh is supported"),
    ],
)
def test_unsupported_transformers_options(kind: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    transformers_folder(tmp_path, kind, **options)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_deit_with_one_head(tmp_path: Path) -> None:
    peer = transformers_folder(tmp_path, "DeiTForImageClassification", num_labels=3)
    assert_same_logits(load(tmp_path), peer)


@pytest.mark.parametrize("kind", ["ViTModel", "DeiTModel"])
def test_headless_models_with_a_pooler(kind: str, tmp_path: Path) -> None:
    peer = transformers_folder(tmp_path, kind)
    bundle = load(tmp_path)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert relative_error(bundle.model(x), peer(x).pooler_output) <= 1e-5
    if kind == "ViTModel":
        convert(bundle, tmp_path / "again", to="transformers")
        again = import_peer("transformers").ViTModel.from_pretrained(tmp_path / "again").eval()
        with torch.no_grad():
            assert relative_error(bundle.model(x), again(x).pooler_output) <= 1e-5
    else:
        with pytest.raises(CheckpointError, match="transformers cannot express registers=1"):
            convert(bundle, tmp_path / "again", to="transformers")


def test_a_pooler_before_a_head_is_not_transformers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"representation=40 \(supported: in a model without a head"):
        convert(tiny_bundle(representation=40), tmp_path / "x", to="transformers")


def test_a_mask_token_alone_is_not_dinov2(tmp_path: Path) -> None:
    module = import_peer("transformers")
    peer = scramble(module.ViTModel(module.ViTConfig(**HF), use_mask_token=True)).eval()
    peer.save_pretrained(tmp_path)
    bundle = load(tmp_path)
    assert bundle.provenance["family"] == "transformers"
    assert "1 tensors were dropped: embeddings.mask_token" in bundle.provenance["notes"]


def test_a_model_in_several_files(tmp_path: Path) -> None:
    module = import_peer("transformers")
    peer = scramble(module.ViTForImageClassification(module.ViTConfig(**HF))).eval()
    peer.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_logits(load(tmp_path), peer)
    next(tmp_path.glob("model-00002*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-.*, which model\.safetensors\.index\.json lists"):
        load(tmp_path)


def test_a_trainer_folder(tmp_path: Path) -> None:
    peer = transformers_folder(tmp_path)
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    assert_same_logits(load(tmp_path), peer)


def test_naming_the_file_in_a_folder_is_naming_the_folder(tmp_path: Path) -> None:
    peer = transformers_folder(tmp_path / "hf", num_labels=2, id2label={0: "cat", 1: "dog"})
    bundle = load(tmp_path / "hf" / "model.safetensors")
    assert_same_logits(bundle, peer)
    assert bundle.classes == ("cat", "dog")
    tiny_bundle(heads=4, norm_eps=1e-3).save(tmp_path / "bundle")
    assert load(tmp_path / "bundle" / "model.safetensors").model.config.norm_eps == 1e-3


# ── preprocessing ──

CROP = {"do_center_crop": True, "crop_size": {"height": 32, "width": 32}}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ViTImageProcessor", {"size": {"height": 32, "width": 32}, "do_normalize": False}),
        ("ViTImageProcessor", {"size": {"height": 32, "width": 32}, "do_rescale": False}),
        ("ViTImageProcessor", {"size": {"height": 32, "width": 32}, "rescale_factor": 1 / 127.5}),
        ("DeiTImageProcessor", {"size": {"height": 36, "width": 36}, **CROP}),
        ("DeiTImageProcessor", {"size": {"height": 32, "width": 32}, "do_center_crop": False}),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 36}, **CROP}),
    ],
    ids=str,
)
def test_image_processor_configs_are_used(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    transformers_folder(tmp_path)
    processor = getattr(import_peer("transformers"), kind)(**options)
    processor.save_pretrained(tmp_path)
    bundle = load(tmp_path)
    smooth = np.random.default_rng(0).integers(0, 255, (5, 6, 3), np.uint8)
    image = Image.fromarray(smooth).resize((60, 50))
    expected = torch.as_tensor(np.asarray(processor(image, return_tensors="pt")["pixel_values"][0]))
    scale = float(expected.max() - expected.min())
    assert (bundle.preprocess(image) - expected).abs().max() <= 3 / 255 * scale


@pytest.mark.parametrize(
    "fields",
    [
        {"size": 36, "crop_size": 32, "do_center_crop": True, "resample": 3},
        {"size": {"height": 64, "width": 64}},
    ],
)
def test_preprocessing_is_fitted_to_the_model(fields: dict[str, Any], tmp_path: Path) -> None:
    transformers_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    bundle = load(tmp_path)
    assert bundle.preprocess.size == (32, 32)
    assert bundle.preprocess.resize_to == ((36, 36) if "crop_size" in fields else None)
    fitted = [note for note in bundle.provenance.get("notes", []) if "adapted to the model" in note]
    assert len(fitted) == (0 if "crop_size" in fields else 1)


@pytest.mark.parametrize("fields", [{"do_resize": False}, {"size": {"longest_edge": 3}}, {"crop_pct": 0.9}])
def test_ignored_options_are_noted(fields: dict[str, Any], tmp_path: Path) -> None:
    transformers_folder(tmp_path)
    content = {"size": {"height": 32, "width": 32}, **fields}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    assert any("its preprocessor" in note for note in load(tmp_path).provenance["notes"])


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("config.json", {"num_attention_heads": "x"}),
        ("config.json", {"image_size": [32]}),
        ("config.json", {"id2label": {"a": "b"}}),
        ("preprocessor_config.json", {"size": 32, "image_mean": "x"}),
        ("preprocessor_config.json", {"size": {"height": "big", "width": 3}}),
        ("preprocessor_config.json", {"size": 32, "crop_size": {"height": 3}, "do_center_crop": True}),
    ],
)
def test_nonsense_configs(file: str, fields: dict[str, Any], tmp_path: Path) -> None:
    transformers_folder(tmp_path)
    old = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps({**old, **fields}))
    with pytest.raises(CheckpointError, match=r"^the configs in .* are invalid: [^\n]+$"):
        load(tmp_path)


def test_class_names_that_are_not_strings(tmp_path: Path) -> None:
    transformers_folder(tmp_path, num_labels=3)
    config = json.loads((tmp_path / "config.json").read_text())
    for labels in ({"0": "a", "2": "b", "5": "c"}, {"0": 1, "1": 2, "2": 3}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": labels}))
        assert load(tmp_path).classes is None


# ── overrides ──


def test_fields_missing_in_a_file_can_be_overridden(tmp_path: Path) -> None:
    bundle = tiny_bundle(image_size=(16, 64), pool="mean", activation="gelu_tanh")
    bundle.preprocess = Preprocess(size=(16, 64))
    done = convert(bundle, tmp_path / "vit.pth", to="timm")
    assert done.change == 0
    assert done.notes == [
        "the file holds only weights: the preprocessing and class names are not in it",
        "the file does not record heads=2; set it when you open it (--override heads=…)",
        "the file does not record image_size=(16, 64); set it when you open it (--override image_size=…)",
        "the file does not record activation='gelu_tanh'; set it when you open it (--override activation=…)",
        "the file does not record pool='mean'; set it when you open it (--override pool=…)",
    ]
    fields = {"heads": 2, "image_size": (16, 64), "pool": "mean", "activation": "gelu_tanh"}
    again = load(tmp_path / "vit.pth", overrides=fields)
    x = torch.randn(1, 3, 16, 64)
    assert torch.equal(again.model(x), bundle.model(x))
    with pytest.raises(ConfigError, match="ViTConfig has no option 'pol'; did you mean 'pool'"):
        load(tmp_path / "vit.pth", overrides={"pol": "mean"})


def test_a_bundle_records_everything(tmp_path: Path) -> None:
    tiny_bundle().save(tmp_path / "b")
    assert load(tmp_path / "b", heads=2).model.config.heads == 2
    with pytest.raises(CheckpointError, match="is a bundle, which records heads=2; open it without heads="):
        load(tmp_path / "b", heads=4)
    with pytest.raises(CheckpointError, match="open it without --keys"):
        load(tmp_path / "b", keys=tmp_path / "nowhere.toml")


def test_heads_inferred_from_shapes_win(tmp_path: Path) -> None:
    convert(tiny_bundle(activation="gelu_tanh"), tmp_path / "vit.npz", to="google")
    with pytest.raises(CheckpointError, match="has 2 heads, by its shapes; open it without heads=4"):
        load(tmp_path / "vit.npz", heads=4)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "backbone."])
@pytest.mark.parametrize("family", ["timm", "torchvision", "lucidrains"])
def test_wrapper_prefixes_are_stripped(family: Any, prefix: str, tmp_path: Path) -> None:
    fields = {"stem": "linear_norm", "qkv_bias": False, "norm_eps": 1e-5} if family == "lucidrains" else {}
    bundle = tiny_bundle(**fields)
    convert(bundle, tmp_path / "plain.pth", to=family)
    state = torch.load(tmp_path / "plain.pth", weights_only=True)
    wrapped = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    torch.save({"model_state_dict": {**wrapped, "n_averaged": torch.tensor(3)}, "epoch": 1}, tmp_path / "run.pt")
    again = load(tmp_path / "run.pt", heads=2)
    assert "the weights were read from the key 'model_state_dict'" in again.provenance["notes"]
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(again.model(x), bundle.model(x))


def test_averaged_weights_come_first_and_are_noted(tmp_path: Path) -> None:
    one, other = tiny_bundle().model, tiny_bundle().model
    with torch.no_grad():
        other.get_parameter("head.bias").add_(1)
    torch.save({"state_dict": one.state_dict(), "state_dict_ema": other.state_dict()}, tmp_path / "run.pth")
    bundle = load(tmp_path / "run.pth", heads=2)
    assert torch.equal(bundle.model.head.bias, other.head.bias)
    assert "the weights were read from the key 'state_dict_ema'" in bundle.provenance["notes"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_and_mixed_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """A model is opened in float32 by default, and in the requested dtype."""
    state = {name: tensor.to(dtype) for name, tensor in tiny_bundle().model.state_dict().items()}
    torch.save(state, tmp_path / "other.pth")
    assert load(tmp_path / "other.pth", heads=2).model(torch.randn(1, 3, 32, 32)).dtype == torch.float32
    kept = load(tmp_path / "other.pth", heads=2, overrides={"position": "learned_1d"}, dtype="keep")
    assert kept.model(torch.randn(1, 3, 32, 32, dtype=dtype)).dtype == dtype
    del state["norm.bias"]
    torch.save(state, tmp_path / "less.pth")
    less = load(tmp_path / "less.pth", heads=2, fresh=("norm.*",), dtype="keep")
    assert {p.dtype for p in less.model.parameters()} == {dtype}
    torch.save({**state, "norm.bias": torch.zeros(128)}, tmp_path / "mixed.pth")
    mixed = load(tmp_path / "mixed.pth", heads=2, dtype="keep")
    assert {p.dtype for p in mixed.model.parameters()} == {torch.float32}
    assert any("all were converted to float32" in note for note in mixed.provenance["notes"])


def test_a_bundle_keeps_the_requested_dtype(tmp_path: Path) -> None:
    model = ViT(tiny_bundle().model.config.replace(position="sincos_2d")).to(torch.bfloat16)
    Bundle(model.eval(), Preprocess(size=(32, 32))).save(tmp_path / "b")
    assert load(tmp_path / "b").model(torch.randn(1, 3, 32, 32)).dtype == torch.float32
    half = load(tmp_path / "b", dtype="keep").model
    assert half(torch.randn(1, 3, 32, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert load(tmp_path / "b", dtype="fp16").model.head.weight.dtype == torch.float16
    with pytest.raises(ConfigError, match=r"no dtype is called 'float23'.*did you mean 'float32'"):
        load(tmp_path / "b", dtype="float23")


def test_tied_tensors_are_written_separately(tmp_path: Path) -> None:
    bundle = tiny_bundle()
    blocks: Any = bundle.model.blocks
    blocks[1].norm1.weight = blocks[0].norm1.weight
    bundle.save(tmp_path / "b")
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(load(tmp_path / "b").model(x), bundle.model(x))


def test_naming_the_classes_of_a_head(tmp_path: Path) -> None:
    torch.save(tiny_bundle().model.state_dict(), tmp_path / "a.pth")
    before = load(tmp_path / "a.pth", heads=2)
    named = load(tmp_path / "a.pth", heads=2, classes=("a", "b", "c"))
    assert torch.equal(named.model.head.weight, before.model.head.weight)
    assert (named.classes, named.provenance["adapted"]) == (("a", "b", "c"), ["3 classes named"])
    with pytest.raises(ConfigError, match="classes is 'cat'; pass their number, or a tuple of names"):
        load(tmp_path / "a.pth", heads=2, classes="cat")
