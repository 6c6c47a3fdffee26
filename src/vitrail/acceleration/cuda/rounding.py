"""Matrices in fp8, rounded so that their products err little, rather than their numbers.

What goes into a product is seen beforehand on some pictures (`Seen`). Inputs that go up and down together can make up
for each other: after one input's weights are rounded, those of the inputs still to come are moved by what makes the
least of the error in the products (GPTQ, arXiv 2210.17323). It costs nothing when pictures are answered.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.acceleration.cuda.passes import FP8, to_fp8

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
    together: Tensor
    """Sums over rows of the products of any two inputs, (inputs, inputs), float32."""
    rows: int

    def damped(self) -> Tensor:
        """Return what is known of all rows there will ever be: the means of those products, damped.

        From fewer rows than inputs little can be told, so that inputs count as going each their own way the more, the
        fewer rows there are.
        """
        mean = self.together / self.rows
        share = LEAST_DAMPING + DAMPING * mean.shape[0] / self.rows
        mean.diagonal().add_(share * mean.diagonal().mean())
        return mean


def see(x: Tensor, before: Seen | None) -> Seen:
    """Look at rows (M, inputs) that go into a product."""
    largest, together = x.abs().max(), x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float32)
    for rows in x.split(ROWS_AT_ONCE):
        wide = rows.float()
        together.addmm_(wide.t(), wide)
    if before is None:
        return Seen(largest, together, len(x))
    return Seen(torch.maximum(before.largest, largest), before.together.add_(together), before.rows + len(x))


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
