"""Training on CUDA, with asynchronous metrics. Run by hand with `make test-gpu`; CI has no GPU."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.fused_ranks import CASES as RANK_CASES
from tests.support.fused_ranks import too_large
from tests.support.plain_loss import plain_loss
from tests.support.reference_training import CASES, EXACT, batches, begin, tiny
from tests.support.torchrun import environment, losses

from vitrail.acceleration.cuda.training.model import FusedTraining
from vitrail.acceleration.planner import ExecutionPlan
from vitrail.errors import Diverged
from vitrail.models.vit import ViT
from vitrail.runtime import Processes
from vitrail.training.averaging import Averaging
from vitrail.training.distributed import Ranks
from vitrail.training.optimizers import Optimizer
from vitrail.training.recipe import Recipe
from vitrail.training.run_folder import MetricsFile
from vitrail.training.step import Stepper, forward_of, plan_step, reset_compiled
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


def graphs(model: ViT, recipe: Recipe) -> ExecutionPlan:
    """Return the plan of a compiled run in bf16, which has CUDA graphs."""
    plan = plan_step(model.config, recipe, "bf16", CUDA, alone=True)
    assert plan.graphs
    return plan


@pytest.mark.parametrize("name", ["adamw", "sgd", "clipped adamw", "ema", "mixup and cutmix, smoothed"])
def test_steps_match_the_cpu(name: str) -> None:
    case, results = CASES[name], {}
    for device in (torch.device("cpu"), CUDA):
        model = tiny().to(device)
        state = begin(model, case.recipe())
        stepper = Stepper(
            case.recipe(), EXACT, device, "float32", plain_loss(case.recipe()), Ranks(Processes(), device)
        )
        pending = [stepper.launch(state, model, batch, 0.01) for batch in batches(4, case.mixed)]
        results[device.type] = (
            torch.tensor([step.read().loss for step in pending]),
            {key: value.cpu() for key, value in model.state_dict().items()},
        )
    assert torch.allclose(results["cuda"][0], results["cpu"][0], rtol=1e-4)
    for key, value in results["cpu"][1].items():
        other = results["cuda"][1][key]
        if key.endswith("qkv.bias"):
            # Attention does not depend on the key bias: its gradient is rounding noise, which Adam amplifies.
            value, other = (torch.cat([bias.chunk(3)[0], bias.chunk(3)[2]]) for bias in (value, other))
        assert torch.allclose(other, value, rtol=1e-2, atol=1e-3), key


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_cuda_graph_steps_match_plain_steps(kind: str) -> None:
    """With stochastic depth, weight averaging, and a validation between two steps."""
    recipe = Recipe(
        compile=True, optimizer=Optimizer(kind=kind, lr=0.01, max_grad_norm=1.0), averaging=Averaging(kind="ema")
    )
    ranks, result = Ranks(Processes(), CUDA), []
    for replayed in (True, False):
        model = tiny(width=32, stochastic_depth=0.5).to(CUDA)
        forward = forward_of(model, graphs(model, recipe), ranks) if replayed else torch.compile(FusedTraining(model))
        state, stepper = begin(model, recipe), Stepper(recipe, EXACT, CUDA, "bf16", plain_loss(recipe), ranks)
        losses = []
        for number, batch in enumerate(batches(8)):
            losses.append(stepper.step(state, forward, batch.to(CUDA), 0.01).loss)
            if number == 4 and state.average is not None:
                with state.average.swapped(model), torch.no_grad():
                    model.eval()(torch.randn(3, 3, 8, 8, device=CUDA))
                model.train()
        result.append((torch.tensor(losses), {key: value.cpu() for key, value in model.state_dict().items()}))
        reset_compiled(CUDA)
    assert torch.allclose(result[0][0], result[1][0], rtol=1e-3)
    for key, value in result[1][1].items():
        assert torch.allclose(result[0][1][key], value, rtol=1e-2, atol=1e-3), key


def test_random_draws_in_a_cuda_graph_depend_on_the_step() -> None:
    recipe = Recipe(compile=True, optimizer=Optimizer(kind="adamw", lr=0.01))
    ranks, model, (batch, *_) = Ranks(Processes(), CUDA), tiny(width=32, stochastic_depth=0.5).to(CUDA), batches(1)
    forward = forward_of(model, graphs(model, recipe), ranks)
    state, stepper = begin(model, recipe), Stepper(recipe, EXACT, CUDA, "bf16", plain_loss(recipe), ranks)

    def loss_of(step: int) -> float:
        state.progress.step = step
        return stepper.step(state, forward, batch.to(CUDA), 0.0).loss  # learning rate 0, so that nothing changes

    first = [loss_of(step) for step in range(6)]
    assert len(set(first)) > 3
    assert [loss_of(step) for step in range(6)] == pytest.approx(first, rel=1e-6)
    reset_compiled(CUDA)


def test_a_run_frees_its_memory(tmp_path: Path) -> None:
    held = []
    for number in range(2):
        changes = [*SMALL, "compile=true", "batch=auto"]
        train("digits", changes=changes, folder=tmp_path / str(number), device="cuda", workers=2, quiet=True)
        held.append(torch.cuda.memory_reserved())
    assert held[1] <= held[0] + 2**20
    recipes = [(tmp_path / str(number) / "recipe.toml").read_text() for number in range(2)]
    assert recipes[0] == recipes[1]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_that_diverges_changes_no_weights_and_raises_when_read(kind: str) -> None:
    recipe = Recipe(optimizer=Optimizer(kind=kind, lr=0.01, max_grad_norm=0.5))
    model, (first, second, third) = tiny().to(CUDA), batches(3)
    state = begin(model, recipe)
    stepper = Stepper(recipe, EXACT, CUDA, "float32", plain_loss(recipe), Ranks(Processes(), CUDA))
    stepper.step(state, model, first, 0.01)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hook = model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
    pending = stepper.launch(state, model, second, 0.01)
    hook.remove()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(Diverged, match=r"step 1: the loss is .*, the gradient norm nan"):
        pending.read()
    assert math.isfinite(stepper.step(state, model, third, 0.01).loss)


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("on_device", ["false", "true"])
def test_a_run(compiled: str, on_device: str, tmp_path: Path) -> None:
    """Every step is in the metrics file once and in order, and the loss falls."""
    kind = "muon" if compiled == on_device else "adamw"
    changes = [*SMALL, f"compile={compiled}", f"data.on_device={on_device}", f"optimizer.kind={kind}"]
    train("digits", changes=changes, folder=tmp_path / "run", device="cuda", workers=2, quiet=True)
    rows = [row for row in MetricsFile.read(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert sum(row["loss"] for row in rows[-5:]) < sum(row["loss"] for row in rows[:5])
    assert (tmp_path / "run" / "result.json").exists()


# ── the fused path on several ranks ──


def by_ranks(count: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module on several ranks, which share one GPU."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "--", *words]
    return subprocess.run(
        [sys.executable, *torchrun],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env=environment(),
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (1, "nccl")])
def test_ranks_on_the_fused_path_update_as_one(ranks: int, backend: str) -> None:
    """Two ranks share the GPU; NCCL has a world size of 1. Gradients are reduced during the backward pass."""
    done = by_ranks(ranks, "tests.support.fused_ranks", "cuda:0", "inductor")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)  # the differences; see them with pytest -s
    assert found["backend"] == backend
    assert found["differences"].keys() == RANK_CASES.keys()
    assert too_large(found["differences"]) == {}
    assert [step.startswith("b") for step in found["order"]] == [False, True, True], found["order"]


def test_a_run_of_two_ranks_takes_the_fused_path(tmp_path: Path) -> None:
    words = [word for change in (*SMALL, "compile=true", "gradient_accumulation=2") for word in ("--set", change)]
    given = ["--run", str(tmp_path / "run"), "--device", "cuda:0", "--workers", "0"]
    done = by_ranks(2, "vitrail", "train", "digits", *given, *words)
    assert done.returncode == 0, done.stderr
    assert "fused CUDA path, compiled, bf16: in pieces" in done.stdout + done.stderr
    found = losses(tmp_path / "run")
    assert len(found) == 40
    assert sum(found[-5:]) < sum(found[:5])
