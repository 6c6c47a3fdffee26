"""Batches that pass through slots arrive as they were made, and stay so when the slots are used again."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrail.data.batches import prefetch
from vitrail.data.slots import empty_buffer
from vitrail.errors import DataError


class Made(NamedTuple):
    """Tensors of every kind that a worker sends."""

    number: int
    permuted: Tensor
    shortened: Tensor
    sparse: Tensor
    nothing: Tensor
    values: Tensor
    names: tuple[bytes, ...]


@dataclass(frozen=True)
class Making(Dataset[Any]):
    """Makes tensors from a number."""

    def __getitem__(self, number: int) -> Made:
        """Fill two buffers, of which one is not used up."""
        torch.manual_seed(number)
        images, others = empty_buffer(3, 5, 7, 2), empty_buffer(4, 33)
        for buffer in (images, others):
            buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))
        values = torch.randn(3, 4)
        return Made(number, images.permute(0, 3, 1, 2), others[:2], others[:, ::2], images[:0], values, (b"\xff", b"b"))


SIZE = 3 * 5 * 7 * 2 + 4 * 33


@pytest.mark.parametrize("batch_bytes", [SIZE, 1], ids=["fits", "too small"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_items_arrive_as_they_were_made(batch_bytes: int, workers: int, method: str) -> None:
    data = Making()
    made = list(prefetch(data, iter(range(15)), workers=workers, method=method, batch_bytes=batch_bytes))
    assert [one.number for one in made] == list(range(15))
    for one in made:  # all of them: each slot was used several times
        expected = data[one.number]
        assert one.names == expected.names
        for actual, wanted in zip(one[1:-1], expected[1:-1], strict=True):
            assert torch.equal(actual, wanted)
            assert actual.dtype == wanted.dtype
            assert not actual.is_shared()
        assert one.permuted.stride() == expected.permuted.stride()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_too_little_memory(method: str) -> None:
    with pytest.raises(DataError, match=r"^the batches of 1 data loading worker need 30 TB of shared memory, .*; use"):
        next(prefetch(Making(), iter(range(15)), workers=1, method=method, batch_bytes=10**13))
