"""Import the other libraries, and helpers to compare with them."""

import importlib
import re
import warnings
from types import ModuleType

import torch
from torch import Tensor, nn


def import_peer(name: str) -> ModuleType:
    """Import a peer library, with its warnings ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _mend_torchvision()
        return importlib.import_module(name)


def _mend_torchvision() -> None:
    """Define the two operators that torchvision's wheel lacks with a CPU build of torch, if they are missing.

    The wheel from PyPI is built for CUDA. With a CPU torch, its compiled operators do not load, and the import fails
    because it registers shape functions for operators that do not exist. No test of ours calls them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEEP_ALIVE.append(library)
        importlib.import_module("torchvision")


_KEEP_ALIVE: list[torch.library.Library] = []


@torch.no_grad()
def scramble(model: nn.Module, seed: int = 0) -> nn.Module:
    """Randomise everything in the state dict, also what is initialised to 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if "running_var" in name:
            tensor.copy_(1 + 0.5 * noise.abs())
        elif tensor.ndim == 1:
            tensor.copy_(0.2 * noise + (1 if name.endswith("weight") else 0))
        elif name in ("pos_embed", "cls_token") or "pos_embedding" in name:
            tensor.copy_(0.5 * noise)
        else:
            tensor.copy_(noise * (1.0 / tensor[0].numel()) ** 0.5)
    return model.eval()


def rename(state: dict[str, Tensor], table: dict[str, str]) -> dict[str, Tensor]:
    """Rename every key by the first pattern that matches it fully; a key without a match is an error."""
    renamed = {}
    for key, tensor in state.items():
        for pattern, replacement in table.items():
            if re.fullmatch(pattern, key):
                renamed[re.sub(pattern, replacement, key)] = tensor
                break
        else:
            raise KeyError(f"no pattern for {key}")
    return renamed


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the maximum difference, relative to the largest expected value."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert expected.abs().max() > 0.01, "an output of zeros proves nothing"
    return float((actual - expected).abs().max() / expected.abs().max())
