"""The graph as an archive of torch.export, which opens without this package."""

from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitrail.acceleration.packages import quiet


def write_archive(program: ExportedProgram, path: Path) -> None:
    """Write a traced graph."""
    try:
        with quiet():
            torch.export.save(program, path)
    except RuntimeError as error:  # what torch makes of a full disk
        raise OSError(str(error).split("\n", 1)[0]) from None


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
