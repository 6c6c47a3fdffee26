"""Muon: the matrices inside blocks learn in all directions alike, whatever else there is learns by AdamW.

Jordan et al. 2024 replace a matrix's momentum U·S·Vᵀ by nearly U·Vᵀ, by five steps of a polynomial. Its steps are
scaled as in arXiv 2502.16982, by 0.2·√(longer side): then they are as long as AdamW's, and one learning rate and one
weight decay fit both. Matrices of one shape are computed together, so that a GPU has fewer kernels to launch.
"""

import math
from typing import Any

import torch
from torch import Tensor

POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""Of the singular values, p(s) = a·s + b·s³ + c·s⁵: so steep at 0 that five steps bring all but the smallest near 1."""
STEPS = 5
LIKE_ADAMW = 0.2
"""The root mean square of AdamW's usual steps, as a share of the learning rate."""
TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """Takes parameter groups, each with a `matrices` that says whether Muon or AdamW changes them.

    A group of matrices also says, as `stacked`, of how many matrices of equal height each one consists: queries, keys
    and values are one parameter but three matrices. Where the attribute `found_inf` is 1, a step leaves everything as
    it is, which nobody has to ask the device for; torch's one-kernel AdamW, which that needs, knows it from GradScaler.
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
        # The same groups, whose rate is set for both, and the same state, which is saved with that of the matrices.
        self._others = torch.optim.AdamW(others, lr, betas=betas, eps=eps, fused=fused) if others else None
        if self._others is not None:
            self._others.state = self.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Change all parameters that have a gradient."""
        bad: Tensor | None = getattr(self, "found_inf", None)
        self.step_matrices(bad)
        if self._others is not None:
            self._others.found_inf = bad  # type: ignore[attr-defined]
            self._others.step()

    @torch.no_grad()
    def step_matrices(self, bad: Tensor | None = None) -> None:
        """Change the matrices alone; where `bad` is 1, leave them as they are."""
        for group in self.param_groups:
            if group["matrices"]:
                self._step_matrices(group, bad)

    def _step_matrices(self, group: dict[str, Any], bad: Tensor | None) -> None:
        alike: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for parameter, count in zip(group["params"], group["stacked"], strict=True):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            whole = (parameter, parameter.grad, state["momentum_buffer"])
            # A matrix that is one would be cut into a view of itself, three more calls.
            parts = [whole] if count == 1 else zip(*(tensor.chunk(count) for tensor in whole), strict=True)
            for matrix in parts:
                lying = [_lying(tensor) for tensor in matrix]
                alike.setdefault(tuple(lying[0].shape), []).append(tuple(lying))  # type: ignore[arg-type]
        for shape, matrices in alike.items():
            weights, gradients, momenta = (list(tensors) for tensors in zip(*matrices, strict=True))
            direction = _advance(momenta, torch.stack(gradients), group["momentum"], bad)
            length = group["lr"] * LIKE_ADAMW * math.sqrt(max(shape))
            kept = 1 - group["lr"] * group["weight_decay"]
            change = orthogonalised(direction).to(weights[0].dtype).mul_(-length)
            if bad is None:
                torch._foreach_mul_(weights, kept)
            else:
                change *= 1 - bad
                torch._foreach_mul_(weights, 1 + (kept - 1) * (1 - bad))
            torch._foreach_add_(weights, list(change.unbind()))


def _advance(momenta: list[Tensor], gradients: Tensor, momentum: float, bad: Tensor | None) -> Tensor:
    """Take gradients (N, rows, columns) into their momenta; return the direction, looking ahead as Nesterov does."""
    old = torch.stack(momenta)
    if bad is not None:  # not by a factor of 0, which would leave NaN what it is
        gradients = torch.where(bad > 0, old, gradients)
    new = old.lerp(gradients, 1 - momentum)
    torch._foreach_copy_(momenta, list(new.unbind()))
    return gradients.lerp(new, momentum)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Bring all singular values of each matrix (…, rows, columns) near 1; on a GPU in bf16."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalised(matrices.mT).mT
    a, b, c = POLYNOMIAL
    x = matrices.to(_dtype(matrices.device))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=TINY)
    x = x.view(-1, *x.shape[-2:])
    for _ in range(STEPS):
        squares = torch.bmm(x, x.mT)  # `@` would make five views around each, and a GPU may wait for this process
        x = torch.baddbmm(x, torch.baddbmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
    return x.view(matrices.shape)


def _dtype(device: torch.device) -> torch.dtype:
    """Return what is computed in: bf16 is enough and quicker on a GPU; CPUs without it emulate it, 100 times slower."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _lying(matrix: Tensor) -> Tensor:
    """Return a matrix that is no higher than wide."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
