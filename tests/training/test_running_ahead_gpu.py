"""A step's metrics arrive from a GPU without waiting for later work. Run by hand with `make test-gpu`."""

import pytest
import torch
from tests.support.plain_loss import plain_loss
from tests.support.reference_training import batches, tiny

from vitrail.data.preprocess import Preprocess
from vitrail.runtime import Processes
from vitrail.training.distributed import Ranks
from vitrail.training.optimizers import Optimizer, make_optimizer
from vitrail.training.recipe import Recipe
from vitrail.training.state import Progress, State
from vitrail.training.step import Stepper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_metrics_arrive_before_the_end_of_the_step(kind: str) -> None:
    model, recipe = tiny().to(CUDA), Recipe(optimizer=Optimizer(kind=kind, lr=0.01, max_grad_norm=1.0))
    state = State(model, make_optimizer(model, recipe.optimizer), None, Progress())
    exact = Preprocess(size=(8, 8), mean=(0.0,) * 3, std=(1 / 255,) * 3)
    stepper = Stepper(recipe, exact, CUDA, "float32", plain_loss(recipe), Ranks(Processes(), CUDA))
    data = [batch.to(CUDA) for batch in batches(3)]
    stepper.step(state, model, data[0], 0.01)  # libraries allocate their memory here
    torch.cuda.synchronize()
    # Seconds of work between a step's metrics and its end.
    state.optimizer.register_step_post_hook(lambda *_: torch.cuda._sleep(4_000_000_000))
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = stepper.launch(state, model, data[1], 0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stepped = pending.read()
    assert pending.is_busy()
    torch.cuda.synchronize()
    assert not pending.is_busy()
    assert pending.read() == stepped
    assert stepped.gradient_norm > 0
