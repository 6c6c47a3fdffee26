"""Compare an exported model with the original, on images in batches of several sizes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.acceleration.agreement import Agreement, Compare, compare_outputs
from vitrail.acceleration.export.dynamic_size import SIZES, resized_copy
from vitrail.acceleration.export.graph import Graph
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig

BATCHES = (1, 2, 8, 21)
"""Batch sizes to check; none is the traced one."""
TOLERANCE = 1e-4
"""Largest allowed difference of outputs, relative to the largest output.

Rounding causes about 2e-6 with random weights; the margin is for trained models, whose values vary more. This detects
a wrong graph or a doubled weight, but may miss a single weight that is off by 1%.
"""


class Check(NamedTuple):
    """The outputs of an exported model compared with the original in float32."""

    images: int
    difference: float
    """Largest difference of outputs (of features, if the model has no head)."""
    relative: float
    """The same, relative to the largest output."""
    agreement: Agreement
    """The same for the model's task."""
    varied: bool
    """Whether the outputs differ between images; if not, the check shows little."""

    @property
    def passed(self) -> bool:
        """Whether the outputs are equal up to rounding; False for NaN."""
        return self.relative <= TOLERANCE


def check_outputs(
    graph: Graph, preprocess: Preprocess, exported: Callable[[Tensor], Tensor], compare: Compare = compare_outputs
) -> Check:
    """Compare the outputs of an exported model with those of the original; `compare` does it for the model's task.

    A graph for any image size is compared at several sizes, with copies of the model that were resized. The original
    runs as in normal use rather than through the graph, so that an error in the exported preprocessing is
    also found.
    """
    models = [graph.model, *(resized_copy(graph.model, factors) for factors in SIZES if graph.dynamic_size)]
    expected, actual = [], []
    with torch.inference_mode():
        for model in models:
            pixels = random_images(model.config, sum(BATCHES))
            expected += [model(preprocess.normalise(batch)) for batch in pixels.split(BATCHES)]
            actual += [exported(batch) for batch in graph.inputs(pixels, preprocess).split(BATCHES)]
    return _compared(torch.cat(expected), torch.cat(actual), compare)


def _compared(expected: Tensor, actual: Tensor, compare: Compare) -> Check:
    if not expected.isfinite().all():
        raise CheckpointError(
            "the model's outputs are not finite, so nothing was written; check it with vitrail inspect"
        )
    if actual.shape != expected.shape:
        raise CheckpointError(
            f"the exported model returns shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    difference = float((actual - expected).abs().max())
    return Check(
        images=len(expected),
        difference=difference,
        relative=difference / max(float(expected.abs().max()), 1e-12),
        agreement=compare(expected, actual),
        varied=bool((expected - expected[:1]).abs().max() > 1e-6),
    )


def random_images(config: ViTConfig, count: int) -> Tensor:
    """Return random images (B, C, H, W), from coarse blocks to fine noise: noise alone looks the same to a model."""
    generator = torch.Generator().manual_seed(0)
    images = []
    for number in range(count):
        cells = tuple(max(1, side // 2 ** (number % 6)) for side in config.image_size)
        blocks = torch.rand(1, config.channels, *cells, generator=generator)
        images.append(F.interpolate(blocks, config.image_size, mode="nearest"))
    return (torch.cat(images) * 255).round().to(torch.uint8)
