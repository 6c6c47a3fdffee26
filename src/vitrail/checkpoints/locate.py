"""Where a checkpoint's weights are: one file, several that make up one model, or a folder with configs beside them."""

from pathlib import Path
from typing import NamedTuple

from vitrail.checkpoints.files import SUFFIXES, read_json
from vitrail.checkpoints.folders import Known, known_from_folder
from vitrail.errors import CheckpointError

_PREFERRED = ("model.safetensors", "pytorch_model.bin")
"""Where transformers and timm keep the weights; other files beside them belong to training."""


class Source(NamedTuple):
    """A checkpoint's weight files, and what stands beside them."""

    files: tuple[Path, ...]
    known: Known


def find(path: Path) -> Source:
    """Find the weights in a folder, and what a config beside them says."""
    if path.is_file():
        return Source((path,), known_from_folder(path.parent))
    if index := sorted(path.glob("*.index.json")):
        return Source(_shards(index[0]), known_from_folder(path))
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files and (path / "best").is_dir():
        raise CheckpointError(f"{path} is a run; its best model is {path / 'best'}")
    if not files:
        raise CheckpointError(f"{path} holds no weight file ({', '.join(SUFFIXES)})")
    preferred = [file for name in _PREFERRED for file in files if file.name == name]
    # The same weights often lie there twice, in an older format too.
    best = preferred[:1] or [file for file in files if file.suffix == ".safetensors"] or files
    if len(best) > 1:
        raise CheckpointError(
            f"{path} holds several weight files ({', '.join(f.name for f in best)}); name one of them"
        )
    return Source((best[0],), known_from_folder(path))


def _shards(index: Path) -> tuple[Path, ...]:
    """Return the files that a large checkpoint was cut into."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no weight_map that says which file holds which tensor")
    files = tuple(index.parent / Path(name).name for name in sorted(set(places.values())))
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{index.parent} lacks {', '.join(missing)}, which {index.name} names; fetch it too")
    return files
