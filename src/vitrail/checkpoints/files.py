"""Weight files, opened without running anything in them, and written so that a half-written one is never seen."""

import json
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitrail.checkpoints.keys import Weights
from vitrail.errors import CheckpointError

SUFFIXES = (".npz", ".safetensors", ".pth", ".pt", ".bin")
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "module")
"""Where training scripts put the weights inside a checkpoint; averaged weights first."""


def read_weights(path: Path) -> Weights:
    """Read every tensor of a file, whatever its kind; the kind is seen from its content, not from its name."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if not start:
        raise CheckpointError(f"{path} is empty; was it copied whole?")
    if zipfile.is_zipfile(path):
        names = zipfile.ZipFile(path).namelist()
        if any(name.endswith("data.pkl") for name in names):
            return _read_pickle(path)
        if names and all(name.endswith(".npy") for name in names):
            return _read_npz(path)
        raise CheckpointError(f"{path} is a zip file, but neither a PyTorch checkpoint nor a NumPy archive")
    if start[8:9] == b"{":
        return _read_safetensors(path)
    if start[:2] == b"PK":
        raise CheckpointError(
            f"{path} begins like a PyTorch or NumPy file but its end is missing; was it copied whole?"
        )
    if start[:1] == b"\x80":
        return _read_pickle(path)
    raise CheckpointError(f"{path} is no weight file we know ({', '.join(SUFFIXES)})")


def _read_safetensors(path: Path) -> Weights:
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is a damaged safetensors file ({error}); copy it again") from None


def _read_npz(path: Path) -> Weights:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _from_numpy(arrays[name]) for name in arrays.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(f"{path} is a damaged NumPy archive ({error}); copy it again") from None


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Turn an array into a tensor; JAX stores bfloat16 as two raw bytes a number, which NumPy does not know."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def _read_pickle(path: Path) -> Weights:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path} holds Python objects beside tensors, and opening it could run code, so it was not opened. Where "
            f"you trust it, save the weights alone: torch.save(model.state_dict(), 'weights.pth')"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        first = str(error).split("\n", 1)[0]
        raise CheckpointError(f"{path} is a damaged PyTorch file ({first}); copy it again") from None
    return _tensors_in(content, path)


def _tensors_in(content: object, path: Path) -> Weights:
    """Find the state dict in what a training script saved."""
    if isinstance(content, Mapping):
        for key in _NESTED:
            inner = content.get(key)
            if isinstance(inner, Mapping) and any(isinstance(value, Tensor) for value in inner.values()):
                return _tensors_in(inner, path)
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise CheckpointError(f"{path} holds no tensors by name; was it saved with torch.save(model.state_dict())?")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); was it copied whole?") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should hold a JSON object, found {type(content).__name__}")
    return content


@contextmanager
def whole_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder to write into; when all went well, flush it to disk and give it its name.

    Whatever happens before, `target` stays as it was.
    """
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists already; choose another name, or allow it to be overwritten")
    with _explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            yield temporary
            for file in temporary.rglob("*"):
                _flush(file)
            _flush(temporary)
            temporary.chmod(0o755)
            if target.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
                target.rename(old / target.name)
                temporary.rename(target)
                shutil.rmtree(old, ignore_errors=True)
            else:
                temporary.rename(target)
            _flush(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def whole_file(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary name to write to; when all went well, flush the file to disk and give it its name."""
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists already; choose another name, or allow it to be overwritten")
    with _explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            temporary = Path(folder) / target.name
            yield temporary
            _flush(temporary)
            temporary.replace(target)
        _flush(target.parent)


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turn what the disk refuses into one sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error.strerror or error}; nothing was changed"
        ) from None
    except SafetensorError as error:
        raise CheckpointError(f"{target} could not be written: {error}; nothing was changed") from None


def _flush(path: Path) -> None:
    """Make sure that a file or folder is on the disk and not only on its way there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_safetensors(path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors."""
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, metadata=dict(metadata or {}))


def write_npz(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors as a NumPy archive."""
    arrays = {name: tensor.float().numpy() for name, tensor in weights.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
