"""Conversion between all formats: written by us, opened by the real peer, with the same outputs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.checkpoints import TINY, assert_same_logits, tiny_bundle
from tests.support.peers import import_peer, relative_error, scramble

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.load import load
from vitrail.data.preprocess import IMAGENET_STD, Preprocess
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT


def test_to_timm(tmp_path: Path) -> None:
    bundle = tiny_bundle()
    done = convert(bundle, tmp_path / "timm", to="timm")
    assert done.change <= 1e-5
    assert_same_logits(bundle, import_peer("timm").create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True))


def test_to_torchvision(tmp_path: Path) -> None:
    bundle = tiny_bundle()
    convert(bundle, tmp_path / "vit.pth", to="torchvision")
    module = import_peer("torchvision.models.vision_transformer")
    peer = module.VisionTransformer(32, 8, 2, 2, 128, 512, num_classes=3)
    peer.load_state_dict(torch.load(tmp_path / "vit.pth", weights_only=True))
    assert_same_logits(bundle, peer)


@pytest.mark.parametrize("fields", [{"norm_eps": 1e-12}, {"activation": "gelu_tanh"}, {"qkv_bias": False}], ids=str)
@pytest.mark.parametrize("crop", [False, True])
def test_to_transformers(fields: dict[str, Any], crop: bool, tmp_path: Path) -> None:
    bundle = tiny_bundle(**fields)
    if crop:
        bundle.preprocess = bundle.preprocess.replace(resize="cover", resize_to=36, interpolation="bicubic")
    convert(bundle, tmp_path / "hf", to="transformers")
    module = import_peer("transformers")
    peer = module.AutoModelForImageClassification.from_pretrained(tmp_path / "hf")
    assert_same_logits(bundle, peer)
    assert peer.config.id2label == {0: "cat", 1: "dog", 2: "newt"}
    again = load(tmp_path / "hf")
    assert again.classes == bundle.classes
    assert again.preprocess == bundle.preprocess.replace(half="down" if crop else "even")
    processor = module.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8))
    expected = torch.as_tensor(np.asarray(processor(image, return_tensors="pt")["pixel_values"][0]))
    assert (bundle.preprocess(image) - expected).abs().max() <= 2 / 255 / min(IMAGENET_STD) + 1e-4


def test_to_transformers_distilled(tmp_path: Path) -> None:
    bundle = tiny_bundle(distillation_token=True)
    convert(bundle, tmp_path / "hf", to="transformers")
    module = import_peer("transformers")
    assert_same_logits(bundle, module.DeiTForImageClassificationWithTeacher.from_pretrained(tmp_path / "hf"))


def test_oblong_images_that_transformers_cannot_cover(tmp_path: Path) -> None:
    bundle = tiny_bundle(image_size=(32, 48))
    bundle.preprocess = bundle.preprocess.replace(size=(32, 48), resize="cover", resize_to=(36, 54))
    words = r"preprocess\.resize='cover' to 36×54, crop to 32×48 \(no image processor of transformers supports it"
    with pytest.raises(CheckpointError, match=words):
        convert(bundle, tmp_path / "hf", to="transformers")
    done = convert(bundle, tmp_path / "hf", to="transformers", approximate=True)
    assert done.change <= 1e-5
    assert len(done.differences) == 1
    again = load(tmp_path / "hf")
    assert (again.preprocess.resize, again.preprocess.size) == ("squash", (32, 48))


@pytest.mark.parametrize(
    ("activation", "registers", "hidden"), [("gelu", 0, 256), ("swiglu", 4, 344), ("gelu", 2, 512)]
)
def test_to_dinov2_in_transformers(activation: Any, registers: int, hidden: int, tmp_path: Path) -> None:
    fields = {"classes": 0, "layer_scale": 1e-5, "registers": registers, "mlp_width": hidden, "activation": activation}
    model = scramble(ViT(ViTConfig(**{**TINY, **fields}, position_covers="class" if registers else None)))
    bundle = Bundle(model.eval(), Preprocess(size=(32, 32)))
    convert(bundle, tmp_path / "dino", to="dinov2-transformers")
    peer, info = import_peer("transformers").AutoModel.from_pretrained(tmp_path / "dino", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert relative_error(bundle.model(x), peer.eval()(x).pooler_output) <= 1e-5
    again = load(tmp_path / "dino")
    assert again.provenance["family"] == "dinov2-transformers"
    assert again.model.config.resolved() == bundle.model.config.resolved()


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_mlp_widths_that_dinov2_cannot_express(activation: Any, tmp_path: Path) -> None:
    bundle = tiny_bundle(classes=0, layer_scale=1e-5, activation=activation, mlp_width=100)
    with pytest.raises(CheckpointError, match="cannot express mlp_width=100 with width=128"):
        convert(bundle, tmp_path / "dino", to="dinov2-transformers")


@pytest.mark.parametrize("position", ["sincos_2d", "learned_2d"])
@pytest.mark.parametrize("class_token", ["first", "none"])
def test_positions_without_a_table_of_their_own_are_written_as_one(
    position: Any, class_token: Any, tmp_path: Path
) -> None:
    pool = "cls" if class_token == "first" else "mean"
    norm = "before_pool" if class_token == "first" else "after_pool"
    bundle = tiny_bundle(position=position, class_token=class_token, pool=pool, final_norm=norm)
    convert(bundle, tmp_path / "vit", to="timm")
    again = load(tmp_path / "vit")
    assert again.model.config.position == "learned_1d"
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert relative_error(bundle.model(x), again.model(x)) <= 1e-6
    assert bundle.model.config.position == position


def test_to_lucidrains(tmp_path: Path) -> None:
    bundle = tiny_bundle(stem="linear_norm", qkv_bias=False, norm_eps=1e-5)
    convert(bundle, tmp_path / "vit.pt", to="lucidrains")
    peer = import_peer("vit_pytorch").ViT(
        image_size=32, patch_size=8, num_classes=3, dim=128, depth=2, heads=2, dim_head=64, mlp_dim=512
    )
    peer.load_state_dict(torch.load(tmp_path / "vit.pt", weights_only=True))
    assert_same_logits(bundle, peer)


def test_to_google_needs_its_gelu_or_approximate(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"activation='gelu' \(the target has 'gelu_tanh'\); allow it with"):
        convert(tiny_bundle(), tmp_path / "vit.npz", to="google")
    assert not (tmp_path / "vit.npz").exists()
    done = convert(tiny_bundle(), tmp_path / "vit.npz", to="google", approximate=True)
    assert 1e-6 < done.change < 1e-2
    assert done.differences == ["activation='gelu' (the target has 'gelu_tanh')"]
    exact = convert(tiny_bundle(activation="gelu_tanh"), tmp_path / "exact.npz", to="google")
    assert exact.change <= 1e-6


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2_backbones(activation: Any, registers: int, tmp_path: Path) -> None:
    """Meta's code is not on PyPI; the names and a round trip are checked."""
    covers = "class" if registers else None
    fields = {"classes": 0, "registers": registers, "position_covers": covers, "layer_scale": 1e-5, "mlp_width": 96}
    config = ViTConfig(**{**TINY, **fields, "activation": activation})
    model = ViT(config)
    scramble(model)
    convert(Bundle(model.eval(), Preprocess(size=(32, 32))), tmp_path / "dino.pth", to="dinov2")
    names = set(torch.load(tmp_path / "dino.pth", weights_only=True))
    assert {"mask_token", "blocks.0.ls1.gamma", "norm.weight"} <= names
    assert ("register_tokens" in names) == bool(registers)
    assert ("blocks.0.mlp.w12.weight" in names) == (activation == "swiglu")
    again = load(tmp_path / "dino.pth", heads=2)
    assert again.provenance["family"] == "dinov2"
    assert again.model.config == config
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again.model(x), model(x))


