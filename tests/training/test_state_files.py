"""Training states that are written in the background, and by several ranks."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support import forked_commands

from vitrail.runtime import Processes
from vitrail.training.distributed import Ranks
from vitrail.training.state import Progress, Setting, State
from vitrail.training.state_files import StateWriter, load_state, save_state

SETTING = Setting(threads=1, processes=1, precision="float32")
ON_RANKS = """
import sys
from pathlib import Path

import torch

import vitrail.training.state_files
import vitrail.training.state_shards
from vitrail.errors import CheckpointError
from vitrail.runtime import process_group
from vitrail.training.distributed import Ranks
from vitrail.training.sharding import shard_group
from vitrail.training.state_files import check_shared
from vitrail.training.state_shards import appears, prepare_folder

vitrail.training.state_shards.appears.__defaults__ = (0.1,)  # not a minute
with process_group(torch.device("cpu")) as processes:
    ranks, shards, folder = Ranks(processes, torch.device("cpu")), shard_group(), Path(sys.argv[1])
    own = folder / str(processes.rank)  # as on machines without a shared disk
    for place in (own / "state", folder / "file" / "state"):
        try:
            prepare_folder(place, shards, is_main=ranks.is_main)
        except OSError as error:
            print(error)
    prepare_folder(folder / "shared", shards, is_main=ranks.is_main)
    check_shared(folder / "shared", ranks)
    try:
        check_shared(folder / "0", ranks) if ranks.is_main else check_shared(own, ranks)
    except CheckpointError as error:
        print(error)
"""


def test_steps_do_not_change_a_state_that_is_being_written(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    state = State(model, torch.optim.Adam(model.parameters(), 0.1, fused=False), None, Progress(step=1))

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()

    step()
    expected = {name: tensor.clone() for name, tensor in state.tensors().items()}
    writer, free = StateWriter(tmp_path, SETTING, Ranks(Processes(), torch.device("cuda")), None), threading.Event()
    writer._thread.submit(free.wait)  # so that the next step comes before the state is written
    writer.save(state)
    step()
    free.set()
    writer.close()
    saved = load_file(tmp_path / "00000001" / "state.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_an_error_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    ranks = forked_commands.run_ranks(2, tmp_path, code=ON_RANKS)
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    not_seen, in_the_way, not_shared = ranks[0].stdout.splitlines()
    assert not_seen == "a rank does not see it; put the run folder on a disk that all machines share"
    assert in_the_way.startswith("[Errno 20] Not a directory")
    assert not_shared.startswith(f"sharded training needs {tmp_path}/1 on every rank, but a rank does not see it; put")
    assert ranks[1].stdout == ranks[0].stdout


def test_a_state_may_be_corrupt_twice(tmp_path: Path) -> None:
    """A resumed run writes the same step again; the aside copy of the first time must not be in the way."""
    model, ranks = torch.nn.Linear(2, 2), Ranks(Processes(), torch.device("cpu"))
    state = State(model, torch.optim.SGD(model.parameters(), 0.1), None, Progress(step=1))
    for number in range(2):
        save_state(tmp_path, state, SETTING)
        (tmp_path / "00000001" / "state.safetensors").write_bytes(bytes([number]))
        (note,) = load_state(tmp_path, state, SETTING, ranks)
        assert "the training state 00000001 is corrupt" in note
    assert (tmp_path / "corrupt-00000001" / "state.safetensors").read_bytes() == b"\x01"
