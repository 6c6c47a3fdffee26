"""The graph of a model, from which every other form is made: traced once, for batches of any size."""

import copy

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail.acceleration.packages import quiet
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError
from vitrail.models.vit import ViT

INPUT, BATCH = "pixels", "batch"
TRACED_BATCH = 3
"""The batch that is traced. Not 1, which torch would take for a constant, and not one that the check uses."""


class Graph(nn.Module):
    """A model that may begin with the pixels as they are: uint8, channels first or last."""

    def __init__(self, model: ViT, preprocess: Preprocess | None, *, channels_last: bool = False) -> None:
        super().__init__()
        self.model, self.preprocess, self.channels_last = model, preprocess, channels_last

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits for pixels 0…255 where there is a preprocessing, and for normalised images else."""
        if self.channels_last:
            pixels = pixels.permute(0, 3, 1, 2)
        if self.preprocess is not None:
            pixels = self.preprocess.normalise(pixels)
        logits: Tensor = self.model(pixels)
        return logits

    def example(self, batch: int) -> Tensor:
        """Return input of the right shape and kind."""
        config = self.model.config
        sides = (config.channels, *config.image_size)
        shape = (*sides[1:], sides[0]) if self.channels_last else sides
        kind = torch.float32 if self.preprocess is None else torch.uint8
        return torch.zeros(batch, *shape, dtype=kind)


def output_name(model: ViT) -> str:
    """Return what a graph calls its answer."""
    return "logits" if model.config.classes else "features"


def trace(graph: Graph) -> ExportedProgram:
    """Trace a graph for batches of any size, as it computes in use: float32, without dropout."""
    graph.model = _in_use(graph.model)
    try:
        # Without gradients: with them torch records other strides behind attention, which ONNX then cannot follow.
        with torch.no_grad(), quiet():
            return torch.export.export(
                graph.eval(), (graph.example(TRACED_BATCH),), dynamic_shapes={INPUT: {0: Dim(BATCH, min=1)}}
            )
    except Exception as error:  # torch has no common kind for what it cannot trace
        raise CheckpointError(f"torch cannot trace this model into a graph ({first_line(error)})") from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error that has words in it, or its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _in_use(model: ViT) -> ViT:
    """Return the model if it is as it is used, on the CPU and in float32, and else a copy that is so."""
    like = next(model.parameters())
    if like.device.type == "cpu" and like.dtype == torch.float32 and not any(m.training for m in model.modules()):
        return model
    return copy.deepcopy(model).to("cpu", torch.float32).eval()
