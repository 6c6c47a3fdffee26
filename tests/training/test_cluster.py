"""`vitrail train --plan`: what a run needs on several GPUs, and settings that no run could use."""

from pathlib import Path

import pytest
from tests.support.commands import run_command

import vitrail
from vitrail.errors import ConfigError

TINY = ["model.width=32", "model.depth=2", "model.heads=2", "model.patch_size=4", "batch=64", "precision=float32"]
WORDS = [word for change in TINY for word in ("--set", change)]


@pytest.mark.slow
def test_slices_and_bytes_follow_from_the_number_of_gpus() -> None:
    plan = vitrail.plan("digits", gpus=4, gpu_memory=10**9, changes=TINY, device="cpu")
    weights = 4 * plan.parameters
    assert plan.whole.sent == 2 * weights * 3 // 4  # a ring all-reduce
    assert plan.whole.memory.weights >= weights
    assert abs(plan.sharded.memory.optimizer - plan.whole.memory.optimizer / 4) < 100
    assert plan.whole.fits
    assert plan.whole.largest_batch % 4 == 0
    tight = vitrail.plan("digits", gpus=4, gpu_memory=plan.whole.memory.standing, changes=TINY, device="cpu")
    assert (tight.shards, tight.whole.fits, tight.whole.largest_batch) == (True, False, 0)
    assert not vitrail.plan("digits", gpus=1, gpu_memory=1, changes=TINY, device="cpu").shards


@pytest.mark.slow
def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", "--plan", "--gpu-memory", "1", "--device", "cpu", *WORDS]
    for gpus, start in ((1, "a batch of 64 on 1 GPU with 1 GB each"), (2, "a batch of 64 on 2 GPUs with 1 GB each")):
        done = run_command(monkeypatch, capsys, *words, "--gpus", gpus)
        assert done.code == 0, done.err
        assert start in done.out
        assert "distributed.shard=auto would use: whole models." in done.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--plan", "--gpus", "0"], "Invalid value for '--gpus'"),
        (["--plan", "--gpus", "2", "--gpu-memory", "abc"], "Invalid value for '--gpu-memory'"),
        (["--plan", "--gpus", "2", "--gpu-memory", "0"], "--gpu-memory is 0; give the memory of one GPU in GB"),
        (["--plan", "--gpus", "2", "--gpu-memory", "inf"], "--gpu-memory is inf; give the memory of one GPU in GB"),
        (["--plan", "--gpus", "7"], "a batch of 64 cannot be split into 7 equal micro-batches"),
        (["--plan", "--gpus", "128"], "use a batch that is a multiple of 128"),
        (["--gpus", "2"], "start the command with torchrun (docs/guides/several-gpus.md)"),
    ],
)
def test_settings_that_no_run_could_use(
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_command(monkeypatch, capsys, "train", "digits", "--device", "cpu", *words, *WORDS)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert sentence in done.err
    assert not list(tmp_path.iterdir())


def test_gpus_of_a_plan() -> None:
    with pytest.raises(ConfigError, match="gpus is 0; give at least 1"):
        vitrail.plan("digits", gpus=0)
