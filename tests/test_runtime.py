"""Device, precision, seeds, process group."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import forked_commands

from vitrail.errors import ConfigError
from vitrail.runtime import Processes, autocast, busy_cpu_note, choose_device, derive_seed, process_group, seed_torch


def test_the_cpu_is_always_available() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    expected = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert choose_device().type == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [("cuda:99", "is not available on this machine"), ("gpu", "no device is called 'gpu'"), ("cud", "'cuda'")],
)
def test_unavailable_devices(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_device(name)
    assert words in str(caught.value)


def test_precision() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with autocast(torch.device("cpu"), "float32"):
        assert layer(x).dtype == torch.float32
    with autocast(torch.device("cpu"), "bf16"):
        assert layer(x).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="no precision is called 'int4'"):
        autocast(torch.device("cpu"), "int4")


def test_a_busy_cpu_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (8.14, 1.0, 1.0))
    assert busy_cpu_note(cpu) == (
        "note: this machine is busy (load 8.1 on 2 CPUs), so training may be slow; OMP_WAIT_POLICY=passive often helps "
        "(see Busy CPUs in docs/guides/train.md)"
    )
    assert busy_cpu_note(torch.device("cuda")) is None
    for name, value in (("getloadavg", lambda: (3.0, 9.0, 9.0)), ("cpu_count", lambda: 8)):
        with monkeypatch.context() as idle:
            idle.setattr(os, name, value)
            assert busy_cpu_note(cpu) is None
    with monkeypatch.context() as alone:
        alone.setattr(torch, "get_num_threads", lambda: 1)  # nothing to wait for
        assert busy_cpu_note(cpu) is None
    with monkeypatch.context() as chosen:
        chosen.setenv("OMP_WAIT_POLICY", "active")
        assert busy_cpu_note(cpu) is None
    with monkeypatch.context() as other:
        other.delattr(os, "getloadavg")  # as on Windows
        assert busy_cpu_note(cpu) is None


def test_seeding() -> None:
    seed_torch(3)
    first = torch.randn(4)
    seed_torch(3)
    assert torch.equal(first, torch.randn(4))


places = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=5)), max_size=4)


@given(st.integers(), places, places)
def test_derived_seeds_are_pure_and_distinct(seed: int, one: list[int | str], other: list[int | str]) -> None:
    result = derive_seed(seed, *one)
    assert result == derive_seed(seed, *one)
    assert 0 <= result < 2**63
    if one != other:
        assert result != derive_seed(seed, *other)


def test_derived_seeds_never_change() -> None:
    """Changing a value here would change every user's training runs."""
    assert derive_seed(0, "dropout", 7) == 662708177384516509


def test_a_single_process_has_no_group() -> None:
    with process_group(torch.device("cpu")) as processes:
        assert processes == Processes(0, 1, 0)
        assert processes.is_main


def test_an_incomplete_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with (
        pytest.raises(ConfigError, match="sets RANK but not LOCAL_RANK, WORLD_SIZE"),
        process_group(torch.device("cpu")),
    ):
        pass


def torchrun(code: str, processes: int) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    run += ["--no-python", sys.executable, "-c", code]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(run, capture_output=True, text=True, check=False, env=environment, timeout=120)


def test_destroyed_groups_are_kept_alive() -> None:
    """Another reference, such as the model in a traceback, is never the last one, whose release could hang."""
    code = (
        "import weakref, torch, torch.distributed as d\n"
        "from vitrail.runtime import process_group\n"
        "with process_group(torch.device('cpu')):\n"
        "    group = weakref.ref(d.group.WORLD)\n"
        "raise SystemExit(group() is None or d.is_initialized())\n"
    )
    (done,) = forked_commands.run_ranks(1, code=code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_processes_form_a_group() -> None:
    code = (
        "import torch, torch.distributed as d\n"
        "from vitrail.runtime import process_group\n"
        "with process_group(torch.device('cpu')) as p:\n"
        "    t = torch.tensor([p.rank + 1.0]); d.all_reduce(t)\n"
        "    import sys; sys.stdout.write(f'{p.rank} {p.size} {p.is_main} {t.item()}\\n')\n"
    )
    done = torchrun(code, 2)
    assert sorted(done.stdout.split("\n")) == ["", "0 2 True 3.0", "1 2 False 3.0"], done.stderr
