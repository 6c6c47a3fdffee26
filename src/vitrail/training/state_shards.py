"""The slices of a sharded training state on disk: torch.distributed.checkpoint with its safetensors storage, no pickle.

Every rank writes one file. The files open on any number of ranks, and so does the single file of an unsharded run.
"""

import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from vitrail.training.sharding import ShardGroup
from vitrail.training.slices import on_cpu
from vitrail.training.state import State

NOT_SHARED = "a rank does not see it; put the run folder on a disk that all machines share"
VISIBLE_WITHIN = 60.0
"""Seconds until a new folder is visible on all machines: NFS caches for 30 s and more that a name does not exist."""


def cpu_copies(tensors: Mapping[str, Tensor], shards: ShardGroup) -> dict[str, Tensor]:
    """Copy a sharded state to the CPU, where later steps do not change it."""
    return {name: on_cpu(tensor, shards.mesh) for name, tensor in tensors.items()}


def prepare_folder(folder: Path, shards: ShardGroup, *, is_main: bool) -> None:
    """Create an empty folder that every rank sees; a failure of one is an `OSError` on every rank.

    All ranks have to call it. A killed run may have left files there.
    """
    error: OSError | None = None
    if is_main:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as raised:
            error = raised
    _raise_together(error, shards)
    _raise_together(None if appears(folder) else OSError(NOT_SHARED), shards)


def appears(folder: Path, seconds: float = VISIBLE_WITHIN) -> bool:
    """Return whether this rank sees a folder that another one has made; a network disk may take a while."""
    give_up = time.monotonic() + seconds
    while not folder.is_dir():
        if time.monotonic() > give_up:
            return False
        time.sleep(min(1.0, seconds / 10))
    return True


def _raise_together(error: OSError | None, shards: ShardGroup) -> None:
    errors: list[OSError | None] = [None] * dist.get_world_size(shards.group)
    dist.all_gather_object(errors, error, group=shards.group)
    first = next((raised for raised in errors if raised is not None), None)
    if first is not None:
        raise first


def save_slices(folder: Path, tensors: Mapping[str, Tensor], shards: ShardGroup) -> None:
    """Write this rank's slices and wait for those of all ranks; a failure of one is an `OSError` on every rank."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer, process_group=shards.group)
    except CheckpointException as failed:
        reasons = [error for error, _ in failed.failures.values()]
        cause = next((error for error in reasons if isinstance(error, OSError)), OSError(str(reasons[0])))
        raise cause from None


def load_slices(folder: Path, state: State, shards: ShardGroup) -> dict[str, Tensor]:
    """Read this rank's slices of a saved state; all ranks have to call it."""
    reader = HuggingFaceStorageReader(str(folder))
    parameters = state.trained()
    like = dict(state.tensors())
    targets: dict[str, Tensor] = {}
    for name, (shape, dtype) in _contents(reader).items():
        template = like.get(name)
        if template is None and name.startswith("optimizer/"):
            template = parameters.get(name.removeprefix("optimizer/").rpartition("/")[0])
        if template is not None and template.shape == shape:
            targets[name] = torch.zeros_like(template, dtype=dtype, requires_grad=False)
        else:  # a step count of the optimizer, or a tensor that this model does not have
            targets[name] = torch.zeros(shape, dtype=dtype)
    load(targets, storage_reader=reader, process_group=shards.group)
    return targets


def load_whole(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a saved state in this process."""
    reader = HuggingFaceStorageReader(str(folder))
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in _contents(reader).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is, on purpose
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _contents(reader: HuggingFaceStorageReader) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shapes and dtypes of all tensors of a saved state."""
    entries = reader.read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
