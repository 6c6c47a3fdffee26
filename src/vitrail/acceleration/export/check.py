"""Does what was written answer as the model does? Asked with images, in batches of several sizes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.acceleration.export.graph import Graph
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError

BATCHES = (1, 2, 8, 21)
"""Sizes of the batches asked; none is the one that was traced."""
TOLERANCE = 1e-4
"""How much the answers may differ, as a share of the largest one, before they count as wrong.

Rounding makes about 2e-6 with random weights; the room is for trained models, whose numbers are less even. So a wrong
graph is found, and a weight that is doubled, but a single weight that is off by a hundredth can stay below it.
"""


class Check(NamedTuple):
    """How what was written answers, beside the model itself in float32."""

    images: int
    logits: float
    """The largest difference of logits (of features, where there is no head)."""
    relative: float
    """The same, as a share of the largest one."""
    probabilities: float
    """The largest difference of probabilities."""
    same_top1: int
    """Images whose first answer is the same."""
    varied: bool
    """Whether the model answers differently to different images; else the check shows little."""

    @property
    def passed(self) -> bool:
        """Whether the answers are the same but for rounding; written so that "not a number" is not."""
        return self.relative <= TOLERANCE


def check_answers(graph: Graph, preprocess: Preprocess, written: Callable[[Tensor], Tensor]) -> Check:
    """Compare the answers of what was written with those of the model that was traced into it.

    The model is asked in the way it is used, and not through the graph: so a preprocessing that went wrong on its way
    into the graph is found, too.
    """
    pixels = random_images(graph, sum(BATCHES))
    given = pixels if graph.preprocess is not None else preprocess.normalise(pixels)
    if graph.channels_last:
        given = given.permute(0, 2, 3, 1).contiguous()
    with torch.inference_mode():
        wanted = torch.cat([graph.model(preprocess.normalise(part)) for part in pixels.split(BATCHES)])
        found = torch.cat([written(part) for part in given.split(BATCHES)])
    if not wanted.isfinite().all():
        raise CheckpointError(
            "the model's answers are not finite, so nothing was written; look at it with vitrail inspect"
        )
    if found.shape != wanted.shape:
        raise CheckpointError(f"what was written answers with {tuple(found.shape)} and not {tuple(wanted.shape)}")
    difference = float((found - wanted).abs().max())
    return Check(
        images=len(pixels),
        logits=difference,
        relative=difference / max(float(wanted.abs().max()), 1e-12),
        probabilities=float((found.softmax(dim=-1) - wanted.softmax(dim=-1)).abs().max()),
        same_top1=int((found.argmax(dim=-1) == wanted.argmax(dim=-1)).view(len(pixels), -1).all(dim=1).sum()),
        varied=bool((wanted - wanted[:1]).abs().max() > 1e-6),
    )


def random_images(graph: Graph, count: int) -> Tensor:
    """Return random images (B, C, H, W), from coarse blots to fine noise: noise alone looks all alike to a model."""
    config = graph.model.config
    generator = torch.Generator().manual_seed(0)
    images = []
    for number in range(count):
        cells = tuple(max(1, side // 2 ** (number % 6)) for side in config.image_size)
        blots = torch.rand(1, config.channels, *cells, generator=generator)
        images.append(F.interpolate(blots, config.image_size, mode="nearest"))
    return (torch.cat(images) * 255).round().to(torch.uint8)
