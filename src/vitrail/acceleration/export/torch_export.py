"""The graph as an archive of torch.export, which opens without this package."""

import io
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitrail.acceleration.packages import quiet


def write_archive(program: ExportedProgram, path: Path) -> None:
    """Write a traced graph, by way of memory: where the disk is full, torch's own writer ends the whole process."""
    held = io.BytesIO()
    with quiet():
        torch.export.save(program, held)
    path.write_bytes(held.getbuffer())


class Archive:
    """An archive of torch.export that was opened again."""

    def __init__(self, path: Path) -> None:
        with quiet():
            self.module = torch.export.load(path).module()

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the answers to a batch."""
        with torch.inference_mode():
            answers: Tensor = self.module(pixels)
        return answers
