"""`draws`: the random generator of one position of the stream.

No random state is carried from one image to the next: every position has its own generator, so the order in which
images are prepared, and the process that does it, cannot change the result.
"""

import hashlib
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray

from vitrail.errors import InputError

LAST_SEED = 2**63 - 1
LAST_POSITION = 2**62

_Words = NDArray[np.uint64]
_AUGMENTATION = bytes.fromhex("70696374757265").decode()
"""The key of augmentation draws. A different key would change the draws of every seed, so it is fixed."""


def draws(seed: int, position: int, purpose: str = _AUGMENTATION) -> np.random.Generator:
    """Return the generator of one position: the same numbers on every machine and in every process.

    The generator is Philox: its key is (seed, position), and the purpose is in the upper half of its counter. So draws
    for one purpose neither shift nor repeat those for another.
    """
    if not (0 <= seed <= LAST_SEED and 0 <= position <= LAST_POSITION):
        raise InputError(
            f"seed {seed} and position {position}: a seed is 0 to {LAST_SEED}, a position 0 to {LAST_POSITION}"
        )
    key = _Key(np.array((seed, position), dtype=np.uint64))
    # NumPy accepts any ISeedSequence, but its type stubs only name SeedSequence.
    return np.random.Generator(np.random.Philox(cast(np.random.SeedSequence, key), counter=_first_count(purpose)))


def between(generator: np.random.Generator, low: float, high: float) -> float:
    """Draw uniformly from [low, high), five times faster than `Generator.uniform`."""
    return low + (high - low) * generator.random()


def below(generator: np.random.Generator, end: int) -> int:
    """Draw an integer uniformly from [0, end), for any size that an image can have."""
    return int(end * generator.random())


class _Key(ISeedSequence):
    """Passes Philox its key. With `key=`, NumPy would first ask the system for entropy, which takes 15 µs."""

    def __init__(self, words: _Words) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> _Words:
        """Return the key; Philox asks for exactly two 64-bit words."""
        if n_words != 2 or np.dtype(dtype) != np.uint64:
            raise TypeError(f"a Philox key is two 64-bit words, not {n_words} of {np.dtype(dtype)}")
        return self._words


@lru_cache(maxsize=64)
def _first_count(purpose: str) -> _Words:
    """Return the initial counter: the lower half counts draws, the upper half encodes the purpose."""
    digest = hashlib.blake2b(purpose.encode(), digest_size=16).digest()
    return np.concatenate([np.zeros(2, np.uint64), np.frombuffer(digest, dtype="<u8").astype(np.uint64)])
