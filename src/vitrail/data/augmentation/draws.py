"""`draws`: the random numbers that belong to one position of the stream, and to no other.

Nothing random is carried from one image to the next. Whoever needs numbers for a position asks for its generator,
so the order in which images are prepared, and by which process, cannot change them.
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
"""The key of what augmentation draws. Another one would be another draw for every seed, so it stays as it was."""


def draws(seed: int, position: int, purpose: str = _AUGMENTATION) -> np.random.Generator:
    """Return the generator of one position: the same numbers on every machine and in every process.

    The generator is Philox: its key is (seed, position), and the purpose is in the upper half of its counter. So what
    is drawn for one purpose neither shifts nor repeats what is drawn for another.
    """
    if not (0 <= seed <= LAST_SEED and 0 <= position <= LAST_POSITION):
        raise InputError(
            f"seed {seed} and position {position}: a seed is 0 to {LAST_SEED}, a position 0 to {LAST_POSITION}"
        )
    key = _Key(np.array((seed, position), dtype=np.uint64))
    # NumPy takes any ISeedSequence; its types name only the usual one.
    return np.random.Generator(np.random.Philox(cast(np.random.SeedSequence, key), counter=_first_count(purpose)))


def between(generator: np.random.Generator, low: float, high: float) -> float:
    """Draw a number evenly from low up to high, five times faster than `Generator.uniform`."""
    return low + (high - low) * generator.random()


def below(generator: np.random.Generator, end: int) -> int:
    """Draw a whole number evenly from 0 up to end - 1, for any end that an image can have."""
    return int(end * generator.random())


class _Key(ISeedSequence):
    """Hands Philox its key. Given as `key=`, NumPy would first ask the system for entropy, which takes 15 µs."""

    def __init__(self, words: _Words) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> _Words:
        """Return the key; Philox asks for exactly these two words of 64 bits."""
        if n_words != 2 or np.dtype(dtype) != np.uint64:
            raise TypeError(f"a Philox key is two words of 64 bits, not {n_words} of {np.dtype(dtype)}")
        return self._words


@lru_cache(maxsize=64)
def _first_count(purpose: str) -> _Words:
    """Return where the counter starts: the lower half counts the draws, the upper half says what they are for."""
    digest = hashlib.blake2b(purpose.encode(), digest_size=16).digest()
    return np.concatenate([np.zeros(2, np.uint64), np.frombuffer(digest, dtype="<u8").astype(np.uint64)])
