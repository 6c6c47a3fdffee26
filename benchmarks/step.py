"""Time of one `vitrail train` step, with images already on the device.

    python benchmarks/step.py cifar10 --side 32 --classes 10
    python benchmarks/step.py cifar10 --side 32 --classes 10 --mode default
    python benchmarks/step.py scratch-small --device cpu --set batch=32 --rounds 2 --steps 2    smoke test

The step is the one of a run: normalisation, mixing, the compiled model, the loss, clipping, the optimizer, the average.
Reported are the time per step, the host time (on a GPU well below it), images/s and peak memory. `--short N` uses the
short-attention kernel up to N tokens, `--mode` is torch.compile's mode. The median of `--rounds` rounds counts.
"""

import argparse
import json
import statistics
import sys
import time
from typing import cast

import torch
from torch import nn

from vitrail.acceleration import planner
from vitrail.acceleration.cuda.training.model import FusedTraining
from vitrail.data.batches import Batch
from vitrail.errors import VitrailError
from vitrail.models.vit import ViT
from vitrail.runtime import Processes, choose_device, faster_in_bf16
from vitrail.training.averaging import Average
from vitrail.training.defaults import resolve_defaults
from vitrail.training.distributed import Ranks
from vitrail.training.optimizers import freeze, make_optimizer
from vitrail.training.plan import DataFacts, TrainingPlan
from vitrail.training.recipe_files import read_recipe
from vitrail.training.state import Progress, State
from vitrail.training.step import Stepper, forward_of, plan_step
from vitrail.training.supervised import Supervised

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def batch_of(plan: TrainingPlan, device: torch.device) -> Batch:
    """Return random images with the recipe's mixing."""
    generator, count = torch.Generator().manual_seed(0), plan.batch
    height, width = plan.model.image_size
    pixels = torch.randint(256, (count, plan.model.channels, height, width), dtype=torch.uint8, generator=generator)
    labels = torch.randint(plan.model.classes, (count,), generator=generator)
    box = torch.tensor([height // 4, width // 4, height // 2, width // 2]).repeat(count, 1)
    return Batch(pixels, labels, torch.arange(count), torch.full((count,), 0.75), box).to(device)


def prepared(plan: TrainingPlan, options: argparse.Namespace, device: torch.device) -> tuple[Stepper, State, nn.Module]:
    """Return everything a step needs, built as in a run."""
    ranks, recipe = Ranks(Processes(), device), plan.recipe
    precision = recipe.precision if recipe.precision != "auto" else "bf16" if faster_in_bf16(device) else "float32"
    torch.manual_seed(0)
    model = ViT(plan.model).to(device).train()
    model.gradient_checkpointing = recipe.gradient_checkpointing
    freeze(model, recipe.freeze)
    average = Average(model, recipe.averaging) if recipe.averaging.on else None
    state = State(model, make_optimizer(model, recipe.optimizer), average, Progress())
    execution = plan_step(model.config, recipe, precision, device, alone=True)
    forward = forward_of(model, execution, ranks)
    if options.mode is not None:
        inner = FusedTraining(model) if execution.path == "fused_training" else model
        forward = cast("nn.Module", torch.compile(inner, mode=options.mode))
    learner = Supervised.without_labels(plan, device)
    return Stepper(recipe, plan.preprocess, device, precision, learner, ranks), state, forward


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe's name or file")
    parser.add_argument("--set", action="append", default=[], help="changes to the recipe, such as batch=512")
    parser.add_argument("--side", type=int, default=32, help="image size")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--mode", choices=MODES, help="torch.compile mode, instead of the default of training")
    parser.add_argument(
        "--short",
        type=int,
        default=planner.MAX_SHORT,
        help="use our short-attention kernel up to this many tokens",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30, help="steps per round")
    parser.add_argument("--json", help="append a line with the results to this file")
    options = parser.parse_args()
    planner.MAX_SHORT = options.short
    device = choose_device(options.device)
    names = tuple(map(str, range(options.classes)))
    plan = resolve_defaults(
        read_recipe(options.recipe, options.set),
        DataFacts(50_000, names, options.side, grey=False, device=device.type),
        None,
    )
    stepper, state, forward = prepared(plan, options, device)
    batch, lr = batch_of(plan, device), plan.peak_lr / 10

    began = time.perf_counter()
    stepper.step(state, forward, batch, lr)
    first = time.perf_counter() - began
    for _ in range(3):
        stepper.step(state, forward, batch, lr)
    whole, here = [], []
    for _ in range(options.rounds):
        synchronise(device)
        began = time.perf_counter()
        for _ in range(options.steps):
            pending = stepper.launch(state, forward, batch, lr)
        here.append((time.perf_counter() - began) / options.steps)
        synchronise(device)
        whole.append((time.perf_counter() - began) / options.steps)
    step, busy = statistics.median(whole), statistics.median(here)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    record = {
        "recipe": options.recipe, "changes": options.set, "mode": options.mode, "short": options.short,
        "step_ms": 1e3 * step, "busy_ms": 1e3 * busy, "images_per_second": plan.batch / step, "first_s": first,
        "peak_mib": peak, "loss": pending.read().loss,
    }  # fmt: skip
    print(
        f"batch {plan.batch}: {1e3 * step:.2f} ms per step, {plan.batch / step:,.0f} images/s; host time"
        f" {1e3 * busy:.2f} ms; first step {first:.1f} s" + (f"; peak {peak:,.0f} MiB" if peak is not None else "")
    )
    if options.json:
        with open(options.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    try:
        main()
    except VitrailError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
