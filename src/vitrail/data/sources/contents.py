"""Content digests of a run's images, so that a renamed, moved or copied image is recognised.

contents.index   8 bytes of the SHA-256 of every training and validation image that the run's data check has read; a
                 NumPy archive, but not named .npz, because an .npz in a folder is taken for weights

It is in the run folder, with a copy in every bundle of the run unless it is too large.
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
from vitrail.errors import DataError, StorageError

CONTENTS = "contents.index"
MOST_IN_BUNDLE = 100_000
"""With more images than this, a bundle does not include their digests, to stay small."""
Digests = NDArray[np.uint64]


class Contents(NamedTuple):
    """The content digests of a run's images."""

    train: Digests
    val: Digests
    """Both are sorted."""
    images: tuple[int, int]
    """Number of readable images in the two splits; there may be fewer digests."""

    @property
    def complete(self) -> bool:
        """Whether every image has a digest."""
        return (len(self.train), len(self.val)) == self.images

    def comparable(self, digests: Digests) -> bool:
        """Whether these images and those of the run are all files, or all pixels."""
        return len(np.unique(np.concatenate([digests, self.train, self.val]) & np.uint64(1))) <= 1

    def save(self, folder: Path) -> None:
        """Write the digests to a run folder."""
        save_index(folder / CONTENTS, {"train": self.train, "val": self.val, "images": np.array(self.images, np.int64)})


def content_hash(stored: bytes | Pixels) -> tuple[int, int]:
    """Return 16 bytes of a digest of a file's content, or of pixels without a file, as two integers.

    The last bit of the first integer is 1 for pixels: they cannot be compared with the bytes of a file.
    """
    digest = hashlib.sha256()  # faster than others on CPUs with SHA instructions, which most have
    if isinstance(stored, np.ndarray):
        digest.update(f"{stored.dtype.str} {stored.shape}".encode())
    digest.update(stored.tobytes() if isinstance(stored, np.ndarray) else stored)
    first, second = np.frombuffer(digest.digest()[:16], "<u8").tolist()
    return first & ~1 | isinstance(stored, np.ndarray), second


def digests_of(source: Source) -> Digests:
    """Read and digest every image of a source; unreadable images are skipped."""
    digests = []
    for index in range(len(source)):
        try:
            digests.append(content_hash(source.read(index))[0])
        except StorageError:
            raise
        except DataError:
            continue
    return np.array(digests, np.uint64)


def recorded_contents(bundle: Path | None) -> Contents | None:
    """Return the digests in a bundle or in its run folder; None if there are none."""
    if bundle is None:
        return None
    place = bundle.absolute()
    return next((contents for folder in (place, place.parent) if (contents := _read(folder)) is not None), None)


def _read(folder: Path) -> Contents | None:
    arrays = load_index(folder / CONTENTS, ("train", "val", "images"))
    if arrays is None:
        return None
    train, val, images = arrays["train"], arrays["val"], arrays["images"]
    if any(split.dtype != np.uint64 or split.ndim != 1 for split in (train, val)) or images.shape != (2,):
        return None
    return Contents(np.sort(train), np.sort(val), (int(images[0]), int(images[1])))


def carry_contents(run: Path, folder: Path) -> None:
    """Copy the digests of a run into a bundle, unless there are too many."""
    contents = _read(run)
    if contents is not None and len(contents.train) + len(contents.val) <= MOST_IN_BUNDLE:
        with suppress(OSError):
            shutil.copyfile(run / CONTENTS, folder / CONTENTS)
