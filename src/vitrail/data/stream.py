"""The stream: which image stands at which position, for ever, as a pure function of the seed.

    step s takes positions [s·B, (s+1)·B)
    position p is image shuffle(epoch)[p % n] of epoch p // n

Nothing here remembers anything: any step of any run can be worked out by itself, so a run that stops goes on where it
was at no cost, and every split over processes, micro-batches and workers sees the same stream.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.source import Labels
from vitrail.errors import ConfigError, DataError
from vitrail.runtime import derive_seed

Numbers = NDArray[np.int64]

_ALL_IMAGES = bytes.fromhex("7069637475726573").decode()
"""The key of the order of all images. Another one would be another order for every seed, so it stays as it was."""


@dataclass(frozen=True)
class Share:
    """Which of several equal parts of a batch is meant."""

    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.parts:
            raise ConfigError(f"part {self.part} of {self.parts} does not exist; parts are counted from 0")


WHOLE = Share()
"""The only part."""


@dataclass(frozen=True, eq=False)
class Stream:
    """An endless stream of images for training."""

    images: int
    batch: int
    seed: int = 0
    repeats: int = 1
    """How often a batch shows the same image, each time cut anew (repeated augmentation, arXiv 1902.05509)."""
    balance: Labels | None = None
    """The class of every image, where every class is to be seen equally often; None shows every image equally
    often."""

    def __post_init__(self) -> None:
        if self.images < 1:
            raise DataError("there are no images to train on")
        if self.repeats < 1 or not 0 <= self.seed < 2**63:
            raise ConfigError(f"repeats is {self.repeats} and seed is {self.seed}; use 1 or more, and 0 to 2⁶³ - 1")
        if self.batch < 1 or self.batch % self.repeats:
            raise ConfigError(
                f"a batch of {self.batch} cannot show every image {self.repeats} times; use a multiple of "
                f"{self.repeats}"
            )
        if self.balance is not None and len(self.balance) != self.images:
            raise DataError(f"{len(self.balance)} labels for {self.images} images; give one for each")

    def positions(self, step: int, share: Share = WHOLE) -> Numbers:
        """Return the positions of a step, or of one of the contiguous, equal shares it is cut into."""
        if self.batch % share.parts:
            raise ConfigError(
                f"a batch of {self.batch} cannot be cut into {share.parts} equal parts; use a multiple of {share.parts}"
            )
        size = self.batch // share.parts
        first = step * self.batch + share.part * size
        return np.arange(first, first + size, dtype=np.int64)

    def images_at(self, positions: Numbers) -> Numbers:
        """Return which images stand at these positions."""
        # The copies of an image stand a whole round apart, so that neighbours, which mixing pairs, are different.
        own = self.batch // self.repeats
        rounds = positions // self.batch * own + positions % self.batch % own
        if self.balance is not None:
            return np.array([self._balanced(int(place)) for place in rounds], dtype=np.int64)
        epochs, places = np.divmod(rounds, self.images)
        found = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = shuffle(self.seed, int(epoch), self.images)[places[here]]
        return found

    def epoch(self, step: int) -> float:
        """Return how often every image was shown (the repeats counted once) before a step."""
        return step * (self.batch // self.repeats) / self.images

    @cached_property
    def _members(self) -> list[Numbers]:
        """The images of each class that has any."""
        labels = self.balance if self.balance is not None else np.zeros(self.images, np.int64)
        order = np.argsort(labels, kind="stable")
        order = order[labels[order] >= 0]  # of no class
        starts = np.flatnonzero(np.diff(labels[order])) + 1
        return np.split(order, starts)

    def _balanced(self, place: int) -> int:
        """Go through the classes in rounds, each round in another order, and through each class's own images."""
        turn, slot = divmod(place, len(self._members))
        number = int(self._kept("classes", turn, len(self._members))[slot])
        own = self._members[number]
        lap, place_in_lap = divmod(turn, len(own))
        return int(own[self._kept(f"class {own[0]}", lap, len(own))[place_in_lap]])

    def _kept(self, what: str, epoch: int, length: int) -> Numbers:
        """Return an order, and keep the newest of each kind: they all change at another pace."""
        kept = self._orders.get(what)
        if kept is None or kept[0] != epoch:
            kept = self._orders[what] = (epoch, _shuffle(self.seed, epoch, length, what))
        return kept[1]

    @cached_property
    def _orders(self) -> dict[str, tuple[int, Numbers]]:
        return {}


def shuffle(seed: int, epoch: int, length: int, what: str = _ALL_IMAGES) -> Numbers:
    """Return the numbers 0 … length - 1 in the order of an epoch."""
    return _epoch_order(seed, epoch, length, what)


def _shuffle(seed: int, epoch: int, length: int, what: str) -> Numbers:
    generator = np.random.Philox(key=[derive_seed(seed, what), epoch])
    # Sorting raw random words is the same on every machine and in every version of NumPy.
    order = np.argsort(generator.random_raw(length), kind="stable")
    order.flags.writeable = False  # it is kept, and shared
    return order


# This epoch's order and the next one's.
_epoch_order = lru_cache(maxsize=2)(_shuffle)


def evaluation_share(images: int, share: Share) -> range:
    """Return the images that one of several processes scores: all of them, each exactly once, as even as can be."""
    return range(images * share.part // share.parts, images * (share.part + 1) // share.parts)
