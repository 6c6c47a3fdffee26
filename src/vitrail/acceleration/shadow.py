"""Matrices in low precision beside the ones that are trained, so that a step need not cast them in the forward pass.

    shadow = Shadow(model, torch.bfloat16)
    loss(shadow(pixels)).backward()      under autocast, as with the model itself
    shadow.gather()                      gradients go to the model's own parameters
    optimizer.step()                     of the model's own parameters
    shadow.refresh()

The numbers are those of autocast, bit for bit: it rounds the same matrices, and returns gradients of the same kind.
"""

import copy

import torch
from torch import Tensor, nn

from vitrail.models.vit import ViT


class Shadow(nn.Module):
    """A model that computes with cast matrices and shares every other parameter with the one that is trained."""

    def __init__(self, model: ViT, dtype: torch.dtype) -> None:
        super().__init__()
        cast = {
            id(parameter): parameter
            for module in model.modules()
            if type(module) in (nn.Linear, nn.Conv2d)
            for parameter in module.parameters(recurse=False)
        }
        # What is in a copy's memory is taken for copied already: the parameters that are not cast stay the model's.
        memo: dict[int, object] = {id(p): p for p in model.parameters() if id(p) not in cast}
        memo |= {id(buffer): buffer for buffer in model.buffers()}
        pairs = [(master, nn.Parameter(master.detach().to(dtype), master.requires_grad)) for master in cast.values()]
        memo |= {id(master): low for master, low in pairs}
        self.model: ViT = copy.deepcopy(model, memo)
        # Not registered, or the trained parameters would count twice.
        self._pairs: tuple[tuple[nn.Parameter, nn.Parameter], ...] = tuple(pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the model returns under autocast."""
        logits: Tensor = self.model(x)
        return logits

    @torch.no_grad()
    def gather(self) -> None:
        """Add the gradients of the cast matrices to those of the trained ones; call it after every backward pass."""
        came = [(master, low.grad) for master, low in self._pairs if low.grad is not None]
        fresh = [(master, grad) for master, grad in came if master.grad is None]
        more = [(master.grad, grad) for master, grad in came if master.grad is not None]
        # All of them in a few kernels, where one for each would be hundreds.
        if fresh:
            made = [torch.empty_like(master) for master, _ in fresh]
            torch._foreach_copy_(made, [grad for _, grad in fresh])
            for (master, _), grad in zip(fresh, made, strict=True):
                master.grad = grad
        if more:
            torch._foreach_add_([total for total, _ in more], [grad for _, grad in more])
        for _, low in self._pairs:
            low.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the trained matrices anew; call it after every step of the optimiser."""
        if self._pairs:
            masters, lows = zip(*self._pairs, strict=True)
            torch._foreach_copy_(lows, masters)
