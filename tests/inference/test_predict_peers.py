"""Predictions compared to the library that the weights come from, on the same images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.peers import import_peer, scramble
from torch import Tensor

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import load
from vitrail.inference.bulk_prediction import predict_files

SIZES = [(100, 75), (75, 100), (32, 32), (20, 16), (203, 61), (17, 133), (256, 257), (64, 48)]
CLASSES = 7


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Synthetic photographs: waves, edges and noise, in several sizes, modes and formats."""
    folder = tmp_path_factory.mktemp("images")
    paths = []
    for number in range(24):
        size = SIZES[number % len(SIZES)]
        x, y = np.meshgrid(np.linspace(0, 6, size[0]), np.linspace(0, 4, size[1]))
        waves = np.stack([np.sin(x * y + number), np.cos(x + number * y), np.sin(3 * x) * np.cos(y)], axis=-1)
        noise = np.random.default_rng(number).normal(0, 15, waves.shape)
        image = Image.fromarray((127 + 90 * waves + noise).clip(0, 255).astype(np.uint8))
        mode, suffix = (("RGB", "jpg"), ("RGB", "png"), ("L", "jpg"))[number // len(SIZES)]
        paths.append(folder / f"{number:02d}.{suffix}")
        image.convert(mode).save(paths[-1])
    return paths


def compare(bundle: Bundle, images: list[Path], expected: Tensor, output: Path) -> None:
    """Check that every row agrees with the peer."""
    predict_files(bundle, list(map(str, images)), output=output, top=CLASSES, batch=5, workers=0, device="cpu")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["path"] for row in rows] == list(map(str, images))
    names = bundle.classes or tuple(map(str, range(CLASSES)))
    worst = 0.0
    for row, probabilities in zip(rows, expected.softmax(dim=1), strict=True):
        assert row["classes"][0] == names[int(probabilities.argmax())]
        actual = dict(zip(row["classes"], row["probabilities"], strict=True))
        worst = max(worst, *(abs(actual[name] - float(p)) for name, p in zip(names, probabilities, strict=True)))
    assert worst <= 1e-4
    assert len({row["classes"][0] for row in rows}) > 1, "equal predictions for all images prove little"


def through(peer: Any, transform: Any, images: list[Path]) -> Tensor:
    with torch.no_grad():
        return torch.cat([peer(transform(Image.open(path).convert("RGB"))[None]) for path in images])


def test_timm(images: list[Path], tmp_path: Path) -> None:
    timm = import_peer("timm")
    inputs = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
    peer = scramble(timm.create_model("vit_base_patch16_224", **inputs))
    timm.models.save_for_hf(peer, tmp_path / "timm", model_args=inputs)
    config = timm.data.resolve_data_config({"input_size": (3, 32, 32)}, model=peer)
    transform = timm.data.create_transform(**config, is_training=False)
    compare(load(tmp_path / "timm"), images, through(peer, transform, images), tmp_path / "rows.jsonl")


@pytest.mark.parametrize("size", [224, 32])
def test_torchvision(size: int, images: list[Path], tmp_path: Path) -> None:
    vision_transformer = import_peer("torchvision.models.vision_transformer").VisionTransformer
    peer = scramble(vision_transformer(size, size // 4, 2, 2, 128, 192, num_classes=CLASSES))
    torch.save(peer.state_dict(), tmp_path / "vit.pth")
    preset = import_peer("torchvision.transforms._presets").ImageClassification
    bicubic = import_peer("torchvision.transforms").InterpolationMode.BICUBIC
    # torchvision's models with sizes other than 224 come from SWAG, which resizes this way.
    transform = preset(crop_size=224) if size == 224 else preset(crop_size=32, resize_size=32, interpolation=bicubic)
    compare(load(tmp_path / "vit.pth", heads=2), images, through(peer, transform, images), tmp_path / "rows.jsonl")


@pytest.mark.slow
def test_transformers(images: list[Path], tmp_path: Path) -> None:
    module = import_peer("transformers")
    labels = {number: f"kind {number}" for number in range(CLASSES)}
    config = module.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8,
        id2label=labels, label2id={name: number for number, name in labels.items()},
    )  # fmt: skip
    peer = scramble(module.ViTForImageClassification(config))
    peer.save_pretrained(tmp_path / "hf")
    # The processor that resizes with Pillow; the one with torch differs by 1/255 in places.
    processor = import_peer("transformers.models.vit.image_processing_pil_vit").ViTImageProcessorPil(
        size={"height": 32, "width": 32}
    )
    processor.save_pretrained(tmp_path / "hf")
    with torch.no_grad():
        inputs = [processor(Image.open(path).convert("RGB"), return_tensors="pt") for path in images]
        expected = torch.cat([peer(**arguments).logits for arguments in inputs])
    bundle = load(tmp_path / "hf")
    assert bundle.classes == tuple(labels.values())
    compare(bundle, images, expected, tmp_path / "rows.jsonl")
