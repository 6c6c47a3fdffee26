"""Whether the images are still those that a run began with: the sizes and times of their files, which cost a look each.

stamps.index   two numbers for every image, in the order of train, validation and test; a NumPy archive, but not called
               one, because an .npz in a folder is taken for weights
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.index_files import load_index, save_index
from vitrail.data.sources.source import Source
from vitrail.data.sources.splits import Splits
from vitrail.errors import DataError

STAMPS = "stamps.index"
GONE = (-1, -1)
"""The stamp of a file that cannot be looked at; whoever reads it says why."""


def check_stamps(folder: Path, splits: Splits) -> str | None:
    """Write down the stamps of a new run's images; compare those of a resumed one, and return what is to be said.

    An image of another size is another image, and refused. Another time alone may be that of a copy: it is said, once.
    """
    sources = [source for source in (splits.train, splits.val, splits.test) if source is not None]
    now = np.array([_stamp(source, index) for source in sources for index in range(len(source))], np.int64)
    kept = load_index(folder / STAMPS, ("stamps",)) if (folder / STAMPS).exists() else None
    if kept is None:
        there = (folder / STAMPS).exists()
        save_index(folder / STAMPS, {"stamps": now})
        return f"{folder / STAMPS} is damaged, so it is not known whether images were replaced" if there else None
    before = kept["stamps"]
    if before.shape != now.shape or before.dtype != now.dtype:  # the split, which is compared, too, says what
        return None
    # What cannot be read now is said where it is read.
    readable = (now != GONE).any(axis=1)
    if len(resized := np.flatnonzero((before[:, 0] != now[:, 0]) & readable)):
        raise DataError(
            f"{_named(sources, resized)} changed since the run in {folder} began: the size is another; bring back the "
            f"old files, or choose another --run"
        )
    touched = np.flatnonzero((before[:, 1] != now[:, 1]) & readable)
    if not len(touched):
        return None
    save_index(folder / STAMPS, {"stamps": now})
    return (
        f"{_named(sources, touched)} been written or copied again since the run began, with the same size; where the "
        f"content is another, choose another --run"
    )


def _stamp(source: Source, index: int) -> tuple[int, int]:
    try:
        return source.stamp(index)
    except DataError:
        return GONE


def _named(sources: list[Source], found: NDArray[Any]) -> str:
    """Name the first of some images, and count the others."""
    first, more = int(found[0]), len(found) - 1
    for source in sources:
        if first < len(source):
            name = source.name(first)
            return f"{name} has" if not more else f"{name} and {more:,} more {'image' if more == 1 else 'images'} have"
        first -= len(source)
    raise IndexError(found[0])
