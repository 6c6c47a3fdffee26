"""Images that nobody sees, added to a batch so that every batch does the same number of each thing.

What a GPU does for one batch can then be recorded and replayed for the next. How often each kind of operation occurs is
estimated once; a batch in which one occurs far more often than usual stays as it is.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import Augmentation, AugmentationPlan
from vitrail.data.augmentation.device_operations import kind_of
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.randaugment import Operation

SAMPLE = 2048
"""Images drawn to see how often each kind occurs."""
SPREAD = 5.0
"""How many standard deviations above the mean still fit: all but one batch in hundreds of thousands."""
NOTHING = Operation("identity", ())


class Rooms(NamedTuple):
    """How many images of a batch, with those that nobody sees, have an operation of each kind, layer by layer."""

    layers: tuple[dict[str, int], ...]
    added: int
    """Images that nobody sees."""


def rooms_for(augmentation: Augmentation, size: tuple[int, int], batch: int) -> Rooms:
    """Work out how much room each kind of operation needs in batches of this size."""
    sample = [augment.plan(augmentation, *size, size, draws(0, place, "rooms")) for place in range(SAMPLE)]
    layers, added = [], 0
    for layer in range(max(len(plan.operations) for plan in sample)):
        counts = Counter(_kinds(sample, layer))
        rooms = {kind: _room(count, batch) for kind, count in sorted(counts.items())}
        others = _room(SAMPLE - counts.total(), batch)
        layers.append(rooms)
        # Enough for the batch with the fewest of these kinds, which is the one with the most others.
        added = max(added, sum(rooms.values()) - batch + others)
    return Rooms(tuple(layers), added)


def filled(plans: Sequence[AugmentationPlan], rooms: Rooms) -> list[AugmentationPlan]:
    """Return plans with others behind them that fill all rooms; plans that do not fit in are returned as they are."""
    columns: list[list[Operation]] = []
    for layer, sizes in enumerate(rooms.layers):
        present: dict[str, list[Operation]] = {kind: [] for kind in sizes}
        for plan in plans:
            kind = kind_of(plan.operations[layer]) if layer < len(plan.operations) else None
            if kind is not None:
                present.setdefault(kind, []).append(plan.operations[layer])
        if not present.keys() <= sizes.keys() or any(not 0 < len(present[kind]) <= sizes[kind] for kind in sizes):
            return list(plans)
        # What is there already is done once more, so that no new table or way of moving pixels is needed.
        column = [some[0] for kind, some in present.items() for _ in range(sizes[kind] - len(some))]
        if len(column) > rooms.added:
            return list(plans)
        columns.append(column + [NOTHING] * (rooms.added - len(column)))
    if any(len(plan.operations) > len(rooms.layers) for plan in plans):
        return list(plans)
    unseen = [plans[0]._replace(operations=operations) for operations in zip(*columns, strict=True)]
    return [*plans, *unseen]


def _kinds(plans: Sequence[AugmentationPlan], layer: int) -> list[str]:
    found = (kind_of(plan.operations[layer]) for plan in plans if layer < len(plan.operations))
    return [kind for kind in found if kind is not None]


def _room(count: int, batch: int) -> int:
    share = count / SAMPLE
    return min(batch, math.ceil(batch * share + SPREAD * math.sqrt(batch * share * (1 - share))))
