"""Which images a run keeps on its device: as many as the memory forecast of its model leaves room for."""

import math
from dataclasses import replace

from vitrail.data.sources.splits import Splits
from vitrail.errors import ConfigError
from vitrail.text import byte_size
from vitrail.training.auto_batch import FILLED, MemoryLimit, batch_unit, min_over_ranks
from vitrail.training.context import Job
from vitrail.training.memory import forecast


def place_images(job: Job, splits: Splits, limit: MemoryLimit) -> Job:
    """Decide which images are kept on the device, if `data.on_device` is set; raise if the training images do not fit.

    The validation split is read from its files on every evaluation if it does not fit, too. Of a batch of "auto", which
    is chosen later, only the smallest one has to fit.
    """
    plan, context = job.plan, job.context
    if not plan.recipe.data.on_device:
        return job
    one = math.prod((plan.model.channels, *plan.model.image_size))
    train, val = len(splits.train), len(splits.val or splits.train)
    estimate = forecast(job)
    accumulation = plan.recipe.gradient_accumulation
    usual = estimate.total - estimate.resident
    least = usual
    if plan.recipe.batch == "auto":
        images = max(1, batch_unit(plan, job.processes, accumulation) // (job.processes * accumulation))
        least = estimate.with_images(images, accumulation) - estimate.resident
    free = min_over_ranks(limit.free, job.device)
    room, most = (round(FILLED * free) - model for model in (usual, least))
    height, width = plan.model.image_size
    if train * one > most:
        raise ConfigError(
            f"{train:,} training images of {height}×{width} pixels take {byte_size(train * one)}, but {limit.place} "
            f"has {byte_size(free)}, of which the model leaves {byte_size(max(0, most))} for images; use "
            "data.on_device = false"
        )
    both = (train + val) * one <= room
    kept = f"{train:,} for training and {val:,} for validation" if both else f"{train:,} for training"
    needed = byte_size((train + both * val) * one)
    left = f"the model leaves {byte_size(max(room, 0))} of {byte_size(free)}"
    rest = "" if both else f"; the {val:,} for validation do not fit and are read from their files"
    note = f"images kept on {limit.place}: {kept}, {needed}; {left}{rest}"
    return job._replace(context=replace(context, resident=train + both * val, resident_validation=both, placement=note))
