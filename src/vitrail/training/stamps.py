"""Detect images that changed since a run started, by the sizes and modification times of their files.

stamps.index   two numbers per image, in the order train, validation, test; a NumPy archive without the suffix .npz,
               because an .npz in a folder would be taken for weights
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.remote.filesystems import is_remote
from vitrail.data.sources.index_files import load_index, save_index
from vitrail.data.sources.manifests import Manifest
from vitrail.data.sources.source import Source, base_of
from vitrail.data.sources.splits import Splits
from vitrail.errors import DataError

STAMPS = "stamps.index"
GONE = (-1, -1)
"""The stamp of a file that cannot be accessed; the error is raised when it is read."""


NOT_ASKED = (0, 0)
"""The stamp of a remote file that a manifest lists: a request for every file would take too long."""


def check_stamps(folder: Path, splits: Splits) -> str | None:
    """Record the stamps of a new run's images; for a resumed run, compare them and return a message if they differ.

    A different size raises an error. A different time alone may come from a copy, and is reported once.
    """
    sources = [source for source in (splits.train, splits.val, splits.test) if source is not None]
    now = np.array([_stamp(source, index) for source in sources for index in range(len(source))], np.int64)
    kept = load_index(folder / STAMPS, ("stamps",)) if (folder / STAMPS).exists() else None
    if kept is None:
        exists = (folder / STAMPS).exists()
        save_index(folder / STAMPS, {"stamps": now})
        return f"{folder / STAMPS} is corrupt, so replaced images cannot be detected" if exists else None
    before = kept["stamps"]
    if before.shape != now.shape or before.dtype != now.dtype:  # the comparison of split.json reports this
        return None
    # Unreadable files are reported when they are read.
    readable = (now != GONE).any(axis=1)
    if len(resized := np.flatnonzero((before[:, 0] != now[:, 0]) & readable)):
        raise DataError(
            f"{_named(sources, resized)} changed size since the run in {folder} started; restore the "
            f"original files, or choose another --run"
        )
    touched = np.flatnonzero((before[:, 1] != now[:, 1]) & readable)
    if not len(touched):
        return None
    save_index(folder / STAMPS, {"stamps": now})
    return (
        f"{_named(sources, touched)} been rewritten or copied since the run started, with the same size; if the "
        f"content changed, choose another --run"
    )


def _stamp(source: Source, index: int) -> tuple[int, int]:
    if is_remote(source.name(index)) and isinstance(base_of(source), Manifest):
        return NOT_ASKED
    try:
        return source.stamp(index)
    except DataError:
        return GONE


def _named(sources: list[Source], changed: NDArray[Any]) -> str:
    """Name the first image and count the others."""
    first, more = int(changed[0]), len(changed) - 1
    for source in sources:
        if first < len(source):
            name = source.name(first)
            return f"{name} has" if not more else f"{name} and {more:,} more {'image' if more == 1 else 'images'} have"
        first -= len(source)
    raise IndexError(changed[0])
