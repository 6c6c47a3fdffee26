"""Which batches are captured as CUDA graphs; the graphs themselves need a GPU (`test_gpu.py`)."""

import weakref

import pytest
import torch

from vitrail.acceleration.cuda.graphs import LARGE_SIZES, SHAPES, SIZES, CudaGraphs


@pytest.mark.parametrize("sizes", [(), SIZES])
def test_on_a_cpu_the_function_is_called_without_a_graph(sizes: tuple[int, ...]) -> None:
    graphs = CudaGraphs(lambda x: x + 1, torch.device("cpu"), sizes=sizes)
    for count in (0, 2, 65):
        assert torch.equal(graphs(torch.zeros(count)), torch.ones(count))
    assert not graphs.captured


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (3, 4), (33, 64), (64, 64), (65, None), (0, None)])
def test_small_batches_are_padded_and_large_ones_not_captured_at_once(count: int, rows: int | None) -> None:
    cpu = torch.device("cpu")
    assert CudaGraphs(torch.relu, cpu, sizes=SIZES)._rows(count) == rows
    assert CudaGraphs(torch.relu, cpu)._rows(count) == (count or None)


def test_the_number_of_graphs_is_bounded() -> None:
    cpu = torch.device("cpu")
    assert CudaGraphs(torch.relu, cpu).most == SHAPES
    assert CudaGraphs(torch.relu, cpu, sizes=SIZES).most == 2 * (len(SIZES) + LARGE_SIZES)


def test_large_batches_are_captured_when_their_size_repeats() -> None:
    """As in a job, whose batches have one size except for the last one."""
    graphs = CudaGraphs(torch.relu, torch.device("cpu"), sizes=SIZES)
    assert [graphs._rows(count) for count in (256, 256, 256, 70)] == [None, 256, 256, None]
    others = range(100, 100 + LARGE_SIZES)
    assert [graphs._rows(count) for count in others] == [None] * LARGE_SIZES
    assert [graphs._rows(count) for count in others] == [*others[:-1], None]  # no more than these
    assert graphs._rows(256) == 256


def test_a_failed_capture_is_freed_before_the_batch_runs_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def capture(*_: object) -> None:
        activations = torch.zeros(8)
        failed.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = CudaGraphs(torch.relu, torch.device("cpu"), sizes=SIZES)
    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(failed[0]() is not None))
    images = torch.zeros(2, 3, 4, 4)
    assert graphs._graph(2, images) is None
    assert alive == [False]
    assert graphs._graph(2, images) is None
    assert len(failed) == 1  # further captures would fail too
    assert [record.message for record in caplog.records] == [
        "no GPU memory for a CUDA graph of 2 images; they run without one"
    ]
