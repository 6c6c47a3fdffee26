"""The memory forecast of sharded steps against CUDA's allocator. Run by hand with `make test-gpu`; CI has no GPU."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.support.memory_jobs import job, take_sharded_steps
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from vitrail.training.context import Job
from vitrail.training.memory import forecast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def sharded(planned: Job) -> Job:
    return planned._replace(context=replace(planned.context, sharded=True))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("name", "batch", "optimizer"),
    [("L/16", 64, "adamw"), ("L/16", 64, "muon"), ("G/14", 32, "adamw")],
)
def test_the_forecast_matches_sharded_steps(
    name: str, batch: int, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = sharded(
        job(device="cuda:0", precision="bf16", model={"name": name}, batch=batch, optimizer={"kind": optimizer})
    )
    estimate = forecast(planned)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    take_sharded_steps(planned)
    taken = torch.cuda.max_memory_allocated() - before
    ratio = estimate.total / taken
    with capsys.disabled():
        print(
            f"\n{name} {optimizer} batch {batch} sharded: forecast {estimate.total / 1e9:.2f} GB, used "
            f"{taken / 1e9:.2f} GB, ratio {ratio:.3f}"
        )
    assert ratio == pytest.approx(1.0, abs=0.1)
