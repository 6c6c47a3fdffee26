"""The images of a run by their content, so that a renamed, moved or copied one is recognised.

contents.index   8 bytes of the SHA-256 of every training and validation image that the data check of a run has read; a
                 NumPy archive, but not called one, because an .npz in a folder is taken for weights

It lies in the run folder, and a copy of it in every bundle of the run, unless that would be too large.
"""

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.index_files import load_index, save_index
from vitrail.data.sources.source import Pixels, Source
from vitrail.errors import DataError

CONTENTS = "contents.index"
MOST_CARRIED = 100_000
"""With more images than this a bundle does not carry their digests: it should stay small."""
Digests = NDArray[np.uint64]


class Contents(NamedTuple):
    """What is known of the images of a run."""

    train: Digests
    val: Digests
    """Sorted, both."""
    images: tuple[int, int]
    """How many readable images the two splits have; there may be fewer digests."""

    @property
    def complete(self) -> bool:
        """Whether every image has its digest."""
        return (len(self.train), len(self.val)) == self.images

    def save(self, folder: Path) -> None:
        """Write it into a run folder."""
        save_index(folder / CONTENTS, {"train": self.train, "val": self.val, "images": np.array(self.images, np.int64)})


def content_hash(stored: bytes | Pixels) -> tuple[int, int]:
    """Return 16 bytes of a digest of a file's content, or of pixels without a file, as two numbers."""
    digest = hashlib.sha256()  # faster than others where the CPU has instructions for it, as most have
    if isinstance(stored, np.ndarray):
        digest.update(f"{stored.dtype.str} {stored.shape}".encode())
        stored = stored.tobytes()
    digest.update(stored)
    first, second = np.frombuffer(digest.digest()[:16], "<u8").tolist()
    return first, second


def digests_of(source: Source) -> Digests:
    """Read every image of a source for its digest; those that cannot be read have none."""
    found = []
    for index in range(len(source)):
        try:
            found.append(content_hash(source.read(index))[0])
        except DataError:
            continue
    return np.array(found, np.uint64)


def recorded_contents(bundle: Path | None) -> Contents | None:
    """Return what a bundle carries, or the run that it lies in has; None where there is nothing that can be read."""
    if bundle is None:
        return None
    place = bundle.absolute()
    return next((found for folder in (place, place.parent) if (found := _read(folder)) is not None), None)


def _read(folder: Path) -> Contents | None:
    arrays = load_index(folder / CONTENTS, ("train", "val", "images"))
    if arrays is None:
        return None
    train, val, images = arrays["train"], arrays["val"], arrays["images"]
    if any(split.dtype != np.uint64 or split.ndim != 1 for split in (train, val)) or images.shape != (2,):
        return None
    return Contents(np.sort(train), np.sort(val), (int(images[0]), int(images[1])))


def carry_contents(run: Path, folder: Path) -> None:
    """Copy the digests of a run into the folder of a bundle, if they are few; what cannot be copied is not needed."""
    found = _read(run)
    if found is not None and len(found.train) + len(found.val) <= MOST_CARRIED:
        with suppress(OSError):
            shutil.copyfile(run / CONTENTS, folder / CONTENTS)
