"""Patch embedding filters (the paper's figure 7, left): their principal components, as images."""

from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import nn

from vitrail.checkpoints.bundle import Bundle
from vitrail.errors import ConfigError, Diverged
from vitrail.explanations.figures.figure import LINE, PAPER, Absent, Figure
from vitrail.metrics.components import principal_components
from vitrail.models.stems import StdConv
from vitrail.models.vit import ViT

COUNT = 28
"""The number of components in the paper."""
NAME, TITLE = "filters", "Principal components of the patch embedding filters"
TILE, GAP, MARGIN = 96, 8, 16
"""In pixels: the side of one filter, the gap between two, and the margin."""
SHAPE = 7 / 4
"""Columns per row, as in the paper."""


class Filters(NamedTuple):
    """Principal components of a layer's kernels, by decreasing variance."""

    components: NDArray[np.float64]
    """(count, height, width, channels), each of length 1; its sign makes the largest weight positive."""
    explained: NDArray[np.float64]
    """(count,), the fraction of the kernels' variance that each explains."""
    kernels: int
    """Number of kernels."""
    layer: str
    """The name of the layer, for captions."""
    of_patches: bool
    """Whether they belong to the patch embedding, not to the first convolution of a stem."""


def filters(model: ViT, count: int = COUNT) -> Filters:
    """Return the first principal components of the kernels applied to the image.

    There are fewer than `count` if the kernels span fewer dimensions, and none if all kernels are equal.
    """
    if count < 1:
        raise ConfigError(f"count is {count}; it should be 1 or more")
    weight, layer = _first_kernels(model)
    kernels = weight.detach().permute(0, 2, 3, 1)
    if not kernels.isfinite().all():
        raise Diverged("the kernels of the patch embedding are not finite; the weights are corrupt")
    chosen = principal_components(kernels.flatten(1), count)
    components = chosen.directions.reshape(len(chosen.directions), *kernels.shape[1:]).numpy()
    of_patches = model.config.stem not in ("conv_stem", "resnet")
    return Filters(components, chosen.explained.numpy(), len(kernels), layer, of_patches)


def filters_figure(bundle: Bundle, *, count: int = COUNT) -> Figure | Absent:
    """Draw the first principal components of the kernels applied to the image."""
    chosen = filters(bundle.model, count)
    if not len(chosen.components):
        return Absent(NAME, TITLE, f"all kernels of {chosen.layer} are equal, so they have no principal components.")
    return Figure(NAME, TITLE, _caption(chosen), image=_sheet(chosen.components))


def _first_kernels(model: ViT) -> tuple[torch.Tensor, str]:
    """Return the kernels (count, channels, height, width) applied to the image, and their layer's name."""
    stem = model.patch_embed
    match model.config.stem:
        case "conv_stem":
            layers = cast("nn.Sequential", stem.backbone)
            conv = cast("nn.Conv2d", layers[0].conv)
            return conv.weight, "the first convolution of its stem (this model has no single patch projection)"
        case "resnet":
            root = cast("StdConv", cast("nn.Module", cast("nn.Module", stem.backbone).stem).conv)
            weight = root.weight.double()
            variance, mean = torch.var_mean(weight, dim=(1, 2, 3), keepdim=True, correction=0)
            # The layer standardises each kernel, so the figure ignores mean and scale, too.
            return (weight - mean) / (variance.sqrt() + 1e-5), (
                "its ResNet's first convolution, standardised as the layer does (a hybrid has no patch projection that "
                "is applied to pixels)"
            )
        case "linear_norm":
            return cast("nn.Conv2d", stem.proj).weight, "the patch embedding, which follows a LayerNorm"
        case _:
            return cast("nn.Conv2d", stem.proj).weight, "the patch embedding"


def _caption(filters: Filters) -> str:
    count, height, width, channels = filters.components.shape
    if channels == 1:
        drawn = "Grey is a weight of zero, white is positive, black negative"
    elif channels == 3:
        drawn = "Each is shown in the colours it reads, and grey is a weight of zero"
    else:
        which = "the first three are shown as red, green and blue" if channels > 3 else "the first is shown"
        drawn = f"Of {channels} channels {which}, and grey is a weight of zero"
    first = f"The first {count} principal components" if count > 1 else "The only principal component"
    meaning = (
        "The first components of a trained model are smooth, like a basis for the fine structure within a patch; noise "
        "means that the model has learned little."
        if filters.of_patches
        else "Trained kernels detect edges, blobs and colour contrasts; noise means that the model has learned little."
    )
    return (
        f"{first} of the {filters.kernels:,} kernels ({height}×{width} pixels) of {filters.layer}, by decreasing "
        f"variance; together they explain {filters.explained.sum():.0%} of the kernels' variance. {drawn}; each is "
        f"scaled to full contrast. {meaning}"
    )


def _sheet(components: NDArray[np.float64]) -> Image.Image:
    count, height, width, channels = components.shape
    columns = _columns(count)
    rows = -(-count // columns)
    zoom = max(1, TILE // max(height, width))
    across, down = width * zoom, height * zoom
    sheet = Image.new(
        "RGB",
        (2 * MARGIN + columns * (across + GAP) - GAP, 2 * MARGIN + rows * (down + GAP) - GAP),
        PAPER,
    )
    seen = components[..., :3] if channels >= 3 else np.repeat(components[..., :1], 3, axis=-1)
    largest = np.abs(seen).max(axis=(1, 2, 3), keepdims=True)
    pixels = (127.5 + 127.5 * seen / np.where(largest > 0, largest, 1)).round().astype(np.uint8)
    pen = ImageDraw.Draw(sheet)
    for number, tile in enumerate(pixels):
        row, column = divmod(number, columns)
        left, top = MARGIN + column * (across + GAP), MARGIN + row * (down + GAP)
        # An outline, because a filter may be as white as the background.
        pen.rectangle((left - 1, top - 1, left + across, top + down), outline=LINE)
        sheet.paste(Image.fromarray(tile).resize((across, down), Image.Resampling.NEAREST), (left, top))
    return sheet


def _columns(count: int) -> int:
    """Choose the number of filters per row: about as in the paper, with few empty cells at the end.

    >>> _columns(28), _columns(9), _columns(5), _columns(1)
    (7, 3, 5, 1)
    """
    best = (count * SHAPE) ** 0.5
    near = range(max(1, round(best) - 1), round(best) + 3)
    return min((c for c in near if c <= count), key=lambda c: (-count % c, abs(c - best)))
