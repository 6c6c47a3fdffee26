"""What a run needs on several GPUs: memory, communication and the largest batch, with whole models and sharded."""

from dataclasses import replace
from typing import NamedTuple

import torch

from vitrail.models.vit import ViT
from vitrail.runtime import Processes
from vitrail.training.auto_batch import FILLED, MemoryLimit, batch_unit, min_over_ranks
from vitrail.training.context import Job
from vitrail.training.learners import learner_of
from vitrail.training.memory import Forecast, forecast, module_of
from vitrail.training.plan import check_batch
from vitrail.training.sharding import ShardedUnits, unsupported_by_sharding
from vitrail.training.step import plan_step

COPIES = 6
"""At most: weights, gradients, DDP's buckets, two averages of Adam, the averaged weights."""
TRIED = 2
"""Batches whose memory is forecast, besides the recipe's, to find the largest one that fits."""


class GpuPlan(NamedTuple):
    """What one of several GPUs needs for a step."""

    sharded: bool
    memory: Forecast
    sent: int
    """Bytes that it sends to the others in a step."""
    largest_batch: int
    """About the largest batch, over all GPUs, that fits; 0 if none does."""
    fits: bool
    """Whether the batch of the recipe fits."""


class ClusterPlan(NamedTuple):
    """What a run needs on several GPUs."""

    gpus: int
    gpu_memory: int
    """Bytes of each GPU that the run can use."""
    batch: int
    """Images per step, over all GPUs."""
    parameters: int
    precision: str
    device: str
    """The kind of device whose kernels were counted: "cpu" or "cuda"."""
    whole: GpuPlan
    sharded: GpuPlan
    shardable: bool
    """Whether the run can be sharded at all."""

    @property
    def shards(self) -> bool:
        """Whether `distributed.shard = "auto"` would shard the model."""
        return self.shardable and self.gpus > 1 and self.whole.memory.standing > FILLED * self.gpu_memory


def shard_if_needed(job: Job, limit: MemoryLimit) -> Job:
    """With `distributed.shard = "auto"`, shard a model whose training state does not fit on one device."""
    recipe, context = job.plan.recipe, job.context
    if recipe.distributed.shard != "auto" or context.ranks.alone or unsupported_by_sharding(recipe, context.precision):
        return job
    free = FILLED * min_over_ranks(limit.free, job.device)
    if COPIES * 4 * _parameters(job) <= free or forecast(job).standing <= free:
        return job
    return _sharded_job(job)


def plan_cluster(job: Job, gpus: int, gpu_memory: int) -> ClusterPlan:
    """Forecast a step on several GPUs, without starting it."""
    if job.plan.recipe.batch != "auto":  # which is rounded to what fits
        check_batch(job.plan, gpus)
    ranks = job.context.ranks._replace(processes=Processes(0, gpus, 0))
    execution = plan_step(job.plan.model, job.plan.recipe, job.precision, job.device, alone=gpus == 1)
    whole = job._replace(context=replace(job.context, ranks=ranks, sharded=False, execution=execution))
    both = [_gpu_plan(one, gpu_memory) for one in (whole, _sharded_job(whole))]
    kind = "cuda" if job.device.type == "cuda" else "cpu"
    return ClusterPlan(
        gpus,
        gpu_memory,
        job.plan.batch,
        _parameters(job),
        job.precision,
        kind,
        both[0],
        both[1],
        shardable=not unsupported_by_sharding(job.plan.recipe, job.precision),
    )


def _sharded_job(job: Job) -> Job:
    execution = plan_step(job.plan.model, job.plan.recipe, job.precision, job.device, alone=False, sharded=True)
    return job._replace(context=replace(job.context, sharded=True, execution=execution))


def _gpu_plan(job: Job, gpu_memory: int) -> GpuPlan:
    accumulation, ranks = job.plan.recipe.gradient_accumulation, job.processes
    estimate, usable = forecast(job), FILLED * gpu_memory
    units = ShardedUnits.of(module_of(job, torch.device("meta"), learner_of(job.plan, job.device)), job.precision)
    sent = units.sent(ranks, accumulation) if job.context.sharded else 2 * units.trained * (ranks - 1) // ranks
    largest = _largest_batch(job, estimate, usable)
    return GpuPlan(job.context.sharded, estimate, sent, largest, estimate.total <= usable)


def _largest_batch(job: Job, estimate: Forecast, usable: float) -> int:
    """Return about the largest batch that fits; 0 if none does.

    Some memory does not grow with the batch, so a small batch needs the most per image. What it predicts therefore
    fits, but may be far too small; a forecast of that larger batch comes closer.
    """
    accumulation, ranks = job.plan.recipe.gradient_accumulation, job.processes
    unit = batch_unit(job.plan, ranks, accumulation)
    if estimate.total > usable:
        estimate = forecast(_with_batch(job, unit))
    largest = 0
    for tried in range(TRIED + 1):
        per_image = max(estimate.in_flight / estimate.images, 1)
        images = int(max(usable - estimate.standing, 0) / per_image)
        before, largest = largest, images * ranks * accumulation // unit * unit
        if tried == TRIED or not largest or largest <= 1.02 * before:
            break
        estimate = forecast(_with_batch(job, largest))
    return largest


def _with_batch(job: Job, batch: int) -> Job:
    return job._replace(plan=job.plan._replace(batch=batch))


def _parameters(job: Job) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in ViT(job.plan.model).parameters())
