"""Mean attention distance (the paper's figure 11): how far each head attends, in pixels of the image.

For one head of one layer: special tokens are dropped and every row is renormalised to sum to 1. Each query's distance
is the mean of the Euclidean distances between its patch's centre and every patch's centre (its own included, at
distance 0), weighted by its row. The head's distance is the mean over all queries of all images. A query without any
attention to patches has no distance and is left out of the mean.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.charts.lines import Series, scatter
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.errors import Diverged, InputError
from vitrail.explanations.attention import iter_attention
from vitrail.explanations.figures.figure import Absent, Figure
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import choose_device, eval_mode

NAME, TITLE = "distance", "How far each head looks"
IMAGES = 128
"""The number of images in the paper."""
AT_ONCE = 2**24
"""Attention weights of a layer in memory at a time, unless one image has more: 64 MB."""


@torch.no_grad()
def attention_distance(model: ViT, batches: Iterable[Tensor]) -> NDArray[np.float64]:
    """Return the mean attention distance of every layer and head, (depth, heads), in pixels.

    `batches` are normalised images (B, C, H, W) on the model's device. One layer's attention is held at a time, so
    memory grows neither with depth nor with the number of batches. A head without any attention to patches gets NaN.
    """
    config, parameter = model.config, next(model.parameters())
    between = patch_distances(config).to(parameter.device, torch.float32)
    sums = np.zeros((config.depth, config.heads))
    counts = np.zeros((config.depth, config.heads))
    with eval_mode(model):
        for batch in batches:
            layer = 0
            for tokens, weights in iter_attention(model, batch):
                if not tokens.isfinite().all():
                    raise Diverged(f"the output of block {layer + 1} is not finite; the model's weights are corrupt")
                summed, counted = _summed(weights[:, :, config.layout.patches, config.layout.patches], between)
                del weights  # free the memory for the next layer's
                sums[layer] += summed
                counts[layer] += counted
                layer += 1  # noqa: SIM113 - enumerate() would keep the last layer's weights alive
    if not counts.any():
        raise InputError("attention distance needs at least one image, found none")
    with np.errstate(invalid="ignore"):
        return sums / counts


def patch_distances(config: ViTConfig) -> Tensor:
    """Return the distance in pixels between the centres of all pairs of patches, (N, N), float64."""
    (rows, columns), (height, width) = config.grid, config.patch_size
    y, x = torch.meshgrid(
        torch.arange(rows, dtype=torch.float64) * height,
        torch.arange(columns, dtype=torch.float64) * width,
        indexing="ij",
    )
    y, x = y.flatten(), x.flatten()
    return torch.hypot(y[:, None] - y[None, :], x[:, None] - x[None, :])


def even_distance(config: ViTConfig) -> float:
    """Return the distance of a head with uniform attention, in pixels."""
    return float(patch_distances(config).mean())


def distance_figure(
    bundle: Bundle, pixels: Tensor, *, device: str = "auto", standalone: bool = True
) -> Figure | Absent:
    """Plot the attention distance of each head: `pixels` (N, C, H, W), uint8, as returned by `preprocess.pixels`.

    At most 128 images are used, as in the paper. `standalone=False` is for a page that has the charts' style.
    """
    config = bundle.model.config
    if not config.depth:
        return Absent(NAME, TITLE, "this model is a ResNet, which has no attention.")
    if config.patches == 1:
        return Absent(NAME, TITLE, "the whole image is one patch, so distances cannot be plotted.")
    if pixels.ndim != 4 or not len(pixels):
        raise InputError(
            f"attention distance needs pixels of at least one image, (images, channels, height, width), found "
            f"{tuple(pixels.shape)}"
        )
    place = choose_device(device)
    model = bundle.model.to(place)
    taken = pixels[:IMAGES]
    distances = attention_distance(model, _batches(taken, bundle.preprocess, config, place))
    svg = _drawn(distances, even_distance(config), standalone=standalone)
    return Figure(NAME, TITLE, _caption(config, distances, len(taken)), svg=svg)


def _summed(among: Tensor, between: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum the distances of attention among patches (B, heads, N, N) over images and queries, and count the queries.

    Both are (heads,).
    """
    total = among.sum(dim=-1)  # (B, heads, N), how much of each row goes to patches
    weighted = (among * between).sum(dim=-1)
    valid = total > 0
    each = torch.where(valid, weighted / total.clamp_min(torch.finfo(total.dtype).tiny), 0)
    # On the CPU, because some devices have no float64.
    return each.cpu().double().sum(dim=(0, 2)).numpy(), valid.cpu().double().sum(dim=(0, 2)).numpy()


def _batches(pixels: Tensor, preprocess: Preprocess, config: ViTConfig, device: torch.device) -> Iterator[Tensor]:
    at_once = max(1, min(32, AT_ONCE // (config.heads * config.tokens**2)))
    for some in pixels.split(at_once):
        yield preprocess.normalise(some.to(device))


def _drawn(distances: NDArray[np.float64], even: float, *, standalone: bool) -> str:
    """Plot one point per head over the index of its block."""
    depth, heads = distances.shape
    blocks = [float(number) for number in range(1, depth + 1)]
    # One series per head: a series of very many points would be thinned out.
    points = [Series("" if head else "a head", blocks, distances[:, head].tolist()) for head in range(heads)]
    lines = [
        Series("a head with uniform attention", [0.5, depth + 0.5], [even, even], colour=2, dashed=True),
        Series("mean of a block's heads", blocks, _means(distances).tolist(), colour=3) if heads > 1 else None,
    ]
    return scatter(
        points,
        title="Mean attention distance",
        lines=[line for line in lines if line is not None],
        x_label="block",
        y_label="pixels",
        x_unit="integer",
        x_low=0.5,  # there is no block 0
        y_low=0.0,
        # In a page the text must be legible on a phone, too.
        width=640 if standalone else 440,
        height=380 if standalone else 300,
        standalone=standalone,
    )


def _means(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over each block's heads, ignoring NaN."""
    valid = np.isfinite(distances)
    sums, counts = np.where(valid, distances, 0).sum(axis=1), valid.sum(axis=1)
    means: NDArray[np.float64] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means


def _each(count: int, what: str) -> str:
    return f"each of {count} {what}s" if count > 1 else f"the one {what}"


def _caption(config: ViTConfig, distances: NDArray[np.float64], images: int) -> str:
    (rows, columns), (height, width) = config.grid, config.patch_size
    few = f" (the paper uses {IMAGES})" if images < IMAGES else ""
    special = "; special tokens are dropped and each row is renormalised" if config.special_tokens else ""
    silent = int(np.isnan(distances).sum())
    left_out = f" {silent} of {distances.size} heads do not attend to any patch and have no point." if silent else ""
    return (
        f"Mean attention distance of {_each(config.heads, 'head')} in {_each(config.depth, 'block')}, in pixels of the "
        f"{config.image_size[0]}×{config.image_size[1]} image: the distance between the centres of the query patch and "
        f"the attended patch ({rows}×{columns} patches of {height}×{width} pixels), weighted by attention, averaged "
        f"over all patches of {images:,} image{'s' * (images != 1)}{few}{special}. A head with uniform attention "
        f"would have {even_distance(config):.1f} pixels. Low points are heads with local attention; in trained models "
        f"the first blocks have both local and global heads, and the last ones attend globally.{left_out}"
    )
