"""Which batches are captured as CUDA graphs; the graphs themselves need a GPU (`test_gpu.py`)."""

import pytest
import torch

from vitrail.acceleration.cuda.graphs import SHAPES, SIZES, CudaGraphs


@pytest.mark.parametrize("sizes", [(), SIZES])
def test_on_a_cpu_the_function_is_called_without_a_graph(sizes: tuple[int, ...]) -> None:
    graphs = CudaGraphs(lambda x: x + 1, torch.device("cpu"), sizes=sizes)
    for count in (0, 2, 65):
        assert torch.equal(graphs(torch.zeros(count)), torch.ones(count))
    assert not graphs.captured


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (3, 4), (33, 64), (64, 64), (65, None), (0, None)])
def test_small_batches_are_padded_and_large_ones_not_captured(count: int, rows: int | None) -> None:
    cpu = torch.device("cpu")
    assert CudaGraphs(torch.relu, cpu, sizes=SIZES)._rows(count) == rows
    assert CudaGraphs(torch.relu, cpu)._rows(count) == (count or None)


def test_the_number_of_graphs_is_bounded() -> None:
    cpu = torch.device("cpu")
    assert CudaGraphs(torch.relu, cpu).most == SHAPES
    assert CudaGraphs(torch.relu, cpu, sizes=SIZES).most == 2 * len(SIZES)
