"""A torch.export archive, which opens without this package."""

import io
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitrail.acceleration.packages import quiet


def write_archive(program: ExportedProgram, path: Path) -> None:
    """Write a traced graph via memory: torch's own writer kills the process if the disk is full."""
    buffer = io.BytesIO()
    with quiet():
        torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())


class Archive:
    """A loaded torch.export archive."""

    def __init__(self, path: Path) -> None:
        with quiet():
            self.module = torch.export.load(path).module()

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the outputs for a batch."""
        with torch.inference_mode():
            outputs: Tensor = self.module(pixels)
        return outputs
