"""On a GPU a step's metrics are read after the next step is launched; the run equals one that waits for each step."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.plain_loss import plain_loss
from tests.support.reference_training import batches, tiny
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.errors import Diverged
from vitrail.runtime import Precision, Processes
from vitrail.training.display import Status
from vitrail.training.distributed import Ranks
from vitrail.training.optimizers import Optimizer, make_optimizer
from vitrail.training.recipe import Recipe
from vitrail.training.run_folder import MetricsFile
from vitrail.training.sessions import Stopped
from vitrail.training.state import Progress, State
from vitrail.training.step import PendingStep, Stepper
from vitrail.training.train import train

SMALL = [
    "batch=64",
    "steps=9",
    "evaluations=2",
    "model.width=16",
    "model.depth=1",
    "model.heads=2",
    "gradient_accumulation=2",
]


class Arrival:
    """Fakes a CUDA event, and counts those not yet waited for."""

    open = 0
    most = 0

    def __init__(self) -> None:
        self.synchronised = False
        Arrival.open += 1
        Arrival.most = max(Arrival.most, Arrival.open)

    def synchronize(self) -> None:
        Arrival.open -= not self.synchronised
        self.synchronised = True


class Busy:
    """Fakes the end event of a step that the device is still computing."""

    def query(self) -> bool:
        return False


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a CPU run take the asynchronous path of a GPU."""

    def async_copy(numbers: Tensor) -> tuple[Tensor, Any]:
        return numbers.clone(), Arrival()

    Arrival.open = Arrival.most = 0
    monkeypatch.setattr(Stepper, "runs_ahead", True)
    monkeypatch.setattr("vitrail.training.step._async_copy", async_copy)
    monkeypatch.setattr("vitrail.training.step._record_event", lambda _: Busy())


def go(folder: Path, *changes: str) -> None:
    train("digits", changes=[*SMALL, *changes], folder=folder, device="cpu", workers=0, quiet=True)


def saved(folder: Path) -> tuple[int, dict[str, Tensor]]:
    newest = max((folder / "state").glob("[0-9]*"))
    return int(newest.name), load_file(newest / "state.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    go(folder)
    return folder


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(("minutes", "most"), [("10", 2), ("0", 1)])
def test_metrics_and_weights_are_the_same(minutes: str, most: int, straight: Path, tmp_path: Path) -> None:
    go(tmp_path / "run", f"save_minutes={minutes}")
    assert list(MetricsFile.read(tmp_path / "run")) == list(MetricsFile.read(straight))
    assert same(saved(tmp_path / "run")[1], saved(straight)[1])
    assert (Arrival.most, Arrival.open) == (most, 0)  # one step ahead, or none if every step is saved


@pytest.mark.usefixtures("ahead")
def test_waits_for_data_count_only_while_the_device_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: dict[int, float] = {}
    show = Status.update

    def update(status: Status, row: dict[str, Any]) -> None:
        waited[row["step"]] = row["waited"]
        show(status, row)

    monkeypatch.setattr(Status, "update", update)
    go(tmp_path / "run")
    assert len(waited) == 9
    assert [step for step, seconds in waited.items() if seconds > 0] == [
        1,
        5,
    ]  # at the start, and after validation


@pytest.mark.usefixtures("ahead")
def test_a_signal_saves_a_reported_step(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def ask_to_stop() -> None:
        metrics_file = folder / "metrics.jsonl"
        while not metrics_file.exists() or metrics_file.read_text().count("\n") < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask_to_stop, daemon=True).start()
    with pytest.raises(Stopped):
        go(folder, "steps=2000")
    rows = [row["step"] for row in MetricsFile.read(folder) if "loss" in row]
    assert rows == list(range(1, saved(folder)[0] + 1))
    assert len(rows) < 1000  # where it is validated, and would be saved anyway


def test_divergence_is_explained_as_in_the_synchronous_path(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    changes = ["optimizer.lr=1000.0", "optimizer.kind=sgd", "optimizer.max_grad_norm=none", "schedule.kind=constant"]
    messages = []
    for way in ("waited", "ahead"):
        if way == "ahead":
            request.getfixturevalue("ahead")
        with pytest.raises(Diverged) as result:
            go(tmp_path / way, "steps=100", "evaluations=1", *changes)
        messages.append(re.sub(r"training state is kept in .*", "", str(result.value)))
        assert not (tmp_path / way / "state").exists() or not list((tmp_path / way / "state").glob("[0-9]*"))
    assert messages[0] == messages[1]


def begin(precision: Precision = "float32", *, fused: bool = True) -> tuple[Stepper, State]:
    model, recipe = tiny(), Recipe(optimizer=Optimizer(kind="adamw", lr=0.01))
    state = State(model, make_optimizer(model, recipe.optimizer, fused=fused), None, Progress())
    exact, cpu = Preprocess(size=(8, 8), mean=(0.0,) * 3, std=(1 / 255,) * 3), torch.device("cpu")
    return Stepper(recipe, exact, cpu, precision, plain_loss(recipe), Ranks(Processes(), cpu)), state


@pytest.mark.usefixtures("ahead")
def test_steps_that_cannot_be_skipped_are_synchronous() -> None:
    (batch,) = batches(1)
    stepper, state = begin("fp16")
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    assert stepper.launch(state, state.model, batch, 0.01).ready is None
    assert (same(state.model.state_dict(), before), state.scaler.get_scale()) == (True, 2.0**126)
    stepper, state = begin(fused=False)
    assert stepper.launch(state, state.model, batch, 0.01).ready is None
    stepper, state = begin()
    assert stepper.launch(state, state.model, batch, 0.01).ready is not None


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("source", ["loss", "gradient"])
def test_a_step_that_diverged_changes_no_weights_before_it_is_read(source: str) -> None:
    stepper, state = begin()
    model, (first, second) = state.model, batches(2)
    stepper.launch(state, model, first, 0.01).read()
    if source == "gradient":
        model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    else:
        second = second._replace(pixels=torch.full_like(second.pixels, float("nan"), dtype=torch.float32))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pending = stepper.launch(state, model, second, 0.01)
    assert same(model.state_dict(), before)
    with pytest.raises(Diverged, match=r"step 1: the loss is .*, the gradient norm nan"):
        pending.read()


def test_the_mean_over_micro_batches_and_ranks() -> None:
    pending = PendingStep(4, torch.tensor([1.0, 3.0, 5.0, 2.0, 0.5]), None, processes=2, may_skip=False)
    assert pending.read() == (1.0, 7, 0.5)
