"""What every rank of a test of the fused path executes; rank 0 prints what it measured, as JSON.

    torchrun --standalone --nproc-per-node 2 -m tests.support.fused_ranks cuda:0 inductor
    torchrun --standalone --nproc-per-node 1 -m tests.support.fused_ranks cuda:0 inductor      NCCL

The first argument is the device of all ranks; the second is torch.compile's backend, or `none` to compile nothing; any
further ones are the cases, all by default. Every case takes a step of SGD on all ranks, and one on a single rank
with the same global batch, and compares what both have changed: ‖difference‖ / ‖update‖.
"""

import json
import sys
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from tests.support.plain_loss import plain_loss
from tests.support.reference_training import CLASSES, EXACT, IMAGES, SIDE, batches, begin
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from vitrail.acceleration.cuda.training.model import FusedTraining
from vitrail.acceleration.cuda.training.pieces import FusedPieces
from vitrail.acceleration.planner import ExecutionPlan
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, Processes, process_group
from vitrail.training.distributed import Ranks
from vitrail.training.optimizers import Optimizer
from vitrail.training.recipe import Recipe
from vitrail.training.step import Stepper, forward_of

LR = 100.0
"""High, so that rounding of the weights is small compared with their update."""
IN_PIECES = ExecutionPlan("fused_training", "bf16", pieces=True)


class Case(NamedTuple):
    """A step on all ranks, and the step of one rank that it is compared with."""

    precision: str
    accumulation: int = 1
    frozen: bool = False
    same_micro_batches: bool = False
    """Whether the single rank splits the batch as the ranks do, and compiles the same pieces. In bf16 only this is
    exact: the gradient of a matrix is rounded once for each micro-batch."""


CASES = {
    "float64": Case("float64"),
    "float64, accumulated": Case("float64", accumulation=2),
    "float64, frozen": Case("float64", frozen=True),
    "float32": Case("float32"),
    "float32, accumulated": Case("float32", accumulation=2),
    "bf16, the same micro-batches": Case("bf16", same_micro_batches=True),
    "bf16": Case("bf16"),
}


LIMITS = {"float64": 1e-12, "float32": 5e-6, "bf16": 2e-2}
"""In float32 and bf16, the limit is what splitting a batch changes on a single rank, too."""


def too_large(differences: dict[str, float]) -> dict[str, float]:
    """Return the differences that exceed their limit."""
    limits = {name: 1e-6 if case.same_micro_batches else LIMITS[case.precision] for name, case in CASES.items()}
    return {name: found for name, found in differences.items() if not found < limits[name]}


def fresh(case: Case, device: torch.device) -> ViT:
    """Return the model: with two pieces of blocks, and several buckets."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(image_size=SIDE, patch_size=4, width=128, depth=4, heads=2, classes=CLASSES)).train()
    nn.init.normal_(model.head.weight, std=0.1)  # it is zero at first, and so are all other gradients
    model.to(device)
    if case.frozen:
        for part in (model.patch_embed, model.blocks[0], model.blocks[3].norm1):
            part.requires_grad_(False)
    return model.double() if case.precision == "float64" else model


def update(case: Case, model: ViT, forward: nn.Module, ranks: Ranks, accumulation: int, lr: float = LR) -> Tensor:
    """Return what a step changes in the weights."""
    before = torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])
    recipe = Recipe(optimizer=Optimizer(kind="sgd", lr=lr, momentum=0.0), gradient_accumulation=accumulation)
    precision: Precision = "bf16" if case.precision == "bf16" else "float32"
    stepper = Stepper(recipe, EXACT, ranks.device, precision, plain_loss(recipe), ranks)
    if case.precision == "float64":
        forward.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    (batch,), each = batches(1), IMAGES // ranks.processes.size
    own = batch._each(lambda tensor: tensor[each * ranks.processes.rank : each * (ranks.processes.rank + 1)])
    stepper.step(begin(model, recipe), forward, own, lr)
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()]) - before


def difference(case: Case, ranks: Ranks) -> float:
    """Return how much the update of all ranks differs from that of one rank."""
    model = fresh(case, ranks.device)
    actual = update(case, model, forward_of(model, IN_PIECES, ranks), ranks, case.accumulation)
    model, alone = fresh(case, ranks.device), Ranks(Processes(), ranks.device)
    if case.same_micro_batches:
        expected = update(case, model, FusedPieces(model), alone, case.accumulation * ranks.processes.size)
    else:
        expected = update(case, model, FusedTraining(model), alone, 1)
    return float((actual - expected).norm() / expected.norm())


def order(ranks: Ranks) -> list[str]:
    """Return for each of three steps in which order buckets are reduced (b) and the stem's backward pass starts (s)."""
    events: list[str] = []

    def reduced(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        events.append("b")
        return allreduce_hook(group, bucket)

    model = fresh(Case("float32"), ranks.device)
    forward = cast("DistributedDataParallel", forward_of(model, IN_PIECES, ranks))
    forward.register_comm_hook(None, reduced)
    pieces = cast("FusedPieces", forward.module)
    compiled = pieces.stem

    def watched(x: Tensor) -> Any:
        tokens, places = compiled(x)
        tokens.register_hook(lambda _: events.append("s"))
        return tokens, places

    pieces.stem = watched
    for _ in range(3):
        update(Case("float32"), model, forward, ranks, 1, 0.01)
        events.append(" ")
    return "".join(events).split()


def main() -> None:
    device, backend = torch.device(sys.argv[1]), sys.argv[2]
    stance = torch.compiler.set_stance("force_eager")
    if backend != "none":
        stance = torch.compiler.set_stance("default", force_backend=None if backend == "inductor" else backend)
    with stance, process_group(device) as processes:
        ranks = Ranks(processes, device)
        found = {name: difference(CASES[name], ranks) for name in sys.argv[3:] or CASES}
        result = {"differences": found, "order": order(ranks), "backend": dist.get_backend()}
    if processes.is_main:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
