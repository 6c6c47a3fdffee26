"""Training on a CUDA device, where a step's numbers are read late. Run by hand with `make test-gpu`; CI has no GPU."""

import math
from pathlib import Path

import pytest
import torch
from tests.training.plain_loop import batches, tiny
from tests.training.test_step import CASES, EXACT, begin

from vitrail.errors import Diverged
from vitrail.runtime import Processes
from vitrail.training.folder import Journal
from vitrail.training.optimizers import Optimizer
from vitrail.training.recipe import Recipe
from vitrail.training.step import Stepper
from vitrail.training.team import Team
from vitrail.training.train import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
CUDA = torch.device("cuda")
SMALL = (
    *("steps=40", "batch=64", "evaluations=2", "model.width=32", "model.depth=2", "model.heads=2", "model.stem=conv"),
    *("augmentation.crop=padded", "augmentation.flip=0.5", "mixing.mixup=0.5", "precision=bf16"),
)


@pytest.mark.parametrize("name", ["adamw", "sgd", "clipped adamw", "ema", "mixup and cutmix, smoothed"])
def test_steps_are_those_of_a_processor(name: str) -> None:
    case, found = CASES[name], {}
    for device in (torch.device("cpu"), CUDA):
        model = tiny().to(device)
        state = begin(model, case.recipe())
        stepper = Stepper(case.recipe(), EXACT, device, "float32", None, Team(Processes(), device))
        taken = [stepper.take(state, model, batch, 0.01) for batch in batches(4, case.mixed)]
        found[device.type] = (
            torch.tensor([step.read().loss for step in taken]),
            {key: value.cpu() for key, value in model.state_dict().items()},
        )
    assert torch.allclose(found["cuda"][0], found["cpu"][0], rtol=1e-4)
    for key, value in found["cpu"][1].items():
        other = found["cuda"][1][key]
        if key.endswith("qkv.bias"):
            # Whatever a bias of keys is, attention is the same: its gradient is rounding, which Adam makes steps of.
            value, other = (torch.cat([bias.chunk(3)[0], bias.chunk(3)[2]]) for bias in (value, other))
        assert torch.allclose(other, value, rtol=1e-2, atol=1e-3), key


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_that_diverges_changes_no_weight_and_is_told_when_it_is_read(kind: str) -> None:
    recipe = Recipe(optimizer=Optimizer(kind=kind, lr=0.01, clip=0.5))
    model, (first, second, third) = tiny().to(CUDA), batches(3)
    state = begin(model, recipe)
    stepper = Stepper(recipe, EXACT, CUDA, "float32", None, Team(Processes(), CUDA))
    stepper.step(state, model, first, 0.01)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hook = model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
    taken = stepper.take(state, model, second, 0.01)
    hook.remove()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(Diverged, match=r"step 1: the loss is .*, the norm of the gradient nan"):
        taken.read()
    assert math.isfinite(stepper.step(state, model, third, 0.01).loss)


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("on_device", ["false", "true"])
def test_a_run(compiled: str, on_device: str, tmp_path: Path) -> None:
    """Every step is in the journal once and in order, and the loss falls."""
    kind = "muon" if compiled == on_device else "adamw"
    changes = [*SMALL, f"compile={compiled}", f"data.on_device={on_device}", f"optimizer.kind={kind}"]
    train("digits", changes=changes, folder=tmp_path / "run", device="cuda", workers=2, quiet=True)
    rows = [row for row in Journal.read(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert sum(row["loss"] for row in rows[-5:]) < sum(row["loss"] for row in rows[:5])
    assert (tmp_path / "run" / "verdict.json").exists()