def test_round_trip_through_all_formats(tmp_path: Path) -> None:
    """bundle -> timm -> transformers -> torchvision -> bundle: the weights are bit-identical."""
    bundle = tiny_bundle()
    first = {name: tensor.clone() for name, tensor in bundle.model.state_dict().items()}
    convert(bundle, tmp_path / "a", to="bundle")
    convert(load(tmp_path / "a"), tmp_path / "b.safetensors", to="timm")
    convert(load(tmp_path / "b.safetensors", heads=2), tmp_path / "c", to="transformers")
    convert(load(tmp_path / "c"), tmp_path / "d.pth", to="torchvision")
    last = load(tmp_path / "d.pth", heads=2).model.state_dict()
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize(
    ("fields", "to", "words"),
    [
        ({"norm_order": "post"}, "timm", r"timm cannot express norm_order='post' \(supported: 'pre'\)"),
        ({"registers": 2}, "torchvision", "registers=2"),
        ({"pool": "patches"}, "timm", r"timm cannot express pool='patches' \(supported: 'cls' or 'mean' or 'map'\)$"),
        ({"pool": "patches"}, "transformers", r"cannot express pool='patches' \(supported: 'cls'\)$"),
        ({"pool": "patches", "head_layers": (0, 1)}, "google", r"google cannot express .*pool='patches' \(sup"),
        ({"position": "rope_2d"}, "google", "position='rope_2d'"),
        ({}, "lucidrains", "stem='conv'.*qkv_bias=True"),
        ({"norm_eps": 1e-3}, "timm", "timm has no plain ViT|would differ slightly"),
        ({}, "onnx", "no format is called 'onnx'; choose one of bundle, google"),
    ],
)
def test_what_a_target_cannot_express(fields: dict[str, Any], to: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        convert(tiny_bundle(**fields), tmp_path / "out", to=to)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layers", [(), (-2, -1)], ids=str)
def test_logits_per_patch_as_a_bundle(layers: tuple[int, ...], tmp_path: Path) -> None:
    bundle = tiny_bundle(pool="patches", head_layers=layers, registers=1)
    assert convert(bundle, tmp_path / "copy", to="bundle").change == 0
    again = load(tmp_path / "copy").model
    assert again.config == bundle.model.config.resolved()
    assert again.config.head_layers == ((0, 1) if layers else ())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again(x), bundle.model(x))
    config = json.loads((tmp_path / "copy" / "config.json").read_text(encoding="utf-8"))
    assert set(config) == {"vitrail"}, "timm cannot express it, so it gets no keys"


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    bundle = tiny_bundle()
    with torch.no_grad():
        bundle.model.head.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="not finite, so nothing was written"):
        convert(bundle, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
