"""Read all masks once, in threads: which values they have, and whether they fit their images. Results are cached."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.decode import LazyImage, open_image
from vitrail.data.sources.index_files import (
    Names,
    Progress,
    index_file,
    load_index,
    now_ns,
    save_index,
    settled,
)
from vitrail.data.sources.masks import mask_values
from vitrail.data.sources.source import Source, stamp_file
from vitrail.errors import DataError, StorageError
from vitrail.runtime import available_cores
from vitrail.text import printable_path

CHUNK = 64
"""Masks between two reports of progress; all that Ctrl-C has to wait for."""
MOST_THREADS = 16
UNKNOWN = (-1, -1, -1, -1)
"""The stamp of files that cannot be found."""
_INDEX = ("names", "ends", "stamps", "lengths", "values", "counts")


class ValueCounts(NamedTuple):
    """The values in one mask, sorted, and how many pixels have each."""

    values: NDArray[np.int64]
    counts: NDArray[np.int64]


class MaskScan(NamedTuple):
    """What is in the masks of a source."""

    usable: NDArray[np.int64]
    """The images whose masks can be used."""
    values: tuple[int, ...]
    """The values in these masks, sorted."""
    counts: NDArray[np.int64]
    """(usable, values): how many pixels of a mask have a value."""
    faults: list[str]
    """What is wrong with the others."""


def scan_masks(source: Source, files: Names, place: str, on_progress: Progress | None = None) -> MaskScan:
    """Count the pixels of each value in the mask of every image; `place` is the data, for the cache of the counts."""
    began, index = now_ns(), index_file("masks", [place])
    stamps = np.array([_stamp(source, files, image) for image in range(len(files))], np.int64).reshape(-1, 4)
    known = _load(index, files, stamps)
    found: dict[int, ValueCounts] = {}
    faults: list[str] = []
    for done, (image, counted) in enumerate(_counted(source, files, known), start=1):
        if isinstance(counted, str):
            faults.append(counted)
        else:
            found[image] = counted
        if on_progress is not None and (not done % CHUNK or done == len(files)):
            on_progress(done)
    # A change that is too recent could be followed by another one with the same timestamp.
    if any(image not in known for image in found) and settled(stamps[:, [1, 3]].max(axis=1), began):
        _save(index, files, stamps, found)
    every = sorted({value for counted in found.values() for value in counted.values.tolist()})
    counts = np.zeros((len(found), len(every)), np.int64)
    for row, counted in enumerate(found.values()):
        counts[row, np.searchsorted(every, counted.values)] = counted.counts
    return MaskScan(np.array(list(found), np.int64), tuple(every), counts, faults)


def _stamp(source: Source, files: Names, image: int) -> tuple[int, int, int, int]:
    """Return the stamps of a mask and its image; missing files are reported when they are read."""
    try:
        return *stamp_file(files[image], ""), *source.stamp(image)
    except StorageError:
        raise
    except DataError:
        return UNKNOWN


def _counted(source: Source, files: Names, known: dict[int, ValueCounts]) -> Iterator[tuple[int, ValueCounts | str]]:
    """Yield what is in each mask, or what is wrong with it, in order."""
    count = partial(_count, source, files)
    with ThreadPoolExecutor(min(MOST_THREADS, available_cores())) as pool:
        for start in range(0, len(files), CHUNK):
            images = range(start, min(start + CHUNK, len(files)))
            new = [image for image in images if image not in known]
            counted = dict(zip(new, pool.map(count, new), strict=True))
            yield from ((image, known[image] if image in known else counted[image]) for image in images)


def _count(source: Source, files: Names, image: int) -> ValueCounts | str:
    try:
        mask = mask_values(files[image])
        if wrong := wrong_size(mask, _opened(source, image), files[image]):
            return wrong
    except StorageError:
        raise
    except DataError as error:
        return str(error)
    counts = np.bincount(mask.ravel())
    values = np.flatnonzero(counts)
    return ValueCounts(values, counts[values])


def _opened(source: Source, image: int) -> LazyImage | None:
    """Return an image; None if it cannot be read, which is reported where its pixels are read."""
    try:
        return open_image(source.read(image))
    except StorageError:
        raise
    except DataError:
        return None


def wrong_size(mask: NDArray[np.integer], image: LazyImage | None, path: bytes) -> str | None:
    """Return what is wrong with the size of a mask, if anything."""
    if image is None or mask.shape == (image.height, image.width):
        return None
    turned = mask.shape == (image.width, image.height) and getattr(image, "turn", None) is not None
    advice = (
        "turn the mask like its image, which its EXIF orientation turns"
        if turned
        else "save the mask in the size of its image"
    )
    return (
        f"the mask {printable_path(path)} has {mask.shape[1]}×{mask.shape[0]} pixels, its image "
        f"{image.width}×{image.height}; {advice}"
    )


# ── the counts on disk ──


def _load(index: Path, files: Names, stamps: NDArray[np.int64]) -> dict[int, ValueCounts]:
    """Return the counts of masks that have not changed, nor have their images."""
    arrays = load_index(index, _INDEX)
    if arrays is None:
        return {}
    names, ends = Names(arrays["names"], arrays["ends"]), np.cumsum(arrays["lengths"])
    rows = {names[row]: row for row in range(len(names))}
    known: dict[int, ValueCounts] = {}
    for image in range(len(files)):
        row = rows.get(files[image])
        if row is not None and (arrays["stamps"][row] == stamps[image]).all() and stamps[image, 0] != UNKNOWN[0]:
            here = slice(ends[row] - arrays["lengths"][row], ends[row])
            known[image] = ValueCounts(arrays["values"][here], arrays["counts"][here])
    return known


def _save(index: Path, files: Names, stamps: NDArray[np.int64], found: dict[int, ValueCounts]) -> None:
    names = Names.of(files[image] for image in found)
    arrays: dict[str, NDArray[Any]] = {
        "names": names.buffer,
        "ends": names.ends,
        "stamps": stamps[list(found)],
        "lengths": np.array([len(counted.values) for counted in found.values()], np.int64),
        "values": np.concatenate([counted.values for counted in found.values()]),
        "counts": np.concatenate([counted.counts for counted in found.values()]),
    }
    save_index(index, arrays)
