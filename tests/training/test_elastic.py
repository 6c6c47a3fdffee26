"""Elastic runs: torchrun restarts killed ranks, and the run ends with the weights of an undisturbed one."""

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.torchrun import command, environment, newest, ranks_of, run, steps

KILLS = 10
CHANGES = ("steps=60", "save_minutes=0", "model.mlp_dropout=0.1", "evaluations=3")


def elastic(folder: Path) -> list[str]:
    words = command(folder, 2, *CHANGES)
    place = words.index("--standalone")
    return [*words[:place], "--max-restarts", str(KILLS), *words[place:]]


@pytest.mark.slow
def test_ten_random_kills(tmp_path: Path) -> None:
    straight, folder = tmp_path / "straight", tmp_path / "run"
    assert run(straight, 2, *CHANGES).returncode == 0
    generator = np.random.default_rng(0)
    process = subprocess.Popen(elastic(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    kills = 0
    while kills < KILLS:
        before = steps(folder)
        while steps(folder) <= before:  # every kill leaves at least one more step
            time.sleep(0.02)
            assert process.poll() is None, f"the run ended with code {process.returncode} after {kills} kills"
        if steps(folder) < 4 * kills:  # on a fast machine, the run could end before the last kill
            time.sleep(generator.random() * 0.2)
        ranks = ranks_of(folder)
        if len(ranks) == 2:
            os.kill(int(generator.choice(ranks)), signal.SIGKILL)
            kills += 1
    assert process.wait(timeout=600) == 0
    actual, expected = (load_file(newest(place) / "state.safetensors") for place in (folder, straight))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
