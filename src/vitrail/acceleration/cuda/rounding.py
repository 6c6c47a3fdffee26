"""Matrices in fp8, rounded so that their products err little, rather than their numbers.

What goes into a product is seen beforehand on some images (`Seen`). Inputs that go up and down together can make up
for each other: after one input's weights are rounded, those of the inputs still to come are moved by what makes the
least of the error in the products (GPTQ, arXiv 2210.17323). It costs nothing when images are answered.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.acceleration.cuda.elementwise import FP8, to_fp8

ROWS_AT_ONCE = 65_536
"""How many rows are in float32 at a time while they are seen."""
INPUTS_AT_ONCE = 128
"""After how many inputs the error is taken to all that come later, by one product rather than by many."""
LEAST_DAMPING = 0.01
"""What is added to the mean square of every input, as a share of the mean over all; by one hundredth GPTQ's authors
make the matrix safe to invert."""
DAMPING = 0.5
"""How much more is added the fewer rows were seen, times inputs / rows: enough that two rows do no harm to speak of."""


class Seen(NamedTuple):
    """What went into a product."""

    largest: Tensor
    """Its largest number."""
    together: Tensor | None
    """Sums over rows of the products of any two inputs, (inputs, inputs), float32; None: not asked for."""
    rows: int

    def damped(self) -> Tensor | None:
        """Return what is known of all rows there will ever be: the means of those products, damped.

        From fewer rows than inputs little can be told, so that inputs count as going each their own way the more, the
        fewer rows there are. None where nothing was summed, or float32 cannot hold the squares.
        """
        if self.together is None:
            return None
        mean = self.together / self.rows
        square = float(mean.diagonal().mean())
        if not torch.finfo(torch.float32).tiny / LEAST_DAMPING < square < math.inf:
            return None
        mean.diagonal().add_((LEAST_DAMPING + DAMPING * mean.shape[0] / self.rows) * square)
        return mean


def see(x: Tensor, before: Seen | None, *, together: bool = True) -> Seen:
    """Look at rows (M, inputs) that go into a product, after `before`, which is used up."""
    if before is None:
        sums = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float32) if together else None
        before = Seen(x.new_zeros(()), sums, 0)
    largest = before.largest
    for rows in x.split(ROWS_AT_ONCE):
        least, most = rows.aminmax()
        largest = torch.maximum(largest, torch.maximum(-least, most))
        if before.together is not None:
            wide = rows.float()
            before.together.addmm_(wide.t(), wide)
    return Seen(largest, before.together, before.rows + len(x))


def round_together(weight: Tensor, together: Tensor) -> Tensor:
    """Return a matrix (outputs, inputs) in fp8, by what is known of its inputs (`Seen.damped`)."""
    # Inputs that count most come first, while there are still many to make up for them.
    order = together.diagonal().argsort(descending=True)
    known = torch.linalg.cholesky(together[order][:, order].double())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(known), upper=True).float()
    left = weight.t()[order].float()  # one row for each input, so that it lies together
    for start in range(0, len(left), INPUTS_AT_ONCE):
        stop = start + INPUTS_AT_ONCE
        part, within = left[start:stop], inverse[start:stop, start:stop]
        errors = torch.empty_like(part)
        for number, row in enumerate(part):
            rounded = to_fp8(row, 1.0).float()
            errors[number] = (row - rounded) / within[number, number]
            row.copy_(rounded)
            part[number + 1 :].addr_(within[number, number + 1 :], errors[number], alpha=-1)
        left[stop:].addmm_(inverse[start:stop, stop:].t(), errors, alpha=-1)
    return torch.empty_like(left).index_copy_(0, order, left).t().contiguous().to(FP8)
