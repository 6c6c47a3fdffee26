"""Stems: five patch embeddings, from images (B, C, H, W) to tokens (B, N, D).

Axes: B batch, C channels, H W image, h w patch, N patches (row by row).

In every stem `proj.weight` has the shape of a convolution kernel, (D, C, h, w), so that `linear`, `conv` and (except
for its norms) `linear_norm` share weights.

The ResNet is the "BiT" one in the form the paper's hybrids use: weight-standardised convolutions, GroupNorm, TF's SAME
padding, the stride on the 3×3 convolution. Names follow timm. Without an encoder (`depth = 0`) it is the whole model.
"""

from collections.abc import Callable
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.config import GROUPS, ResNet, ViTConfig
from vitrail.models.position import resample_kernel

Order = Literal["chw", "hwc"]
"""The layout of a flattened patch: channels first (as in a convolution kernel) or channels last."""


# ── patches ──


def patchify(x: Tensor, patch: tuple[int, int], order: Order = "chw") -> Tensor:
    """Split (B, C, H, W) into (B, N, C·h·w), patches in row-major order."""
    B, C, H, W = x.shape
    h, w = patch
    x = x.reshape(B, C, H // h, h, W // w, w)
    axes = (0, 2, 4, 1, 3, 5) if order == "chw" else (0, 2, 4, 3, 5, 1)
    return x.permute(axes).reshape(B, (H // h) * (W // w), C * h * w)


def unpatchify(
    patches: Tensor, grid: tuple[int, int], patch: tuple[int, int], channels: int, order: Order = "chw"
) -> Tensor:
    """Invert `patchify`: (B, N, C·h·w) to (B, C, H, W)."""
    B, (rows, columns), (h, w) = patches.shape[0], grid, patch
    if order == "chw":
        x = patches.reshape(B, rows, columns, channels, h, w).permute(0, 3, 1, 4, 2, 5)
    else:
        x = patches.reshape(B, rows, columns, h, w, channels).permute(0, 5, 1, 3, 2, 4)
    return x.reshape(B, channels, rows * h, columns * w)


# ── ResNet ──


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad as TensorFlow's SAME does: an odd pixel goes to the bottom and the right."""
    heights, widths = (max(0, (-(-n // stride) - 1) * stride + kernel - n) for n in x.shape[-2:])
    if not heights and not widths:
        return x
    return F.pad(x, (widths // 2, widths - widths // 2, heights // 2, heights - heights // 2), value=value)


class StdConv(nn.Conv2d):
    """A weight-standardised convolution: kernels have zero mean and unit variance."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, google: bool) -> None:
        super().__init__(inputs, outputs, kernel, stride, bias=False)
        self.google = google

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (B, C, H, W) with the standardised kernels."""
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, correction=0)
        spread = variance.sqrt() + 1e-5 if self.google else (variance + 1e-8).sqrt()
        x = pad_same(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, (self.weight - mean) / spread, stride=self.stride)


class ConvNorm(nn.Module):
    """A standardised convolution and its GroupNorm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, google: bool) -> None:
        super().__init__()
        self.conv = StdConv(inputs, outputs, kernel, stride, google)
        self.norm = nn.GroupNorm(GROUPS, outputs, eps=1e-6 if google else 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, outputs, H / stride, W / stride)."""
        return cast("Tensor", self.norm(self.conv(x)))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with a shortcut; the output has 4 × `channels`."""

    def __init__(self, inputs: int, channels: int, stride: int, google: bool, first: bool) -> None:
        super().__init__()
        eps = 1e-6 if google else 1e-5
        self.conv1 = StdConv(inputs, channels, 1, 1, google)
        self.norm1 = nn.GroupNorm(GROUPS, channels, eps=eps)
        self.conv2 = StdConv(channels, channels, 3, stride, google)
        self.norm2 = nn.GroupNorm(GROUPS, channels, eps=eps)
        self.conv3 = StdConv(channels, 4 * channels, 1, 1, google)
        self.norm3 = nn.GroupNorm(GROUPS, 4 * channels, eps=eps)
        self.downsample = ConvNorm(inputs, 4 * channels, 1, stride, google) if first else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, 4·channels, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        x = self.norm3(self.conv3(x))
        return F.relu(x + shortcut)


class ResNetStage(nn.Module):
    """Bottlenecks at one resolution; only the first has a stride."""

    def __init__(self, inputs: int, channels: int, depth: int, stride: int, google: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            Bottleneck(inputs, channels, stride, google, first=True),
            *(Bottleneck(4 * channels, channels, 1, google, first=False) for _ in range(depth - 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks in order."""
        return cast("Tensor", self.blocks(x))


class ResNetBackbone(nn.Module):
    """Map images (B, C, H, W) to a feature map (B, out_channels, H / stride, W / stride)."""

    def __init__(self, channels: int, config: ResNet) -> None:
        super().__init__()
        google, root = config.numerics == "google", config.root_channels
        self.pooled = config.root_stride == 4
        self.stem = ConvNorm(channels, root, 7 if self.pooled else 3, min(2, config.root_stride), google)
        self.stages = nn.ModuleList()
        inputs = root
        for i, depth in enumerate(config.depths):
            self.stages.append(ResNetStage(inputs, root * 2**i, depth, 1 if i == 0 else 2, google))
            inputs = 4 * root * 2**i

    def forward(self, x: Tensor) -> Tensor:
        """Compute the feature map."""
        x = F.relu(self.stem(x))
        if self.pooled:
            # All values are non-negative after ReLU, so zero padding never wins the max.
            x = F.max_pool2d(pad_same(x, 3, 2), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return x


# ── stems ──


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
    """A ResNet whose feature map is split into patches, of 1×1 in all the paper's hybrids except R+Ti/16.

    Without an encoder there is no projection: the feature map is the output.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        resnet = config.stem_resnet
        self.backbone = ResNetBackbone(config.channels, resnet)
        patch = config.patch_size[0] // resnet.stride, config.patch_size[1] // resnet.stride
        self.proj = _projection(config, resnet.out_channels, patch) if config.depth else None

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches."""
        feature_map = self.backbone(x)
        return _sequence(feature_map if self.proj is None else self.proj(feature_map))


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
