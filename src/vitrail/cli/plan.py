"""`vitrail train --plan`: the table of what a run needs on several GPUs."""

from typing import TYPE_CHECKING

from vitrail.cli.output import echo, print_table
from vitrail.text import byte_size, plural

if TYPE_CHECKING:
    from vitrail.training.cluster import ClusterPlan, GpuPlan


def print_plan(plan: "ClusterPlan") -> None:
    """Print a row for whole models and one for sharded ones, and which of them a run would use."""
    echo(
        f"{plan.parameters / 1e6:,.1f} M parameters, a batch of {plan.batch:,} on {plural(plan.gpus, 'GPU')} with "
        f"{byte_size(plan.gpu_memory)} each, {plan.precision}"
    )
    echo("")
    numbers = ("memory per GPU", "weights", "gradients", "optimizer", "activations", "sent per step", "largest batch")
    rows = [_row("whole models", plan.whole), *([_row("sharded", plan.sharded)] if plan.shardable else [])]
    print_table(("each GPU holds", *numbers, "fits"), rows, numbers=numbers)
    why = "" if plan.shardable else ", because this run cannot be sharded"
    echo(f"distributed.shard=auto would use: {'sharded' if plan.shards else 'whole models'}{why}.")
    if plan.device == "cpu":
        echo("Counted for the kernels of this CPU; activations on a GPU may differ.")


def _row(name: str, plan: "GpuPlan") -> tuple[str, ...]:
    memory = plan.memory
    sizes = (memory.total, memory.weights, memory.gradients, memory.optimizer + memory.average, memory.in_flight)
    largest = f"{plan.largest_batch:,}" if plan.largest_batch else "none fits"
    return (name, *map(byte_size, sizes), byte_size(plan.sent), largest, "yes" if plan.fits else "no")
