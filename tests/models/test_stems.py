"""The stems: shared weights, and the layers of the hybrid."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.peers import relative_error, scramble

from vitrail.models.config import ResNet, ViTConfig
from vitrail.models.stages import stages
from vitrail.models.stems import ResNetBackbone, StdConv, pad_same
from vitrail.models.vit import ViT


@pytest.mark.parametrize("channels", [1, 3, 4, 13])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_conv_are_equivalent(channels: int, bias: bool) -> None:
    size: dict[str, Any] = {"image_size": (12, 30), "patch_size": (4, 6), "width": 24, "depth": 1, "heads": 2}
    config = ViTConfig(**size, channels=channels, patch_bias=bias, classes=5)
    conv = scramble(ViT(config))
    linear = ViT(config.replace(stem="linear")).eval()
    linear.load_state_dict(conv.state_dict())
    x = torch.randn(3, channels, 12, 30)
    with torch.no_grad():
        assert torch.allclose(linear.patch_embed(x), conv.patch_embed(x), atol=1e-5)
        assert relative_error(linear(x), conv(x)) <= 1e-5


@pytest.mark.parametrize(
    ("size", "kernel", "stride"), [(224, 7, 2), (112, 3, 2), (7, 3, 2), (8, 1, 2), (9, 3, 1), (5, 3, 4)]
)
def test_same_padding_is_tensorflows(size: int, kernel: int, stride: int) -> None:
    """ceil(size / stride) outputs, and of an odd number of padded pixels the last comes after."""
    padded = pad_same(torch.ones(1, 1, size, size), kernel, stride)[0, 0]
    out = -(-size // stride)
    assert (padded.shape[0] - kernel) // stride + 1 == out
    total = padded.shape[0] - size
    assert padded[total // 2, total // 2] == 1
    if total:
        assert padded[-1, -1] == 0
    assert total == max(0, (out - 1) * stride + kernel - size)


def test_weight_standardisation_of_google() -> None:
    conv = StdConv(3, 4, 3, 1, google=True)
    x = torch.randn(2, 3, 6, 6)
    kernel = conv.weight.detach().double()
    flat = kernel.flatten(1)
    std = (flat - flat.mean(1, keepdim=True)).square().mean(1).sqrt()
    standard = (kernel - flat.mean(1)[:, None, None, None]) / (std[:, None, None, None] + 1e-5)
    assert torch.allclose(conv(x), F.conv2d(x, standard.float(), padding=1), atol=1e-5)


@pytest.mark.parametrize(
    ("depths", "factor", "channels", "stride"),
    [((), 1.0, 64, 4), ((3, 4, 9), 1.0, 1024, 16), ((2, 2, 2, 2), 1.0, 2048, 32), ((1, 1), 0.5, 256, 8)],
)
def test_shape_of_the_feature_map(depths: tuple[int, ...], factor: float, channels: int, stride: int) -> None:
    config = ResNet(depths=depths, width_factor=factor)
    assert (config.out_channels, config.stride) == (channels, stride)
    with torch.device("meta"):
        out = ResNetBackbone(3, config)(torch.empty(1, 3, 64, 96))
    assert out.shape == (1, channels, 64 // stride, 96 // stride)


def test_hybrids_split_the_feature_map_into_patches() -> None:
    """R+Ti/16: a feature map of stride 4, patches of 8×8 cells, 32 pixels per token."""
    model = ViT(
        ViTConfig(image_size=64, patch_size=32, stem="resnet", resnet={"depths": ()}, width=24, heads=2, depth=1)
    )
    assert model.patch_embed.proj.weight.shape == (24, 64, 8, 8)
    assert model.patch_embed(torch.randn(1, 3, 64, 64)).shape == (1, 4, 24)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stem": "conv"}, {"feature map": (48, 4, 8)}),
        ({"stem": "linear"}, {"patches": (32, 192)}),
        ({"stem": "linear_norm"}, {"patches": (32, 192), "patches, normalised": (32, 192)}),
        (
            {"stem": "conv_stem"},
            {
                "convolution 1": (12, 16, 32),
                "convolution 2": (24, 8, 16),
                "convolution 3": (48, 4, 8),
                "feature map": (48, 4, 8),
            },
        ),
        (
            {"stem": "resnet", "resnet": {"depths": (1, 2), "width_factor": 0.5}},
            {
                "ResNet root": (32, 16, 32),
                "ResNet root, pooled": (32, 8, 16),
                "ResNet stage 1": (128, 8, 16),
                "ResNet stage 2": (256, 4, 8),
                "feature map": (48, 4, 8),
            },
        ),
    ],
    ids=lambda value: value.get("stem", "") if isinstance(value, dict) else None,
)
def test_stages_list_the_tensors_of_the_stem(options: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    """Only tensors that the model computes are listed, with their real shapes."""
    config = ViTConfig(image_size=(32, 64), patch_size=8, width=48, depth=1, heads=3, classes=2, **options)
    model = ViT(config).eval()
    actual = stages(model, torch.zeros(1, 3, 32, 64))
    inside = {stage.name: stage.shape[1:] for stage in actual[1:-6]}
    assert inside == expected
    assert actual[0].shape == (1, 3, 32, 64)
    assert (actual[-6].name, actual[-6].shape) == ("patch embeddings", (1, 32, 48))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_stages_of_a_hybrid_with_only_a_root() -> None:
    config = ViTConfig(
        image_size=32, patch_size=8, width=48, depth=1, heads=3, classes=2, stem="resnet", resnet={"depths": ()}
    )
    names = {stage.name: stage.shape for stage in stages(ViT(config).eval(), torch.zeros(1, 3, 32, 32))}
    assert names["ResNet root, pooled"] == (1, 64, 8, 8)
    assert names["feature map"] == (1, 48, 4, 4)
