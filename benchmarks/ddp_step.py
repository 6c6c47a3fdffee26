"""Time of a training step on the fused path: one process, and the pieces that several ranks run, under DDP.

    python benchmarks/ddp_step.py --json rows.json                a GPU: B/16, bf16, batch 256, 224 px
    python benchmarks/ddp_step.py --blocks 1 2 3 --all            pieces of other sizes, and what a step consists of
    python benchmarks/ddp_step.py --tiny --device cpu --eager     smoke test

alone       the step of a run with one process: compiled in one piece, with CUDA graphs
DDP N       the step of a run with several ranks: compiled in pieces of N blocks, wrapped by DDP
with --all: alone without CUDA graphs, pieces without DDP, and the standard compiled model under DDP

DDP has a world size of 1, with NCCL on a GPU, so every step copies gradients into buckets and calls the all-reduce, but
sends nothing. All rows take the same images, which are on the device, with AdamW. They take turns; a ratio is the
median over the rounds of time / time of "alone" in the same round.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from vitrail.acceleration.cuda.training.model import FusedTraining
from vitrail.acceleration.cuda.training.pieces import BLOCKS_PER_PIECE, FusedPieces
from vitrail.acceleration.planner import ExecutionPlan
from vitrail.data.batches import Batch
from vitrail.errors import ConfigError, VitrailError
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, Processes, choose_device
from vitrail.training.defaults import resolve_defaults
from vitrail.training.distributed import Ranks
from vitrail.training.optimizers import make_optimizer
from vitrail.training.plan import DataFacts, TrainingPlan
from vitrail.training.recipe_files import read_recipe
from vitrail.training.state import Progress, State
from vitrail.training.step import Stepper, forward_of
from vitrail.training.supervised import Supervised

LR = 1e-5
TINY = ("model.image_size=32", "model.patch_size=8", "model.width=32", "model.depth=4", "model.heads=2")
Forward = Callable[[ViT, Ranks], nn.Module]


class Row(NamedTuple):
    """A contestant, and the milliseconds per step of its rounds."""

    name: str
    step: Callable[[], None]
    step_ms: list[float]
    host_ms: list[float]


def plan_of(options: argparse.Namespace, precision: Precision, device: torch.device) -> TrainingPlan:
    """Return the plan of a run with this model."""
    model = TINY if options.tiny else (f"model.name={options.model}", "model.image_size=224")
    changes = [
        *model, f"batch={options.batch or (8 if options.tiny else 256)}", f"precision={precision}", "compile=true",
        "steps=100000", "optimizer.kind=adamw", "averaging.kind=none", "mixing.mixup=0", "mixing.cutmix=0",
    ]  # fmt: skip
    facts = DataFacts(1_000_000, tuple(map(str, range(1000))), 224, grey=False, device=device.type)
    return resolve_defaults(read_recipe("scratch-small", changes), facts, None)


def images_of(plan: TrainingPlan, device: torch.device) -> Batch:
    """Return random images."""
    generator, count = torch.Generator().manual_seed(0), plan.batch
    shape = (count, plan.model.channels, *plan.model.image_size)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(plan.model.classes, (count,), generator=generator)
    box = torch.zeros(count, 4, dtype=torch.int64)
    return Batch(pixels, labels, torch.arange(count), torch.ones(count), box).to(device)


def contestants(options: argparse.Namespace, precision: Precision, device: torch.device) -> dict[str, Forward]:
    """Return how each row computes the model."""

    def compiled(model: nn.Module) -> nn.Module:
        return cast("nn.Module", torch.compile(model))

    def under_ddp(blocks: int) -> Forward:
        return lambda model, ranks: ranks.replicate(FusedPieces(model, blocks), views=True)

    def in_pieces(blocks: int) -> Forward:
        return lambda model, _: FusedPieces(model, blocks)

    alone = ExecutionPlan("fused_training", precision, graphs=device.type == "cuda")
    found: dict[str, Forward] = {"alone": lambda model, ranks: forward_of(model, alone, ranks)}
    found |= {f"DDP {blocks}": under_ddp(blocks) for blocks in options.blocks}
    if options.all:
        found["alone, no CUDA graphs"] = lambda model, _: compiled(FusedTraining(model))
        found |= {f"pieces {blocks}": in_pieces(blocks) for blocks in options.blocks}
        found["standard model, DDP"] = lambda model, ranks: compiled(ranks.replicate(model))
    return found


def row_of(
    name: str, forward_with: Forward, plan: TrainingPlan, precision: Precision, batch: Batch, device: torch.device
) -> Row:
    """Build everything that a step needs, as in a run."""
    torch.manual_seed(0)
    ranks, model = Ranks(Processes(), device), ViT(plan.model).to(device).train()
    state = State(model, make_optimizer(model, plan.recipe.optimizer), None, Progress())
    forward, learner = forward_with(model, ranks), Supervised.without_labels(plan, device)
    stepper = Stepper(plan.recipe, plan.preprocess, device, precision, learner, ranks)

    def step() -> None:
        stepper.launch(state, forward, batch, LR)

    return Row(name, step, [], [])


def measure(row: Row, steps: int, device: torch.device) -> None:
    """Add a round to a row."""
    _synchronise(device)
    began = time.perf_counter()
    for _ in range(steps):
        row.step()
    row.host_ms.append(1e3 * (time.perf_counter() - began) / steps)
    _synchronise(device)
    row.step_ms.append(1e3 * (time.perf_counter() - began) / steps)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """Initialise a process group with one rank."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1, device_id=device if on_gpu else None
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def summary_of(row: Row, alone: Row) -> dict[str, str | float]:
    """Return the medians of a row."""
    ratios = [own / first for own, first in zip(row.step_ms, alone.step_ms, strict=True)]
    return {
        "name": row.name, "step_ms": statistics.median(row.step_ms), "host_ms": statistics.median(row.host_ms),
        "ratio": statistics.median(ratios), "lowest_ratio": min(ratios), "highest_ratio": max(ratios),
    }  # fmt: skip


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="B/16", help="a named model")
    parser.add_argument("--batch", type=int, help="images per step; default 256")
    parser.add_argument("--blocks", type=int, nargs="+", default=[BLOCKS_PER_PIECE], help="blocks per piece")
    parser.add_argument("--all", action="store_true", help="also measure what a step consists of")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test this script")
    parser.add_argument("--eager", action="store_true", help="compile nothing, to test this script")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args()
    for name in ("batch", "rounds", "steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; give 1 or more")
    if min(options.blocks) < 1:
        raise ConfigError(f"--blocks is {min(options.blocks)}; give 1 or more")
    return options


