"""Slices of tensors (`DTensor`): gather them, cut them, copy them to the CPU. Others stay as they are."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def gather_into(whole: nn.Module, module: nn.Module) -> None:
    """Copy the weights of a sharded module into an unsharded one, on every rank; all ranks have to call it."""
    slices = module.state_dict()
    for name, tensor in whole.state_dict().items():
        tensor.copy_(gathered(slices[name]))


def is_slice(tensor: Tensor) -> bool:
    """Whether a tensor is a slice of a larger one."""
    return isinstance(tensor, DTensor)


def gathered(tensor: Tensor) -> Tensor:
    """Return a whole tensor; if it is sharded, all ranks have to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def resharded(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's slice of a tensor that every rank has whole; nothing is sent."""
    if not isinstance(like, DTensor):
        return tensor
    local = DTensor.from_local(tensor, like.device_mesh, run_check=False)  # replicated
    return local.redistribute(placements=like.placements)


def on_cpu(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a copy on the CPU that later steps do not change; a slice stays a slice."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    local = tensor.to_local().detach().to("cpu", copy=True)
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
