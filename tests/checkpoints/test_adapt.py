"""Adapting a checkpoint, and the record of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.peers import import_peer, scramble

from vitrail.checkpoints.adapt import adapt, changed_channels
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import load
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

TINY: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 2, "heads": 3, "classes": 3}


def tiny(**fields: Any) -> Bundle:
    model = ViT(ViTConfig(**{**TINY, **fields}))
    scramble(model)
    preprocess = Preprocess(size=(32, 32), resize="cover", resize_to=(36, 36), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    return Bundle(model.eval(), preprocess, ("a", "b", "c"))


def test_everything_at_once_is_recorded_and_survives_saving(tmp_path: Path) -> None:
    tiny().save(tmp_path / "small")
    bundle = load(
        tmp_path / "small", classes=("x", "y"), image_size=(48, 96), patch_size=12, channels=1, position_method="google"
    )
    assert bundle.model(torch.randn(2, 1, 48, 96)).shape == (2, 2)
    assert bundle.preprocess.size == (48, 96)
    assert bundle.preprocess.resize_to == (54, 108)
    assert bundle.preprocess.channels == 1
    assert bundle.preprocess.mean == pytest.approx((sum(IMAGENET_MEAN) / 3,))
    assert bundle.classes == ("x", "y")
    done = [
        "channels 3 -> 1 by repeat",
        "patch 8x8 -> 12x12 by pseudo-inverse",
        "position 4x4 -> 4x8 by google",
        "image 32x32 -> 48x96",
        "head reset 3 -> 2",
    ]
    assert bundle.provenance["adapted"] == done
    bundle.save(tmp_path / "adapted")
    again = load(tmp_path / "adapted")
    assert again.provenance["adapted"] == done
    x = torch.randn(1, 1, 48, 96)
    assert torch.equal(again.model(x), bundle.model(x))


def test_nothing_to_do_changes_nothing() -> None:
    bundle = tiny()
    before = {name: tensor.clone() for name, tensor in bundle.model.state_dict().items()}
    adapt(bundle, classes=3, image_size=32, patch_size=8, channels=3)
    assert "adapted" not in bundle.provenance
    assert all(torch.equal(before[name], tensor) for name, tensor in bundle.model.state_dict().items())
    assert bundle.classes == ("a", "b", "c")


@pytest.mark.parametrize("method", ["repeat", "mean"])
@pytest.mark.parametrize("channels", [1, 2, 4, 13])
def test_grey_images_give_the_same_embedding(method: Any, channels: int) -> None:
    """An image with identical channels keeps its embedding, where the method guarantees it."""
    kernel = torch.randn(5, 3, 4, 4)
    grey = torch.randn(1, 1, 4, 4)
    before = (grey.expand(-1, 3, -1, -1) * kernel).sum(dim=(1, 2, 3))
    changed = changed_channels(kernel, channels, method)
    assert changed.shape == (5, channels, 4, 4)
    if method == "mean" or channels == 1:
        after = (grey.expand(-1, channels, -1, -1) * changed).sum(dim=(1, 2, 3))
        assert torch.allclose(before, after, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 2, 4, 13])
def test_repeat_is_timms(channels: int) -> None:
    kernel = torch.randn(5, 3, 4, 4)
    expected = import_peer("timm.models._manipulate").adapt_input_conv(channels, kernel.clone())
    assert torch.allclose(changed_channels(kernel, channels, "repeat"), expected, atol=1e-6)


def test_hybrids_change_their_root() -> None:
    bundle = tiny(image_size=32, patch_size=16, stem="resnet", resnet={"depths": (1, 1, 1), "width_factor": 0.5})
    adapt(bundle, channels=4)
    assert bundle.model(torch.randn(2, 4, 32, 32)).shape == (2, 3)
    assert bundle.preprocess.channels == 4


def test_impossible_adaptations() -> None:
    with pytest.raises(CheckpointError, match="normalises whole patches"):
        adapt(tiny(stem="linear_norm"), channels=1)
    with pytest.raises(CheckpointError, match="choose repeat or mean"):
        adapt(tiny(), channels=1, channel_method="sum")
    with pytest.raises(ConfigError, match="not a multiple of patch"):
        adapt(tiny(), image_size=33)
    with pytest.raises(CheckpointError, match="2 class names for a head of 3 outputs"):
        Bundle(tiny().model, Preprocess(), ("a", "b"))
