"""Muon: orthogonalised updates for the matrices inside blocks, AdamW for everything else.

Jordan et al. 2024 replace a matrix's momentum U·S·Vᵀ by approximately U·Vᵀ, with five Newton-Schulz iterations. Updates
are scaled by 0.2·√(longer side) as in arXiv 2502.16982, which matches AdamW's update size, so one learning rate and one
weight decay fit both. Matrices of one shape are processed together, so that a GPU launches fewer kernels.
"""

import math
from typing import Any

import torch
from torch import Tensor

from vitrail.training.slices import gathered, is_slice, resharded

POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""p(s) = a·s + b·s³ + c·s⁵ acts on the singular values; five iterations bring all but the smallest near 1."""
STEPS = 5
ADAMW_RMS = 0.2
"""Typical RMS of AdamW's updates, relative to the learning rate."""
TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """Takes parameter groups; `matrices` in each says whether Muon or AdamW updates it.

    In a group of matrices, `stacked` says of how many matrices of equal height each parameter consists: queries, keys
    and values are one parameter but three matrices. If the attribute `found_inf` is 1, a step changes nothing, without
    a device synchronisation; torch's fused AdamW supports this for GradScaler.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        fused: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "momentum": momentum})
        others = [group for group in self.param_groups if not group["matrices"]]
        # Shares its groups (the learning rate is set for both) and its state (saved with that of the matrices).
        self._others = torch.optim.AdamW(others, lr, betas=betas, eps=eps, fused=fused) if others else None
        if self._others is not None:
            self._others.state = self.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        bad: Tensor | None = getattr(self, "found_inf", None)
        self.step_matrices(bad)
        if self._others is not None:
            self._others.found_inf = bad  # type: ignore[attr-defined]
            self._others.step()

    @torch.no_grad()
    def step_matrices(self, bad: Tensor | None = None) -> None:
        """Update the matrices only; if `bad` is 1, leave them unchanged."""
        for group in self.param_groups:
            if group["matrices"]:
                self._step_matrices(group, bad)

    def _step_matrices(self, group: dict[str, Any], bad: Tensor | None) -> None:
        if any(is_slice(parameter) for parameter in group["params"]):
            self._step_sharded(group, bad)
            return
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for parameter, count in zip(group["params"], group["stacked"], strict=True):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            whole = (parameter, parameter.grad, state["momentum_buffer"])
            # Chunking a single matrix would cost three calls for nothing.
            chunks = [whole] if count == 1 else zip(*(tensor.chunk(count) for tensor in whole), strict=True)
            for matrix in chunks:
                wide = [_wide(tensor) for tensor in matrix]
                by_shape.setdefault(tuple(wide[0].shape), []).append(tuple(wide))  # type: ignore[arg-type]
        for shape, matrices in by_shape.items():
            weights, gradients, momenta = (list(tensors) for tensors in zip(*matrices, strict=True))
            direction = _update_momenta(momenta, torch.stack(gradients), group["momentum"], bad)
            scale = group["lr"] * ADAMW_RMS * math.sqrt(max(shape))
            decay = 1 - group["lr"] * group["weight_decay"]
            update = orthogonalised(direction).to(weights[0].dtype).mul_(-scale)
            if bad is None:
                torch._foreach_mul_(weights, decay)
            else:
                update *= 1 - bad
                torch._foreach_mul_(weights, 1 + (decay - 1) * (1 - bad))
            torch._foreach_add_(weights, list(update.unbind()))

    def _step_sharded(self, group: dict[str, Any], bad: Tensor | None) -> None:
        """Update sharded matrices: momenta by slices, then every rank orthogonalises the gathered directions."""
        by_shape: dict[tuple[int, int, int], list[Tensor]] = {}
        for parameter, count in zip(group["params"], group["stacked"], strict=True):
            if parameter.grad is not None:
                by_shape.setdefault((count, *parameter.shape), []).append(parameter)
        decay, kept = 1 - group["lr"] * group["weight_decay"], 1.0 if bad is None else 1 - bad
        for (count, rows, columns), parameters in by_shape.items():
            slices = [self._direction(p, p.grad, group["momentum"], bad) for p in parameters if p.grad is not None]
            directions = torch.stack([gathered(direction) for direction in slices])
            scale = group["lr"] * ADAMW_RMS * math.sqrt(max(rows // count, columns))
            updates = orthogonalised(directions.unflatten(1, (count, rows // count))).flatten(1, 2)
            for parameter, update in zip(parameters, updates.to(directions.dtype).mul_(-scale), strict=True):
                parameter.mul_(1 + (decay - 1) * kept).add_(resharded(update * kept, parameter))

    def _direction(self, parameter: Tensor, gradient: Tensor, momentum: float, bad: Tensor | None) -> Tensor:
        """Update the momentum of a sharded matrix; return the Nesterov direction."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        if bad is not None:
            gradient = torch.where(bad > 0, buffer, gradient)
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def _update_momenta(momenta: list[Tensor], gradients: Tensor, momentum: float, bad: Tensor | None) -> Tensor:
    """Update the momenta with gradients (N, rows, columns); return the Nesterov direction."""
    old = torch.stack(momenta)
    if bad is not None:  # `where`, because NaN times 0 is NaN
        gradients = torch.where(bad > 0, old, gradients)
    new = old.lerp(gradients, 1 - momentum)
    torch._foreach_copy_(momenta, list(new.unbind()))
    return gradients.lerp(new, momentum)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Bring all singular values of each matrix (…, rows, columns) near 1; in bf16 on a GPU."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalised(matrices.mT).mT
    a, b, c = POLYNOMIAL
    x = matrices.to(_dtype(matrices.device))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=TINY)
    x = x.view(-1, *x.shape[-2:])
    for _ in range(STEPS):
        squares = torch.bmm(x, x.mT)  # `@` would add five views per call, and launching may be the bottleneck
        x = torch.baddbmm(x, torch.baddbmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
    return x.view(matrices.shape)


def _dtype(device: torch.device) -> torch.dtype:
    """Return the compute dtype: bf16 suffices and is faster on a GPU; CPUs without it emulate it, 100 times slower."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _wide(matrix: Tensor) -> Tensor:
    """Transpose a matrix if it has more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
