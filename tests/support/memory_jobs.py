"""Planned runs for the memory tests, and the real steps they are compared with."""

import copy
from typing import Any

import torch
from tests.support.plain_loss import plain_loss

from vitrail.data.batches import Batch
from vitrail.models.lora import add_adapters
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, Processes, autocast
from vitrail.training.averaging import Average
from vitrail.training.context import Job, RunContext, evaluation_batch
from vitrail.training.defaults import resolve_defaults
from vitrail.training.distributed import Ranks
from vitrail.training.optimizers import freeze, make_optimizer
from vitrail.training.plan import DataFacts
from vitrail.training.recipe_files import read_recipe
from vitrail.training.sharding import shard
from vitrail.training.state import Progress, State
from vitrail.training.step import Stepper, plan_step

SMALL = {"stem": "conv", "width": 64, "depth": 2, "heads": 2, "image_size": (32, 32), "patch_size": (4, 4)}
IMAGES = 1_500


def job(
    *, device: str = "cpu", precision: Precision = "float32", processes: int = 1, side: int = 224, **changes: Any
) -> Job:
    """Return a run as `vitrail train` would plan it, with changes to its recipe."""
    recipe = read_recipe("scratch-small").replace(**{"model": SMALL, "batch": 16, **changes})
    plan = resolve_defaults(recipe, DataFacts(IMAGES, tuple("0123456789"), side, grey=False), None)
    ranks = Ranks(Processes(size=processes), torch.device(device))
    execution = plan_step(plan.model, plan.recipe, precision, ranks.device, alone=ranks.alone)
    return Job(plan, RunContext(ranks.device, precision, 0, ranks, execution))


def train_two_steps(job: Job) -> None:
    """Do what a run does: build the model, take two steps, evaluate a batch with the average."""
    plan, recipe, device = job.plan, job.plan.recipe, job.device
    model = ViT(plan.model).to(device).train()
    model.gradient_checkpointing = recipe.gradient_checkpointing
    add_adapters(model, recipe.lora, seed=0)
    freeze(model, recipe.frozen)
    average = Average(model, recipe.averaging) if recipe.averaging.on else None
    state = State(model, make_optimizer(model, recipe.optimizer), average, Progress())
    stepper = Stepper(recipe, plan.preprocess, device, job.precision, plain_loss(recipe), Ranks(Processes(), device))
    for _ in range(2):
        stepper.step(state, model, _batch(job, plan.batch), 1e-3)
    pixels = _batch(job, evaluation_batch(job.images)).to(device).pixels
    model.eval()
    with torch.no_grad(), autocast(device, job.precision):
        if average is None:
            model(plan.preprocess.normalise(pixels))
        else:
            with average.swapped(model):
                model(plan.preprocess.normalise(pixels))


def take_sharded_steps(job: Job, steps: int = 2) -> None:
    """Do what a sharded run does: shard the model, take steps, evaluate a batch with the whole weights."""
    plan, recipe, device = job.plan, job.plan.recipe, job.device
    with device:
        model = ViT(plan.model).train()
    whole = copy.deepcopy(model).to("cpu")
    shard(model, job.context.ranks, job.precision, compiled=False)
    average = Average(model, recipe.averaging) if recipe.averaging.on else None
    state = State(model, make_optimizer(model, recipe.optimizer), average, Progress(), whole=whole)
    stepper = Stepper(recipe, plan.preprocess, device, job.precision, plain_loss(recipe), job.context.ranks)
    for _ in range(steps):
        stepper.step(state, model, _batch(job, plan.batch), 1e-3)
    pixels = _batch(job, evaluation_batch(job.images)).to(device).pixels
    with state.averaged(), state.unsharded(), torch.no_grad(), autocast(device, job.precision):
        state.plain(plan.preprocess.normalise(pixels))


def _batch(job: Job, count: int) -> Batch:
    config = job.plan.model
    pixels = torch.randint(0, 256, (count, config.channels, *config.image_size), dtype=torch.uint8)
    labels = torch.arange(count) % config.classes
    return Batch(pixels, labels, labels, torch.ones(count), torch.zeros(count, 4, dtype=torch.int64))
