"""`Figure`: a drawing with a caption; `Absent`: the reason why a model has none."""

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vitrail.checkpoints.writing import atomic_file, check_target
from vitrail.errors import CheckpointError


@dataclass(frozen=True)
class Figure:
    """A drawing, as pixels or SVG."""

    name: str
    """The file's stem: filters, positions, distance or rollout."""
    title: str
    caption: str
    """What it shows, and how it was computed."""
    image: Image.Image | None = None
    svg: str | None = None

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{self.name}.svg" if self.image is None else f"{self.name}.png"

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the drawing into a folder atomically, and return its path."""
        path = Path(folder) / self.file_name
        with atomic_file(path, overwrite=overwrite) as temporary:
            if self.image is not None:
                self.image.save(temporary, "PNG", optimize=True)
            else:
                temporary.write_text(self.svg or "", encoding="utf-8")
        return path


@dataclass(frozen=True)
class Absent:
    """A figure that a model does not have."""

    name: str
    title: str
    reason: str
    """Why there is none, and what there is instead."""


def check_writable(folder: Path, names: list[str], *, overwrite: bool) -> None:
    """Raise, before anything is computed, if writing would overwrite other files."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, but figures need a folder; choose another name")
    for name in names:
        check_target(folder / name, overwrite=overwrite, folder=False)
