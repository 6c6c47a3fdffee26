"""Locate a checkpoint's weights: one file, several shards, or a folder with configs."""

from pathlib import Path
from typing import NamedTuple

from vitrail.checkpoints.files import SUFFIXES, read_json
from vitrail.checkpoints.folders import FolderInfo, read_folder_info
from vitrail.errors import CheckpointError

_PREFERRED = ("model.safetensors", "pytorch_model.bin")
"""The weight files of transformers and timm; other files in the folder belong to training."""


class Source(NamedTuple):
    """The weight files of a checkpoint, and the configs next to them."""

    files: tuple[Path, ...]
    info: FolderInfo


def find(path: Path) -> Source:
    """Find the weights in a folder, and read the configs next to them."""
    if path.is_file():
        return Source((path,), read_folder_info(path.parent))
    if index := sorted(path.glob("*.index.json")):
        return Source(_shards(index[0]), read_folder_info(path))
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files and (path / "best").is_dir():
        raise CheckpointError(f"{path} is a run folder; its best model is {path / 'best'}")
    if not files:
        raise CheckpointError(f"{path} has no weight file ({', '.join(SUFFIXES)})")
    preferred = [file for name in _PREFERRED for file in files if file.name == name]
    # The same weights are often there twice, also in an older format.
    best = preferred[:1] or [file for file in files if file.suffix == ".safetensors"] or files
    if len(best) > 1:
        raise CheckpointError(f"{path} has several weight files ({', '.join(f.name for f in best)}); pass one of them")
    return Source((best[0],), read_folder_info(path))


def _shards(index: Path) -> tuple[Path, ...]:
    """Return the shards of a large checkpoint."""
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(name, str) for name in shard_of.values()):
        raise CheckpointError(f"{index} has no valid weight_map")
    files = tuple(index.parent / Path(name).name for name in sorted(set(shard_of.values())))
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{index.parent} lacks {', '.join(missing)}, which {index.name} lists; download it too")
    return files
