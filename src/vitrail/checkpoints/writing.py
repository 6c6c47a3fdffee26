"""Write files and folders atomically."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vitrail.checkpoints.keys import Weights
from vitrail.data.sources.contents import CONTENTS
from vitrail.errors import CheckpointError
from vitrail.io import flush, follow_umask, full_disk_hint

CHECKPOINT_FILES = ("config.json", "model.safetensors", "README.md", "preprocessor_config.json", CONTENTS)
"""The files of a checkpoint that vitrail writes; only these may be overwritten."""


@contextmanager
def atomic_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder; on success, flush it to disk and rename it to `target`.

    On an error `target` is unchanged.
    """
    target = Path(os.path.abspath(target))
    check_target(target, overwrite=overwrite, folder=True)
    with _explained(target), _parents_made(target):
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            yield temporary
            for file in temporary.rglob("*"):
                flush(file)
            flush(temporary)
            follow_umask(temporary, *temporary.iterdir())
            if target.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
                target.rename(old / target.name)
                try:
                    temporary.rename(target)
                except BaseException:  # also Ctrl-C: restore the old folder
                    (old / target.name).rename(target)
                    raise
                finally:
                    shutil.rmtree(old, ignore_errors=True)
            else:
                temporary.rename(target)
            flush(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def recover(target: Path) -> None:
    """Clean up after a killed process: delete unfinished folders, and restore one that was being replaced.

    No other process may be writing the folder.
    """
    for old in target.parent.glob(f".{target.name}-old-*"):
        if not target.exists() and (old / target.name).is_dir():
            (old / target.name).rename(target)
    for stray in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(stray, ignore_errors=True)


@contextmanager
def atomic_file(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary path; on success, flush the file to disk and rename it to `target`."""
    target = Path(os.path.abspath(target))
    check_target(target, overwrite=overwrite, folder=False)
    with _explained(target), _parents_made(target):
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            temporary = Path(folder) / target.name
            yield temporary
            flush(temporary)
            follow_umask(temporary)
            temporary.replace(target)
        flush(target.parent)


def check_target(target: Path, *, overwrite: bool, folder: bool) -> None:
    """Raise if writing the target would destroy existing data."""
    if not os.path.lexists(target):
        return
    if target.is_dir() != folder:
        there, made = ("folder", "file") if target.is_dir() else ("file", "folder")
        raise CheckpointError(f"{target} is a {there}, and what would be written is a {made}; choose another name")
    if folder and not any(target.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"{target} exists already; choose another name, or replace it with --overwrite (overwrite=True)"
        )
    others = sorted(entry.name for entry in target.iterdir() if entry.name not in CHECKPOINT_FILES) if folder else []
    if others:
        raise CheckpointError(
            f"{target} contains more than a checkpoint ({', '.join(others[:3])}{', …' if len(others) > 3 else ''}), "
            f"and replacing it would delete that; choose another name"
        )


@contextmanager
def _parents_made(target: Path) -> Iterator[None]:
    """Create the parent folders of a target, and remove them again on an error."""
    missing = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:  # also Ctrl-C: leave nothing behind
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turn write errors into a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise _not_written(target, error.strerror or error, full_disk_hint(error)) from None
    except SafetensorError as error:
        raise _not_written(target, error, full_disk_hint(error)) from None


def _not_written(target: Path, reason: object, hint: str) -> CheckpointError:
    return CheckpointError(f"{target} could not be written: {reason}; nothing was changed{hint}")


def write_safetensors(path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors."""
    seen: set[int] = set()
    kept: Weights = {}
    for name, tensor in weights.items():
        # The format does not support two names for the same data.
        kept[name] = tensor.clone() if tensor.numel() and tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    save_file(kept, path, metadata=dict(metadata or {}))


def write_npz(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors as a NumPy archive."""
    arrays = {name: tensor.float().numpy() for name, tensor in weights.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def write_torch(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors as torch.save does."""
    try:
        torch.save(dict(weights), path)
    except RuntimeError as error:  # how torch reports a full disk
        raise OSError(str(error).split("\n", 1)[0]) from None
