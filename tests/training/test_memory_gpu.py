"""The memory forecast against CUDA's allocator. Run by hand with `make test-gpu`; CI has no GPU."""

import gc
from pathlib import Path

import pytest
import torch
from tests.support.memory_jobs import IMAGES, job, train_two_steps

from vitrail.errors import ConfigError
from vitrail.runtime import Precision
from vitrail.training.auto_batch import fit_batch_to_memory, forecast_line, memory_limit, within_memory
from vitrail.training.context import Job
from vitrail.training.memory import forecast, step_fits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["Ti/16", "S/16"])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_forecast_matches_a_run(
    kind: str, name: str, precision: Precision, checkpointing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = job(
        device="cuda",
        precision=precision,
        model={"name": name},
        batch=64,
        gradient_checkpointing=checkpointing,
        optimizer={"kind": kind},
    )
    compare_with_a_run(planned, f"{kind} {name} {precision} checkpointing={checkpointing}", capsys)


@pytest.mark.parametrize("on", [(), ("qkv", "proj"), ("qkv", "proj", "fc1", "fc2")], ids=["full", "attention", "all"])
@pytest.mark.parametrize("name", ["S/16", "B/16", "L/16"])
def test_the_forecast_with_adapters_matches_a_run(
    name: str, on: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    planned = job(
        device="cuda",
        precision="bf16",
        model={"name": name},
        batch=64,
        optimizer={"kind": "adamw"},
        averaging={"kind": "none"},
        **({"lora": {"rank": 8, "on": on}} if on else {}),
    )
    compare_with_a_run(planned, f"{name} LoRA on {', '.join(on) or 'nothing'}", capsys)


def compare_with_a_run(planned: Job, title: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Print and compare the forecast and the peak of two steps."""
    estimate = forecast(planned)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train_two_steps(planned)
    taken = torch.cuda.max_memory_allocated() - before
    with capsys.disabled():
        print(
            f"\n{title}: forecast {estimate.total / 1e6:.0f} MB, used {taken / 1e6:.0f} MB, "
            f"ratio {estimate.total / taken:.3f}; {forecast_line(estimate, memory_limit(planned.device))}"
        )
    assert estimate.total == pytest.approx(taken, rel=0.2)


def test_auto_finds_a_batch_that_fits(tmp_path: Path) -> None:
    """GPU memory is limited, so that the default batch does not fit."""
    planned = job(device="cuda", precision="bf16", model={"name": "S/16"}, batch="auto")
    usual = planned._replace(plan=planned.plan._replace(batch=64))
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()  # left over from other tests
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()  # by captured graphs and compiled models of other tests
    torch.cuda.set_per_process_memory_fraction((held + forecast(usual).total / 3) / total)
    try:
        assert not step_fits(usual, forecast(usual))
        # The forecast sees the whole GPU, so that only the real step can fail.
        result = fit_batch_to_memory(planned, tmp_path, IMAGES, memory_limit(planned.device))
        assert 2 <= result.plan.batch <= 32
        assert step_fits(result, forecast(result))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_a_full_gpu_is_explained(tmp_path: Path) -> None:
    planned = job(device="cuda", batch=16)
    notes: list[str] = []
    with (
        pytest.raises(ConfigError, match=r"out of memory: the GPU has [\d.]+ GB for this run, and a batch of 16 needs"),
        within_memory(planned, tmp_path, notes.append),
    ):
        torch.empty(2**45, dtype=torch.uint8, device="cuda")
    assert len(notes) == 1
