"""Read weight files without executing any code in them."""

import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitrail.checkpoints.keys import Weights
from vitrail.checkpoints.tensors import check_dtypes
from vitrail.errors import CheckpointError
from vitrail.io import ContentError, open_regular
from vitrail.io import read_json as read_any_json

SUFFIXES = (".npz", ".safetensors", ".pth", ".pt", ".bin")
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model", "teacher", "module")
"""Keys under which training scripts save the weights; averaged weights first."""
_WRAPPERS = ("module.", "_orig_mod.", "model.", "backbone.")
"""Prefixes that torch's and other wrappers add to every name."""
MAX_REASON = 160
MAX_UNPACKED = 1 << 28
"""The unpacked size, in bytes, that is always allowed; above it, `MAX_RATIO` applies."""
MAX_RATIO = 20
"""The largest compression ratio of a large file: weights hardly compress, zip bombs do."""


class Stored(NamedTuple):
    """The weights in the files of a checkpoint."""

    weights: Weights
    inside: str | None
    """The key of the training checkpoint that contained them."""
    notes: list[str]
    """Notes for the user."""


def read_checkpoint(files: Sequence[Path]) -> Stored:
    """Read the tensors of a checkpoint in one or several files; strips the prefixes of wrappers."""
    weights: Weights = {}
    inside = None
    for file in files:
        tensors, inside = _read_file(file)
        weights |= tensors
    weights.pop("n_averaged", None)  # the update counter of torch's AveragedModel
    while prefix := next((p for p in _WRAPPERS if weights and all(name.startswith(p) for name in weights)), None):
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return _stored(weights, inside, files[0])


def _stored(weights: Weights, inside: str | None, file: Path) -> Stored:
    """Check the dtypes, and convert mixed ones to float32."""
    check_dtypes(weights, file)
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    notes = [] if inside is None else [f"the weights were read from the key {inside!r}"]
    if len(kinds) > 1:
        weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
        several = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        notes.append(f"the file mixes {several}; all were converted to float32")
    return Stored(weights, inside, notes)


def read_weights(path: Path) -> Weights:
    """Read all tensors of a file; the format is detected from its content, not its name."""
    weights = _read_file(path)[0]
    check_dtypes(weights, path)
    return weights


def _read_file(path: Path) -> tuple[Weights, str | None]:
    try:
        with open_regular(path) as file:
            start = file.read(16)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if not start:
        raise CheckpointError(f"{path} is empty; was it copied completely?")
    if zipfile.is_zipfile(path):
        return _read_zip(path)
    if start[8:9] == b"{":
        return _read_safetensors(path), None
    if start[:2] == b"PK":
        raise CheckpointError(f"{path} starts like a PyTorch or NumPy file but is truncated; was it copied completely?")
    if start[:1] == b"\x80":
        return _read_pickle(path)
    raise CheckpointError(
        f"{path} is not a checkpoint: its content is neither safetensors, nor a PyTorch file, nor a NumPy archive; was "
        f"it copied completely?"
    )


def _read_zip(path: Path) -> tuple[Weights, str | None]:
    """Read a zip file written by torch.save or NumPy, after checking its directory."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:  # a corrupt directory can raise anything
        raise CheckpointError(
            f"{path} is a zip file with a corrupt directory ({_first_line(error)}); copy it again"
        ) from None
    names = [member.filename for member in members]
    if any(name.endswith("data.pkl") for name in names):
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise CheckpointError(f"{path} is a recompressed PyTorch file; save it with torch.save")
        return _read_pickle(path)
    if not names or not all(name.endswith(".npy") for name in names):
        raise CheckpointError(f"{path} is a zip file, but neither a PyTorch checkpoint nor a NumPy archive")
    unpacked, size = sum(member.file_size for member in members), path.stat().st_size
    if unpacked > max(MAX_UNPACKED, MAX_RATIO * size):
        raise CheckpointError(
            f"{path} would unpack from {size / 1e6:.1f} MB to {unpacked / 1e9:.1f} GB, far more than weights compress, "
            f"so it was not opened; save the weights with numpy.savez"
        )
    return _read_npz(path), None


def _read_safetensors(path: Path) -> Weights:
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError, RuntimeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is a corrupt safetensors file ({error}); copy it again") from None


def _read_npz(path: Path) -> Weights:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _from_numpy(arrays[name]) for name in arrays.files}
    except Exception as error:  # a corrupt header can raise anything
        raise CheckpointError(
            f"{path} is a NumPy archive that is corrupt or contains something other than numbers ({_first_line(error)})"
        ) from None


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Convert an array to a tensor; JAX stores bfloat16 as two raw bytes, because NumPy has no such dtype."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))


def _read_pickle(path: Path) -> tuple[Weights, str | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a corrupt file can raise anything
        if isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{path} contains Python objects other than tensors (or is corrupt), and opening it could run code, so "
                f"it was not opened. If you trust it, save only the weights: torch.save(model.state_dict(), "
                f"'weights.pth')"
            ) from None
        raise CheckpointError(f"{path} is a corrupt PyTorch file ({_first_line(error)}); copy it again") from None
    return _tensors_in(content, path)


def _first_line(error: Exception) -> str:
    # zipfile quotes the whole header, which may be most of the file.
    return str(error).strip().split("\n", 1)[0].rstrip(".")[:MAX_REASON] or type(error).__name__


def _tensors_in(content: object, path: Path, inside: str | None = None) -> tuple[Weights, str | None]:
    """Find the state dict in a training checkpoint."""
    if isinstance(content, Mapping):
        for key in _NESTED:
            inner = content.get(key)
            if isinstance(inner, Mapping) and any(isinstance(value, Tensor) for value in inner.values()):
                return _tensors_in(inner, path, key)
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors, inside
    raise CheckpointError(f"{path} has no named tensors; was it saved with torch.save(model.state_dict())?")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        content = read_any_json(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except ContentError as error:
        raise CheckpointError(f"{path} {error}; was it copied completely?") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should contain a JSON object, found {type(content).__name__}")
    return content
