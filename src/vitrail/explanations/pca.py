"""PCA of patch features: the first three principal components as red, green and blue."""

import torch
from torch import Tensor

from vitrail.explanations.tokens import check_ready
from vitrail.models.vit import ViT


@torch.no_grad()
def pca_maps(model: ViT, pixels: Tensor, layer: int | None = None) -> Tensor:
    """Return the patches' features after a layer (and the final norm) as colours from 0 to 1: (B, rows, columns, 3)."""
    check_ready(model)
    grid = model.features(pixels, layer=layer, as_grid=True).tokens
    colours = [as_colours(image.flatten(1).T) for image in grid]
    return torch.stack(colours).reshape(len(grid), *model.config.grid, 3).to(pixels.device)


def as_colours(features: Tensor) -> Tensor:
    """Return each row of (N, D) as a colour (N, 3): its first three principal components, scaled to 0 to 1.

    The sign of a component is arbitrary; its largest entry is made positive. A missing third (or second, or first)
    component is 0.5.
    """
    numbers = features.double().cpu()  # on the CPU: same colours on all devices, and some lack float64
    centred = numbers - numbers.mean(dim=0)
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    # Beyond the rank there is only rounding noise, which would be scaled to full colour.
    kept = int((sizes[:3] > 1e-6 * numbers.abs().max()).sum())
    directions = directions[:kept]
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    places = centred @ (directions * largest.sign()).T
    low, high = places.amin(dim=0), places.amax(dim=0)
    colours = torch.full((len(features), 3), 0.5, dtype=torch.float64)
    colours[:, :kept] = (places - low) / (high - low)
    return colours.float()
