"""Distributed runs: the same result as with one rank, stopped and resumed on any number of ranks."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.support import forked_commands
from tests.support.torchrun import kill_all, losses, newest, run, start_and_wait, steps


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    done = run(folder, 1, "steps=200")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_two_ranks_train_like_one(by_one: Path, tmp_path: Path) -> None:
    done = run(tmp_path / "two", 2, "steps=200")
    assert done.returncode == 0, done.stderr
    one, two = losses(by_one), losses(tmp_path / "two")
    assert len(one) == len(two) == 200
    np.testing.assert_allclose(two, one, atol=1e-4, rtol=0)
    assert done.stdout.count("held-out images") == 1  # one process prints
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (by_one, tmp_path / "two"))
    assert first["images"] == second["images"]
    assert first["top1"] == second["top1"]
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 4])
def test_a_run_of_two_ranks_resumes_with_another_number(after: int, by_one: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start_and_wait(folder, 2, 5, "steps=200", "save_minutes=0")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert errors.count("the run is saved, rerun the same command to resume it") == 1
    assert 5 <= steps(folder) < 200
    done = run(folder, after, "steps=200", "save_minutes=0")
    assert done.returncode == 0, done.stderr
    assert f"processes was 2 before and is {after} now" in done.stderr
    np.testing.assert_allclose(losses(folder), losses(by_one), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_two_ranks_killed_at_any_moment(tmp_path: Path) -> None:
    straight, folder = tmp_path / "straight", tmp_path / "run"
    changes = ("steps=150", "save_minutes=0", "model.mlp_dropout=0.1", "mixing.mixup=0.2", "gradient_accumulation=2")
    assert run(straight, 2, *changes).returncode == 0
    generator = np.random.default_rng(0)
    kills = 0
    while kills < 3 and steps(folder) < 90:
        process = start_and_wait(folder, 2, steps(folder) + 3, *changes)
        time.sleep(generator.random() * 0.3)
        kill_all(folder)
        process.communicate()
        kills += 1
    assert kills >= 2
    done = run(folder, 2, *changes)
    assert done.returncode == 0, done.stderr
    actual, expected = (load_file(newest(place) / "state.safetensors") for place in (folder, straight))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(("optimizer.lrr=1",), "has no option 'optimizer.lrr'", marks=pytest.mark.slow),
        pytest.param(("batch=33",), "cannot be split into 2 equal micro-batches", marks=pytest.mark.slow),
        pytest.param(("mixing.mixup=0.2", "batch=34"), "use a batch that is a multiple of 4", marks=pytest.mark.slow),
    ],
)
def test_errors_are_printed_once(changes: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = run(tmp_path / "run", 2, *changes)
    messages = [line for line in done.stderr.splitlines() if line.startswith("vitrail: ")]
    assert (done.returncode != 0, len(messages)) == (True, 1), done.stderr
    assert words in messages[0]
    assert "Traceback (most recent call last)" not in done.stderr.split("ChildFailedError")[0].split("elastic")[0]


@pytest.mark.slow
def test_communication_between_ranks(tmp_path: Path) -> None:
    """All checks in one pair of processes, because starting them is slow."""
    for part, each in (("train", 100), ("val", 4)):
        for label in ("cat", "dog"):
            folder = tmp_path / "data" / part / label
            folder.mkdir(parents=True)
            for number in range(each):
                if part == "train" and number % 8 == 0:
                    (folder / f"{number:02d}-bad.png").write_text("no image")
                else:
                    Image.new("L", (8, 8), number + 100 * (label == "dog")).save(folder / f"{number:02d}.png")
    ranks = forked_commands.run_ranks(2, tmp_path, code="from tests.support.two_ranks import main; main()")
    assert [(done.returncode, done.stdout) for done in ranks] == [(0, "well\n")] * 2, [done.stderr for done in ranks]


@pytest.mark.slow
def test_ranks_exit_when_the_launcher_is_killed(tmp_path: Path) -> None:
    launcher = start_and_wait(tmp_path / "run", 2, 5, "steps=100000", "evaluations=20000")
    launcher.kill()  # only torchrun: the ranks get no signal
    try:
        launcher.communicate(timeout=120)  # until every process has closed its pipes
        assert not ranks(tmp_path / "run")
    finally:
        kill_all(tmp_path / "run")
    stopped_at = json.loads((newest(tmp_path / "run") / "state.json").read_text())["step"]
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert stopped_at == last, "the state was saved when they ended"


@pytest.mark.slow
def test_two_ranks_recover_a_corrupt_best_model(tmp_path: Path) -> None:
    first = run(tmp_path / "run", 2, "steps=20")
    assert first.returncode == 0, first.stderr
    weights = tmp_path / "run" / "best" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    done = run(tmp_path / "run", 2, "steps=20")
    assert done.returncode == 0, done.stderr
    assert "nothing is lost" in done.stderr
    assert weights.read_bytes() == content


def ranks(folder: Path) -> list[int]:
    """Return the processes whose command names a run."""
    results = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(place.name) != os.getpid() and os.fsencode(folder) in (place / "cmdline").read_bytes():
                results.append(int(place.name))
    return results
