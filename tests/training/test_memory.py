"""The memory forecast, batch = "auto", and errors that suggest what would fit."""

import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.memory_jobs import IMAGES, SMALL, job, train_two_steps
from tests.support.tiny_models import BASIC_KINDS
from tests.support.tiny_models import TINY as TINY_MODEL
from torch.profiler import ProfilerActivity, profile

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Arrays
from vitrail.data.sources.splits import Splits, split_of
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import faster_in_bf16
from vitrail.training.auto_batch import (
    MemoryLimit,
    fit_batch_to_memory,
    forecast_line,
    is_out_of_memory,
    machine_memory,
    within_memory,
)
from vitrail.training.context import resident_images
from vitrail.training.memory import Forecast, forecast
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import read_recipe, write_toml
from vitrail.training.teacher import ClassTeacher, Teacher
from vitrail.training.train import train

MB = 10**6


def really_taken(work: Callable[[], None]) -> int:
    """Return torch's peak CPU memory, from its own allocation records."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    results = record.profiler.kineto_results
    pieces = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    now = most = 0
    for _, size in pieces:
        now += size
        most = max(most, now)
    return most


# ── the forecast ──


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 32, "gradient_accumulation": 4},
        {"gradient_checkpointing": True, "model": {**SMALL, "depth": 5}},
        {"averaging": {"kind": "none"}, "optimizer": {"kind": "sgd"}, "mixing": {"mixup": 0.0}},
        {"freeze": ("*", "!head.*", "!blocks.1.*")},
        {"lora": {"rank": 8, "on": ("qkv", "fc1")}},
        pytest.param(
            {"precision": "bf16", "batch": 2, "model": {**SMALL, "depth": 1, "width": 32, "heads": 1}},
            marks=pytest.mark.skipif(
                not faster_in_bf16(torch.device("cpu")),
                reason="a CPU without bf16 units widens matrices to multiply them, which takes memory",
            ),
        ),
        {"model": {**SMALL, "width": 192}, "batch": 2},
    ],
    ids=["plain", "splits", "checkpointing", "sgd", "frozen", "lora", "bf16", "few images"],
)
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_forecast_matches_a_run(kind: str, changes: dict[str, Any]) -> None:
    planned = job(**{"optimizer": {"kind": kind}, **changes})
    foreseen, taken = forecast(planned).total, really_taken(lambda: train_two_steps(planned))
    print(f"foreseen {foreseen / MB:.2f} MB, taken {taken / MB:.2f} MB")
    assert foreseen == pytest.approx(taken, rel=0.05)


def test_the_forecast_counts_the_teachers_weights_and_forward_pass() -> None:
    config = ViTConfig(image_size=64, patch_size=8, width=96, depth=2, heads=3, classes=10)
    teacher = Teacher(Bundle(ViT(config), Preprocess(size=(64, 64)), tuple("0123456789")), "teacher")
    alone = job(batch=32)
    taught = alone._replace(plan=alone.plan._replace(teacher=teacher))
    images = torch.randint(0, 256, (32, 3, 32, 32), dtype=torch.uint8)
    numbers = torch.zeros(32, dtype=torch.int64)
    batch = Batch(images, numbers, numbers, torch.ones(32), torch.zeros(32, 4, dtype=torch.int64))

    def teach() -> None:
        ClassTeacher(teacher, taught.plan.classes, taught.device, "float32", mixed=False)(batch)

    plain, foreseen = forecast(alone), forecast(taught)
    assert foreseen.in_flight == plain.in_flight + foreseen.teaching
    assert foreseen.teacher + foreseen.teaching == pytest.approx(really_taken(teach), rel=0.15)


def test_activations_match_the_formula_of_a_plain_block() -> None:
    """In float32 a pre-norm block keeps 16 times its tokens: the inputs and outputs of two norms (4), queries, keys and
    values (3), the attention output (1), and both sides of the activation in the MLP (8)."""
    model = {"name": "Ti/16", "image_size": (64, 64)}
    estimate = forecast(job(model=model, batch=64, mixing={"mixup": 0.0}))
    tokens, width, depth = 17, 192, 12
    kept = 64 * depth * tokens * 4 * (16 * width + 4 + 3)  # 4 means and deviations, 3 heads' sums of exponentials
    assert estimate.in_flight + estimate.gradients == pytest.approx(kept, rel=0.15)


def test_only_activations_grow_with_the_batch() -> None:
    one, two = forecast(job(batch=16)), forecast(job(batch=32))
    assert one.standing == two.standing
    assert two.in_flight == pytest.approx(2 * one.in_flight, rel=0.05)
    assert one.with_images(32, 1) == pytest.approx(two.total, rel=0.05)
    in_splits = forecast(job(batch=64, gradient_accumulation=2))
    assert two.with_images(32, 2) == pytest.approx(in_splits.total, rel=0.05)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [({"kind": "adamw"}, 2), ({"kind": "adam"}, 2), ({"kind": "sgd"}, 1), ({"kind": "sgd", "momentum": 0.0}, 0)],
)
def test_optimizer_state_size(optimizer: dict[str, Any], copies: int) -> None:
    estimate = forecast(job(optimizer=optimizer, averaging={"kind": "none"}))
    assert (estimate.optimizer, estimate.average, estimate.gradients) == (
        copies * estimate.weights,
        0,
        estimate.weights,
    )


def test_frozen_parameters_have_no_gradients() -> None:
    estimate = forecast(job(freeze=("*", "!head.*")))
    head = 4 * (64 + 1) * 10
    assert (estimate.gradients, estimate.optimizer) == (head, 2 * head)
    assert estimate.average == estimate.weights > 10 * head


def test_several_processes_share_the_images_and_add_up_gradients() -> None:
    alone, four = forecast(job(batch=16)), forecast(job(batch=64, processes=4))
    assert (four.images, four.gradients) == (alone.images, 2 * alone.gradients)


@pytest.mark.parametrize("kind", BASIC_KINDS)
def test_every_kind_of_model_has_a_forecast(kind: str) -> None:
    first = {"class_token": "first", "pool": "cls", "final_norm": "before_pool"}
    assert forecast(job(model={**first, **TINY_MODEL, **BASIC_KINDS[kind], "classes": 10}, batch=4)).in_flight > 0


def test_a_forecast_draws_nothing() -> None:
    before = torch.get_rng_state()
    forecast(job())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_forecast_line() -> None:
    estimate = Forecast(100 * MB, 100 * MB, 200 * MB, 0, 64, 900 * MB, 1)
    assert forecast_line(estimate, MemoryLimit(22_000 * MB, "the GPU")) == (
        "memory: about 1.3 GB of 22 GB (weights 0.1, gradients 0.1, optimizer 0.2, activations 0.9)"
    )
    assert "optimizer 0.2, images on the device 0.7, activations" in forecast_line(
        estimate._replace(resident=700 * MB), MemoryLimit(22_000 * MB, "the GPU")
    )


def test_images_that_live_on_the_device_count() -> None:
    source = Arrays(np.zeros((7, 8, 8, 3), np.uint8), np.arange(7) % 2, ("cat", "dog"))
    splits = Splits(source, split_of(source, np.arange(3)), None, {})
    plain, living = (job(data={"on_device": setting}, augmentation={"crop": "padded"}) for setting in (False, True))
    assert (resident_images(plain.plan, splits), resident_images(living.plan, splits)) == (0, 10)
    assert resident_images(living.plan, splits._replace(val=None)) == 14
    resident = replace(living.context, resident=10)
    without, there = forecast(living), forecast(living._replace(context=resident))
    side = living.plan.model.image_size[0]
    assert there.total - without.total == there.standing - without.standing == 10 * 3 * side * side


# ── available memory ──


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8_000_000 * 1024),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/box/memory.max": "max\n",
                "sys/fs/cgroup/pod/box/memory.current": "1000\n",
                "sys/fs/cgroup/pod/memory.max": "5000000\n",
                "sys/fs/cgroup/pod/memory.current": "3000000\n",
                "sys/fs/cgroup/pod/memory.stat": "anon 2\ninactive_file 1000000\n",
            },
            3_000_000,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/\n4:memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "700000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "300000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100\n",
            },
            400_100,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "1000\n",
                "sys/fs/cgroup/memory.current": "2000\n",
            },
            0,
        ),
    ],
    ids=["no container", "version 2", "version 1", "used up"],
)
def test_container_limits(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert machine_memory(machine(tmp_path, {"proc/meminfo": MEMINFO, **files})) == expected


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no /proc on this machine")
def test_this_machine_has_memory() -> None:
    whole = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < machine_memory() <= whole


# ── batch = "auto" ──


def test_a_batch_that_fits_is_kept(tmp_path: Path) -> None:
    result = fit_batch_to_memory(job(batch="auto"), tmp_path, IMAGES, MemoryLimit(10**12, "the GPU")).plan
    usual = job(batch=None).plan
    assert (result.recipe.batch, result.batch, result.steps) == (usual.batch, usual.batch, usual.steps)
    assert (result.defaults[-1].field, result.defaults[-1].value) == ("batch", usual.batch)
    assert "fits in 1 TB" in result.defaults[-1].reason


@pytest.mark.parametrize(
    "changes",
    [{"gradient_accumulation": 2, "data": {"repeats": 3}}, {"processes": 3}],
    ids=["micro-batches and repeats", "processes"],
)
def test_a_batch_is_halved_until_it_fits(changes: dict[str, Any], tmp_path: Path) -> None:
    usual = job(**{"batch": "auto", **changes})
    unit = 2 * usual.plan.recipe.gradient_accumulation * usual.plan.recipe.data.repeats * usual.processes
    whole = forecast(usual._replace(plan=usual.plan._replace(batch=-(-usual.plan.batch // unit) * unit)))
    there = MemoryLimit(whole.standing + whole.in_flight // 3, "the GPU")
    fitted = fit_batch_to_memory(usual, tmp_path, IMAGES, there)
    result = fitted.plan
    assert unit <= result.batch <= whole.images * unit
    assert result.batch % unit == 0
    estimate = forecast(fitted)
    assert estimate.total <= 0.85 * there.free
    assert (
        estimate.with_images(3 * estimate.images, estimate.accumulation) > 0.85 * there.free
    )  # not smaller than necessary
    assert "would need about" in result.defaults[-1].reason


def test_nothing_fits(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the GPU has 1 MB for this run, and even the smallest batch, 2, needs about"
    ):
        fit_batch_to_memory(job(batch="auto"), tmp_path, IMAGES, MemoryLimit(MB, "the GPU"))


def test_a_resumed_run_keeps_its_batch(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(write_toml(job(batch=24).plan.recipe))
    result = fit_batch_to_memory(job(batch="auto"), tmp_path, IMAGES, MemoryLimit(10**12, "the GPU")).plan
    assert (result.batch, result.recipe) == (24, job(batch=24).plan.recipe)


FAST = ["epochs=0.1", "evaluations=1", "model.width=16", "model.depth=1", "model.heads=1", "model.patch_size=4"]


def test_the_same_command_finds_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = [*FAST, "batch=auto"]
    first = train("digits", changes=changes, device="cpu", workers=0, quiet=True)
    recipe = first.folder / "recipe.toml"
    assert read_recipe(recipe).batch == 64
    assert "memory: about" in (first.folder / "log.txt").read_text()
    # As if there had been less memory before: the folder is found, and its recorded batch is used.
    recipe.write_text(recipe.read_text().replace("batch = 64", "batch = 32"))
    again = train("digits", changes=changes, device="cpu", workers=0, quiet=True)
    assert again.folder == first.folder
    assert [choice.value for choice in again.defaults if choice.field == "batch"] == [32]
    assert read_recipe(recipe).batch == 32


@pytest.mark.parametrize("batch", [0, -1, "many", 1.5, True, 2_000_000])
def test_invalid_batches_raise(batch: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe(batch=batch)
    assert str(caught.value) == f"batch is {batch!r}: it should be an integer from 1 to 1,000,000, or 'auto'"


# ── out of memory ──


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_which_errors_mean_out_of_memory(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_a_failed_allocation_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_an_unforeseen_out_of_memory_suggests_a_smaller_batch(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "state" / "00000001").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught, within_memory(job(batch=16), tmp_path, notes.append):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert len(notes) == 1
    words = str(caught.value)
    assert (
        "a batch of 16 needs more; use --set batch=8, or keep the batch size with --set gradient_accumulation=" in words
    )
    assert words.endswith("; the last saved training state is kept")


def test_other_errors_propagate(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="something else"), within_memory(job(), tmp_path, print):
        raise RuntimeError("something else")


LIMITED = """
import resource, sys
# TensorBoard, Parquet, and torch's search for a compiler, need memory whatever the batch.
sys.modules.update(dict.fromkeys(("tensorboard", "pyarrow", "triton")))
import vitrail.training.train
from vitrail.__main__ import main
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]), used + int(sys.argv[1])))
sys.argv = ["vitrail", *sys.argv[2:]]
main()
"""
WIDE = ["epochs=0.1", "evaluations=1", "model.width=64", "model.depth=2", "model.heads=2", "model.image_size=16"]


def limited(memory_limit: int, folder: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    """Train in a process with limited memory; in float32, whatever this CPU prefers."""
    settings = (*WIDE, "model.patch_size=1", "precision=float32", *changes)
    words = [word for change in settings for word in ("--set", change)]
    command = ["train", "digits", "--run", str(folder), "--device", "cpu", "--workers", "0", *words]
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(memory_limit), *command],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


on_linux = pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="no limit of memory on this machine")


@pytest.mark.slow
@on_linux
def test_too_large_a_batch_is_a_clear_error(tmp_path: Path) -> None:
    done = limited(600 * MB, tmp_path / "run", "batch=512")
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("vitrail: out of memory: this machine has ")
    assert " for this run, and a batch of 512 needs about 1." in last
    assert "; use --set batch=" in last
    assert "Traceback" not in done.stderr
    assert "memory: this exceeds what is available; use --set batch=" in done.stderr
    smaller = int(last.partition("--set batch=")[2].partition(",")[0])
    assert 16 <= smaller <= 256


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("remedy", ["--set batch=", "--set gradient_accumulation="])
def test_the_suggested_remedies_fit(remedy: str, tmp_path: Path) -> None:
    failed = limited(600 * MB, tmp_path / "run", "batch=512")
    number = failed.stderr.splitlines()[-1].partition(remedy)[2].partition(",")[0]
    change = f"{remedy.removeprefix('--set ')}{number}"
    # The limit is on address space, of which threads and allocators reserve more than they use.
    done = limited(750 * MB, tmp_path / "other", "batch=512", change)
    assert done.returncode == 0, done.stderr
