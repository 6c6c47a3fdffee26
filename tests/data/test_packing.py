"""Packed arrays come back unchanged."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from vitrail.data.packing import PackedArrays

DTYPES = st.sampled_from([np.uint8, np.bool_, np.int32, np.int64, np.float32, np.float64])


@given(st.lists(DTYPES.flatmap(lambda dtype: arrays(dtype, array_shapes(min_side=0)))))
def test_round_trip(inputs: list[np.ndarray]) -> None:
    packed = PackedArrays()
    slots = [packed.put(array) for array in inputs]
    memory = packed.memory()
    assert memory.dtype == torch.uint8
    for array, slot in zip(inputs, slots, strict=True):
        np.testing.assert_array_equal(slot.of(memory).numpy(), array)
        assert slot.of(memory).numpy().dtype == array.dtype


def test_non_contiguous_arrays() -> None:
    packed, whole = PackedArrays(), np.arange(24).reshape(4, 6)
    slots = [packed.put(whole.T), packed.put(whole[:, ::2]), packed.put(np.broadcast_to(whole[0], (3, 6)))]
    result = [slot.of(packed.memory()).tolist() for slot in slots]
    assert result == [whole.T.tolist(), whole[:, ::2].tolist(), [whole[0].tolist()] * 3]