def main() -> None:
    """Run the benchmark."""
    options = parse()
    device = choose_device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    precision: Precision = "bf16" if device.type == "cuda" else "float32"
    plan = plan_of(options, precision, device)
    batch = images_of(plan, device)
    stance = torch.compiler.set_stance("force_eager" if options.eager else "default")
    with stance, world_of_one(device):
        rows = []
        for name, forward in contestants(options, precision, device).items():
            row, began = row_of(name, forward, plan, precision, batch, device), time.perf_counter()
            for _ in range(4):  # compiles, captures CUDA graphs, orders DDP's buckets
                row.step()
            _synchronise(device)
            print(f"{name}: ready after {time.perf_counter() - began:.0f} s", flush=True)
            rows.append(row)
        for _ in range(options.rounds):
            for row in rows:
                measure(row, options.steps, device)
    found = [summary_of(row, rows[0]) for row in rows]
    for each in found:
        print(
            f"{each['name']:24} {each['step_ms']:8.2f} ms per step, host time {each['host_ms']:8.2f} ms, "
            f"{each['ratio']:.4f} of alone ({each['lowest_ratio']:.4f} to {each['highest_ratio']:.4f})"
        )
    if options.json is not None:
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        content = {
            "device": machine, "torch": torch.__version__, "model": "tiny" if options.tiny else options.model,
            "batch": plan.batch, "precision": precision, "rows": found,
        }  # fmt: skip
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except VitrailError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
