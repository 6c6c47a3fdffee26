"""Weight files, opened without running anything in them."""

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

from vitrail.checkpoints.dtypes import check_numbers
from vitrail.checkpoints.keys import Weights
from vitrail.errors import CheckpointError
from vitrail.io import ContentError, open_regular
from vitrail.io import read_json as read_any_json

SUFFIXES = (".npz", ".safetensors", ".pth", ".pt", ".bin")
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model", "teacher", "module")
"""Where training scripts put the weights inside a checkpoint; averaged weights first."""
_WRAPPERS = ("module.", "_orig_mod.", "model.", "backbone.")
"""What torch's and other wrappers put before every name."""
LONGEST_REASON = 160
MOST_UNPACKED = 1 << 28
"""Bytes that any compressed file may unpack to; a larger one has to have a size that numbers can be compressed to."""
MOST_COMPRESSED = 20
"""How many times its size a larger compressed file may unpack to. Weights hardly get smaller at all; zeros do."""


class Stored(NamedTuple):
    """What was found in the files of a checkpoint."""

    weights: Weights
    inside: str | None
    """Under which key of a training script's file they were."""
    notes: list[str]
    """What a person should know of them."""


def read_checkpoint(files: Sequence[Path]) -> Stored:
    """Read the tensors of one or several files that make up a checkpoint, without what wrappers add to their names."""
    weights: Weights = {}
    inside = None
    for file in files:
        found, inside = _read_file(file)
        weights |= found
    weights.pop("n_averaged", None)  # torch's AveragedModel counts its updates there
    while prefix := next((p for p in _WRAPPERS if weights and all(name.startswith(p) for name in weights)), None):
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return _stored(weights, inside, files[0])


def _stored(weights: Weights, inside: str | None, file: Path) -> Stored:
    """See to it that all are numbers a model can be made of, and of one kind."""
    check_numbers(weights, file)
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    notes = [] if inside is None else [f"the weights are those under {inside!r} in the file"]
    if len(kinds) > 1:
        weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
        several = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        notes.append(f"the file mixes {several}; all were brought to float32")
    return Stored(weights, inside, notes)


def read_weights(path: Path) -> Weights:
    """Read every tensor of a file, whatever its kind; the kind is seen from its content, not from its name."""
    weights = _read_file(path)[0]
    check_numbers(weights, path)
    return weights


def _read_file(path: Path) -> tuple[Weights, str | None]:
    try:
        with open_regular(path) as file:
            start = file.read(16)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if not start:
        raise CheckpointError(f"{path} is empty; was it copied whole?")
    if zipfile.is_zipfile(path):
        return _read_zip(path)
    if start[8:9] == b"{":
        return _read_safetensors(path), None
    if start[:2] == b"PK":
        raise CheckpointError(
            f"{path} begins like a PyTorch or NumPy file but its end is missing; was it copied whole?"
        )
    if start[:1] == b"\x80":
        return _read_pickle(path)
    raise CheckpointError(f"{path} is no weight file we know ({', '.join(SUFFIXES)})")


def _read_zip(path: Path) -> tuple[Weights, str | None]:
    """Read what torch.save or NumPy has written, after a look at the table of contents."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:  # a damaged directory can fail in any way
        raise CheckpointError(
            f"{path} is a zip file whose directory is damaged ({_first_line(error)}); copy it again"
        ) from None
    names = [member.filename for member in members]
    if any(name.endswith("data.pkl") for name in names):
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise CheckpointError(f"{path} is a PyTorch file that was compressed afterwards; save it with torch.save")
        return _read_pickle(path)
    if not names or not all(name.endswith(".npy") for name in names):
        raise CheckpointError(f"{path} is a zip file, but neither a PyTorch checkpoint nor a NumPy archive")
    unpacked, size = sum(member.file_size for member in members), path.stat().st_size
    if unpacked > max(MOST_UNPACKED, MOST_COMPRESSED * size):
        raise CheckpointError(
            f"{path} would unpack from {size / 1e6:.1f} MB to {unpacked / 1e9:.1f} GB, which weights never do, so it "
            f"was not opened; save them with numpy.savez"
        )
    return _read_npz(path), None


def _read_safetensors(path: Path) -> Weights:
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError, RuntimeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is a damaged safetensors file ({error}); copy it again") from None


def _read_npz(path: Path) -> Weights:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _from_numpy(arrays[name]) for name in arrays.files}
    except Exception as error:  # a damaged header can fail in any way
        raise CheckpointError(
            f"{path} is a NumPy archive that is damaged, or holds other things than numbers ({_first_line(error)})"
        ) from None


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Turn an array into a tensor; JAX stores bfloat16 as two raw bytes a number, which NumPy does not know."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))


def _read_pickle(path: Path) -> tuple[Weights, str | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols, which is of no use to a person
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged file can fail in any way
        if isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{path} holds other Python objects than tensors (or is damaged), and opening it could run code, so it "
                f"was not opened. Where you trust it, save the weights alone: torch.save(model.state_dict(), "
                f"'weights.pth')"
            ) from None
        raise CheckpointError(f"{path} is a damaged PyTorch file ({_first_line(error)}); copy it again") from None
    return _tensors_in(content, path)


def _first_line(error: Exception) -> str:
    # zipfile quotes a header at full length, and that may be most of the file.
    return str(error).strip().split("\n", 1)[0].rstrip(".")[:LONGEST_REASON] or type(error).__name__


def _tensors_in(content: object, path: Path, inside: str | None = None) -> tuple[Weights, str | None]:
    """Find the state dict in what a training script saved."""
    if isinstance(content, Mapping):
        for key in _NESTED:
            inner = content.get(key)
            if isinstance(inner, Mapping) and any(isinstance(value, Tensor) for value in inner.values()):
                return _tensors_in(inner, path, key)
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors, inside
    raise CheckpointError(f"{path} holds no tensors by name; was it saved with torch.save(model.state_dict())?")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        content = read_any_json(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except ContentError as error:
        raise CheckpointError(f"{path} {error}; was it copied whole?") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should hold a JSON object, found {type(content).__name__}")
    return content
