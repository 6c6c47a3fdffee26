"""The ResNet of the hybrid: weight-standardised convolutions, GroupNorm, TF's SAME padding, ReLU after the sum.

It is the "BiT" ResNet in the form the paper's hybrids use (stride on the 3×3 convolution). Names follow timm.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.config import GROUPS, ResNet


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
        self.stem = ConvNorm(channels, root, 7, 2, google)
        self.stages = nn.ModuleList()
        inputs = root
        for i, depth in enumerate(config.depths):
            self.stages.append(ResNetStage(inputs, root * 2**i, depth, 1 if i == 0 else 2, google))
            inputs = 4 * root * 2**i

    def forward(self, x: Tensor) -> Tensor:
        """Compute the feature map."""
        x = F.relu(self.stem(x))
        # All values are non-negative after ReLU, so zero padding never wins the max.
        x = F.max_pool2d(pad_same(x, 3, 2), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return x
