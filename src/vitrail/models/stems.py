"""Stems: five patch embeddings, from images (B, C, H, W) to tokens (B, N, D).

In every stem `proj.weight` has the shape of a convolution kernel, (D, C, h, w), so that `linear`, `conv` and (except
for its norms) `linear_norm` share weights.
"""

from collections.abc import Callable
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.patches import patchify
from vitrail.models.resample import resample_kernel
from vitrail.models.resnet import ResNetBackbone


class ConvProjection(nn.Module):
    """Project patches with a convolution whose stride equals its kernel size."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.proj = _projection(config, config.channels, config.patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches."""
        return _sequence(self.proj(x))


class LinearProjection(nn.Module):
    """Flatten patches and project them, as in the paper; equivalent to `ConvProjection`."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch = config.patch_size
        self.proj = _projection(config, config.channels, config.patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches."""
        return F.linear(patchify(x, self.patch), self.proj.weight.flatten(1), self.proj.bias)


class NormedLinearProjection(nn.Module):
    """LayerNorm, Linear, LayerNorm on flattened patches with channels last, as in vit-pytorch."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch = config.patch_size
        features = config.channels * config.patch_size[0] * config.patch_size[1]
        self.norm_in = nn.LayerNorm(features, eps=config.norm_eps)
        self.proj = _projection(config, config.channels, config.patch_size)
        self.norm_out = nn.LayerNorm(config.width, eps=config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches."""
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)
        x = F.linear(self.norm_in(patchify(x, self.patch, "hwc")), weight, self.proj.bias)
        return cast("Tensor", self.norm_out(x))


class ConvNormReLU(nn.Module):
    """Convolution, BatchNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=(kernel - 1) // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, outputs, H / stride, W / stride)."""
        return F.relu(self.norm(self.conv(x)))


class EarlyConvolutions(nn.Module):
    """A few strided convolutions, then a 1×1 projection ("Early Convolutions", arXiv 2106.14881)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.backbone = nn.Sequential()
        channels = config.channels
        for layer in config.stem_layers:
            self.backbone.append(ConvNormReLU(channels, layer.channels, layer.kernel, layer.stride))
            channels = layer.channels
        self.proj = _projection(config, channels, (1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches."""
        return _sequence(self.proj(self.backbone(x)))


class Hybrid(nn.Module):
    """A ResNet whose feature map is split into patches, of 1×1 in all the paper's hybrids except R+Ti/16."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        resnet = config.stem_resnet
        self.backbone = ResNetBackbone(config.channels, resnet)
        h, w = config.patch_size
        self.proj = _projection(config, resnet.out_channels, (h // resnet.stride, w // resnet.stride))

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches."""
        return _sequence(self.proj(self.backbone(x)))


STEMS: dict[str, Callable[[ViTConfig], nn.Module]] = {
    "conv": ConvProjection,
    "linear": LinearProjection,
    "linear_norm": NormedLinearProjection,
    "conv_stem": EarlyConvolutions,
    "resnet": Hybrid,
}


def resized_stem(stem: nn.Module, config: ViTConfig) -> nn.Module:
    """Return a stem for another patch size, with kernels resized as in FlexiViT."""
    if config.stem not in ("linear", "conv"):
        raise ConfigError(
            f"the stem {config.stem!r} is bound to its patch size; only 'linear' and 'conv' kernels can be resized, "
            f"so leave patch_size as it is and change image_size"
        )
    old = cast("nn.Conv2d", stem.proj)
    resized = STEMS[config.stem](config)
    proj = cast("nn.Conv2d", resized.proj)
    proj.weight = nn.Parameter(
        resample_kernel(old.weight.detach(), config.patch_size), requires_grad=old.weight.requires_grad
    )
    proj.bias = old.bias
    return resized.train(stem.training)


def _projection(config: ViTConfig, channels: int, patch: tuple[int, int]) -> nn.Conv2d:
    return nn.Conv2d(channels, config.width, patch, stride=patch, bias=config.patch_bias)


def _sequence(feature_map: Tensor) -> Tensor:
    """Flatten a feature map (B, D, rows, columns) to a sequence (B, N, D)."""
    return feature_map.flatten(2).transpose(1, 2)
