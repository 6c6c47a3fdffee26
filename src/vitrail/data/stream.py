"""The stream: which image is at which position, endlessly, as a pure function of the seed.

    step s takes positions [s·B, (s+1)·B)
    position p is image shuffle(epoch)[p % n] of epoch p // n

The stream is stateless: any step of any run can be computed on its own. So a stopped run resumes at no cost, and any
number of processes, micro-batches and workers sees the same stream.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.source import Labels
from vitrail.errors import ConfigError, DataError
from vitrail.runtime import derive_seed

Positions = NDArray[np.int64]

_ALL_IMAGES = bytes.fromhex("7069637475726573").decode()
"""The key for the order of all images. A different key would change the order for every seed, so it is fixed."""


@dataclass(frozen=True)
class RankSlice:
    """The contiguous, equal slice of every batch that one rank processes."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} does not exist in a world of size {self.world_size}; ranks start at 0")


WHOLE_BATCH = RankSlice()
"""The slice of a run with one process."""


@dataclass(frozen=True, eq=False)
class Stream:
    """An endless stream of images for training."""

    images: int
    batch: int
    seed: int = 0
    repeats: int = 1
    """How often a batch contains the same image, each time augmented anew (repeated augmentation, arXiv 1902.05509)."""
    balance: Labels | None = None
    """The class of every image, to sample every class equally often; None samples every image equally often."""

    def __post_init__(self) -> None:
        if self.images < 1:
            raise DataError("no images to train on")
        if self.repeats < 1 or not 0 <= self.seed < 2**63:
            raise ConfigError(f"repeats is {self.repeats} and seed is {self.seed}; use 1 or more, and 0 to 2⁶³ - 1")
        if self.batch < 1 or self.batch % self.repeats:
            raise ConfigError(
                f"a batch of {self.batch} cannot contain every image {self.repeats} times; use a multiple of "
                f"{self.repeats}"
            )
        if self.balance is not None and len(self.balance) != self.images:
            raise DataError(f"{len(self.balance)} labels for {self.images} images; give one label per image")

    def positions(self, step: int, rank_slice: RankSlice = WHOLE_BATCH) -> Positions:
        """Return the positions of a step, or of one rank's slice of it."""
        if self.batch % rank_slice.world_size:
            raise ConfigError(
                f"a batch of {self.batch} cannot be split evenly over {rank_slice.world_size} processes; "
                f"use a multiple of {rank_slice.world_size}"
            )
        size = self.batch // rank_slice.world_size
        first = step * self.batch + rank_slice.rank * size
        return np.arange(first, first + size, dtype=np.int64)

    def images_at(self, positions: Positions) -> Positions:
        """Return which images are at these positions."""
        # Repeats of an image are a whole round apart, so neighbours, which mixing pairs, are different images.
        own = self.batch // self.repeats
        rounds = positions // self.batch * own + positions % self.batch % own
        if self.balance is not None:
            return np.array([self._balanced(int(place)) for place in rounds], dtype=np.int64)
        epochs, places = np.divmod(rounds, self.images)
        images = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            images[here] = shuffle(self.seed, int(epoch), self.images)[places[here]]
        return images

    def epoch(self, step: int) -> float:
        """Return how many epochs (repeats counted once) precede a step."""
        return step * (self.batch // self.repeats) / self.images

    @cached_property
    def _members(self) -> list[Positions]:
        """The images of each class that has any."""
        labels = self.balance if self.balance is not None else np.zeros(self.images, np.int64)
        order = np.argsort(labels, kind="stable")
        order = order[labels[order] >= 0]  # images without a class
        starts = np.flatnonzero(np.diff(labels[order])) + 1
        return np.split(order, starts)

    def _balanced(self, place: int) -> int:
        """Cycle through the classes in rounds, each in a new order, and through the images of each class."""
        turn, slot = divmod(place, len(self._members))
        number = int(self._kept("classes", turn, len(self._members))[slot])
        own = self._members[number]
        lap, place_in_lap = divmod(turn, len(own))
        return int(own[self._kept(f"class {own[0]}", lap, len(own))[place_in_lap]])

    def _kept(self, what: str, epoch: int, length: int) -> Positions:
        """Return an order, caching the latest per key: each advances at its own pace."""
        kept = self._orders.get(what)
        if kept is None or kept[0] != epoch:
            kept = self._orders[what] = (epoch, _shuffle(self.seed, epoch, length, what))
        return kept[1]

    @cached_property
    def _orders(self) -> dict[str, tuple[int, Positions]]:
        return {}


def shuffle(seed: int, epoch: int, length: int, what: str = _ALL_IMAGES) -> Positions:
    """Return 0 … length - 1 in the order of an epoch."""
    return _epoch_order(seed, epoch, length, what)


def _shuffle(seed: int, epoch: int, length: int, what: str) -> Positions:
    generator = np.random.Philox(key=[derive_seed(seed, what), epoch])
    # Sorting raw random words is the same on every machine and in every version of NumPy.
    order = np.argsort(generator.random_raw(length), kind="stable")
    order.flags.writeable = False  # it is cached and shared
    return order


# The orders of this epoch and the next.
_epoch_order = lru_cache(maxsize=2)(_shuffle)


def evaluation_slice(images: int, rank_slice: RankSlice) -> range:
    """Return the images one rank evaluates; together the ranks cover every image once, as evenly as possible."""
    rank, world_size = rank_slice.rank, rank_slice.world_size
    return range(images * rank // world_size, images * (rank + 1) // world_size)
