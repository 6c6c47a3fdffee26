"""Trace a model once, for any batch size; every export format starts from this graph."""

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
"""Traced batch size. Not 1, which torch would specialise, and not one that the check uses."""


class Graph(nn.Module):
    """A model, optionally with normalisation of uint8 pixels, channels first or last."""

    def __init__(self, model: ViT, preprocess: Preprocess | None, *, channels_last: bool = False) -> None:
        super().__init__()
        self.model, self.preprocess, self.channels_last = model, preprocess, channels_last

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits for pixels 0…255 if there is preprocessing, or else for normalised images."""
        if self.channels_last:
            pixels = pixels.permute(0, 3, 1, 2)
        if self.preprocess is not None:
            pixels = self.preprocess.normalise(pixels)
        logits: Tensor = self.model(pixels)
        return logits

    def example(self, batch: int) -> Tensor:
        """Return an example input."""
        config = self.model.config
        sides = (config.channels, *config.image_size)
        shape = (*sides[1:], sides[0]) if self.channels_last else sides
        dtype = torch.float32 if self.preprocess is None else torch.uint8
        return torch.zeros(batch, *shape, dtype=dtype)


def output_name(model: ViT) -> str:
    """Return the name of a graph's output."""
    return "logits" if model.config.classes else "features"


def trace(graph: Graph) -> ExportedProgram:
    """Trace a graph for any batch size, in float32 and eval mode."""
    graph.model = _for_inference(graph.model)
    try:
        # Without gradients: with them torch traces other strides after attention, which the ONNX exporter rejects.
        with torch.no_grad(), quiet():
            return torch.export.export(
                graph.eval(), (graph.example(TRACED_BATCH),), dynamic_shapes={INPUT: {0: Dim(BATCH, min=1)}}
            )
    except Exception as error:  # torch has no common base class for tracing errors
        raise CheckpointError(f"torch cannot trace this model into a graph ({first_line(error)})") from None


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error message, or the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _for_inference(model: ViT) -> ViT:
    """Return the model if it is on the CPU, in float32 and in eval mode, or else such a copy."""
    like = next(model.parameters())
    if like.device.type == "cpu" and like.dtype == torch.float32 and not any(m.training for m in model.modules()):
        return model
    return copy.deepcopy(model).to("cpu", torch.float32).eval()
