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
def test_the_largest_batch_does_not_depend_on_the_batch_of_the_recipe() -> None:
    """A small batch needs the most memory per image, because some memory does not grow with the batch."""
    found = [
        vitrail.plan("digits", gpus=4, gpu_memory=10**8, changes=[*TINY, f"batch={batch}"], device="cpu").whole
        for batch in (8, 1024, 65536)
    ]
    largest = [gpu.largest_batch for gpu in found]
    assert [gpu.fits for gpu in found] == [True, True, False]
    assert min(largest) > 0.95 * max(largest) > 1024
    again = vitrail.plan("digits", gpus=4, gpu_memory=10**8, changes=[*TINY, f"batch={max(largest)}"], device="cpu")
    assert again.whole.fits


@pytest.mark.slow
def test_what_cannot_be_sharded_is_not_planned_to_be() -> None:
    tiny = [change for change in TINY if not change.startswith("precision")]
    fp16 = vitrail.plan("digits", gpus=4, gpu_memory=1, changes=[*tiny, "precision=fp16"], device="cpu")
    dino = vitrail.plan("digits", gpus=4, gpu_memory=1, method="dino", changes=TINY, device="cpu")
    for plan in (fp16, dino):
        assert (plan.whole.fits, plan.shardable, plan.shards) == (False, False, False)


@pytest.mark.slow
def test_bytes_are_those_of_what_is_trained() -> None:
    """The decoder of a pretraining method is sent, too; what is frozen is not."""
    mae = vitrail.plan("digits", gpus=2, gpu_memory=10**9, method="mae", changes=TINY, device="cpu")
    assert mae.whole.sent > 4 * mae.parameters
    config = vitrail.ViTConfig(image_size=8, patch_size=4, channels=1, width=32, depth=2, heads=2, classes=10)
    preprocess = vitrail.Preprocess(size=(8, 8), channels=1, mean=(0.5,), std=(0.5,))
    bundle = vitrail.Bundle(vitrail.create(config), preprocess, tuple("0123456789"))
    lora = vitrail.plan(
        "digits", gpus=2, gpu_memory=10**9, pretrained=bundle, changes=["batch=64", "lora.rank=2"], device="cpu"
    )
    assert lora.whole.sent < 4 * lora.parameters / 2


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
