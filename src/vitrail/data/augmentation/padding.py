"""Padding images, added to a batch so that every batch has the same count of each operation.

A CUDA graph captured for one batch then fits the next. How often each group of operations occurs is estimated once; a
batch in which one occurs far more often than usual is not padded.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import Augmentation, AugmentationPlan
from vitrail.data.augmentation.device_operations import operation_group
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.randaugment import Operation

SAMPLE = 2048
"""Images drawn to estimate how often each group occurs."""
SPREAD = 5.0
"""Standard deviations above the mean that still fit: all but one batch in hundreds of thousands."""
IDENTITY = Operation("identity", ())


class OperationCapacity(NamedTuple):
    """How many images of a padded batch have an operation of each group, by layer."""

    layers: tuple[dict[str, int], ...]
    added: int
    """Number of padding images."""


def operation_capacity(augmentation: Augmentation, size: tuple[int, int], batch: int) -> OperationCapacity:
    """Estimate the capacity that each group of operations needs in batches of this size."""
    sample = [augment.plan(augmentation, *size, size, draws(0, place, "rooms")) for place in range(SAMPLE)]
    layers, added = [], 0
    for layer in range(max(len(plan.operations) for plan in sample)):
        counts = Counter(_groups(sample, layer))
        capacities = {group: _capacity(count, batch) for group, count in sorted(counts.items())}
        others = _capacity(SAMPLE - counts.total(), batch)
        layers.append(capacities)
        # Enough for the batch with the fewest operations of these groups, which has the most without one.
        added = max(added, sum(capacities.values()) - batch + others)
    return OperationCapacity(tuple(layers), added)


def pad_plans(plans: Sequence[AugmentationPlan], capacity: OperationCapacity) -> list[AugmentationPlan]:
    """Append plans that fill every group to its capacity; plans that do not fit are returned unchanged."""
    columns: list[list[Operation]] = []
    for layer, sizes in enumerate(capacity.layers):
        present: dict[str, list[Operation]] = {group: [] for group in sizes}
        for plan in plans:
            group = operation_group(plan.operations[layer]) if layer < len(plan.operations) else None
            if group is not None:
                present.setdefault(group, []).append(plan.operations[layer])
        if not present.keys() <= sizes.keys() or any(not 0 < len(present[group]) <= sizes[group] for group in sizes):
            return list(plans)
        # Repeat operations that are present, so that padding needs no new lookup table or pixel map.
        column = [some[0] for group, some in present.items() for _ in range(sizes[group] - len(some))]
        if len(column) > capacity.added:
            return list(plans)
        columns.append(column + [IDENTITY] * (capacity.added - len(column)))
    if any(len(plan.operations) > len(capacity.layers) for plan in plans):
        return list(plans)
    padding = [plans[0]._replace(operations=operations) for operations in zip(*columns, strict=True)]
    return [*plans, *padding]


def _groups(plans: Sequence[AugmentationPlan], layer: int) -> list[str]:
    groups = (operation_group(plan.operations[layer]) for plan in plans if layer < len(plan.operations))
    return [group for group in groups if group is not None]


def _capacity(count: int, batch: int) -> int:
    rate = count / SAMPLE
    return min(batch, math.ceil(batch * rate + SPREAD * math.sqrt(batch * rate * (1 - rate))))
