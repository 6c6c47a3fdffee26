"""Images whose label is a mask: one class per pixel.

A mask is an image with one channel, as large as its image is when it is displayed, upright: what `open_image` makes of
it, after its EXIF orientation. So a mask is stored upright; an orientation in its own file is applied, too. Values in
files become class indices, from 0 in the order of `Targets.names`, or `IGNORED_PIXEL`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vitrail.data.decode import decode_values
from vitrail.data.sources.index_files import Names
from vitrail.data.sources.matching import WHAT
from vitrail.data.sources.source import Keyed, Labels, Source, Subset, Wrapped, read_file
from vitrail.data.sources.strata import strata_of
from vitrail.data.sources.targets import Targets, kind_of_labels, output_names_of, targets_of
from vitrail.errors import DataError, StorageError, suggest
from vitrail.text import printable_path

Mask = NDArray[np.uint8]
"""(height, width): the index of each pixel's class, or `IGNORED_PIXEL`."""
IGNORED_PIXEL: Final = 255
"""The class index of pixels that count nowhere. Files use the same value."""
MOST_CLASSES = 255
LARGEST_VALUE = 65_535
"""The largest value of a pixel in a file."""


@runtime_checkable
class HasMasks(Protocol):
    """A source that returns masks itself."""

    def mask(self, index: int) -> Mask:
        """Return the mask of an image."""


@dataclass(frozen=True, eq=False)
class Masked(Wrapped):
    """Images with a mask each. The classes are strata: the rarest frequent class in a mask."""

    files: Names
    """The path of each mask."""
    values: tuple[int, ...]
    """The value of each class in files."""
    ignored: tuple[int, ...]
    """Other values in files."""
    targets: Targets
    split_of: NDArray[np.int8] | None = None
    """The split of every image: 0 train, 1 validation, 2 test; None if a manifest does not say so."""

    @cached_property
    def _strata(self) -> tuple[tuple[str, ...], Labels]:
        strata = strata_of(self.targets)
        return strata.names, strata.assign(self.targets)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the strata."""
        return self._strata[0]

    @property
    def labels(self) -> Labels:
        """The stratum of every image."""
        return self._strata[1]

    def key(self, index: int) -> str:
        """Return the key of an image."""
        return self.base.key(index) if isinstance(self.base, Keyed) else self.base.name(index)

    def mask(self, index: int) -> Mask:
        """Return the mask of an image, of its size."""
        name = printable_path(self.files[index])
        indices = self._lookup[mask_values(self.files[index])]
        if (indices < 0).any():
            raise DataError(f"the mask {name} has changed: it has a new value; open the data again")
        return np.asarray(indices, np.uint8)

    @cached_property
    def _lookup(self) -> NDArray[np.int16]:
        """The class index of every value; -1 for those that no mask had."""
        lookup = np.full(LARGEST_VALUE + 1, -1, np.int16)
        lookup[[*self.ignored, IGNORED_PIXEL]] = IGNORED_PIXEL
        lookup[list(self.values)] = np.arange(len(self.values))
        return lookup


def mask_values(path: bytes) -> NDArray[np.integer]:
    """Return the values in a mask's file: (height, width)."""
    name = printable_path(path)
    content = read_file(path, f"the mask {name}")
    try:
        values = decode_values(content)
        if values.dtype == np.bool_:
            return values.astype(np.uint8)
        if values.dtype.kind not in "iu":
            raise DataError(f"it has numbers of type {values.dtype}, not integers; save it as PNG")
        if values.dtype != np.uint8 and (int(values.min()) < 0 or int(values.max()) > LARGEST_VALUE):
            raise DataError(f"its values range from {values.min()} to {values.max()}; use 0 to {LARGEST_VALUE}")
        return values
    except StorageError:
        raise
    except DataError as error:
        raise DataError(f"the mask {name} cannot be used: {error}") from None


def has_masks(source: Source) -> bool:
    """Return whether the label of an image is a mask."""
    return kind_of_labels(source) == "masks"


def mask_at(source: Source, index: int) -> Mask:
    """Return the mask of an image, with class indices as the source counts them."""
    if isinstance(source, HasMasks):
        return source.mask(index)
    if isinstance(source, Subset):
        return mask_at(source.base, int(source.indices[index]))
    base: Source | None = getattr(source, "base", None)
    if base is None:
        raise DataError(f"{source.name(index)} has no mask")
    mask = mask_at(base, index)
    own, stored = output_names_of(source), output_names_of(base)
    return mask if own == stored else renumbering(stored, own)[mask]


@lru_cache(maxsize=16)
def renumbering(stored: tuple[str, ...], wanted: tuple[str, ...]) -> Mask:
    """Return the wanted index of every stored one; classes that are not wanted are ignored."""
    numbers = {name: number for number, name in enumerate(wanted)}
    lookup = np.full(256, IGNORED_PIXEL, np.uint8)
    lookup[: len(stored)] = [numbers.get(name, IGNORED_PIXEL) for name in stored]
    return lookup


# ── matching a model's outputs ──


@dataclass(frozen=True, eq=False)
class Matched(Wrapped):
    """Images whose masks have the class indices of a model, though its names of classes differ."""

    targets: Targets

    def mask(self, index: int) -> Mask:
        """Return the mask of an image."""
        return mask_at(self.base, index)


@dataclass(frozen=True, eq=False)
class Renamed(Wrapped):
    """Images whose masks have the classes of a model, by name."""

    targets: Targets


def match_masks(source: Source, names: Sequence[str] | None, outputs: int, *, by_number: bool = False) -> Source:
    """Return the source with class indices as a model counts them, matched by name.

    A class of the model that the data does not have is in none of its masks. Without `names`, or `by_number`, the
    classes are matched by their order.
    """
    targets = targets_of(source)
    if targets is None or targets.kind != "masks":
        found = "none" if targets is None else WHAT[targets.kind] + " instead"
        raise DataError(
            f"the model predicts masks, but the data has {found}; put images into a folder images and their masks into "
            "masks, or use vitrail predict"
        )
    if outputs > MOST_CLASSES:
        raise DataError(
            f"the model has {outputs:,} classes, but masks have at most {MOST_CLASSES}; use a model with fewer"
        )
    if names is None or by_number:
        if len(targets.names) != outputs:
            raise DataError(
                f"the masks have {len(targets.names):,} classes and the model {outputs:,}, so they cannot be matched "
                "by index; use data with the model's classes"
            )
        return source if names is None else Matched(source, replace(targets, names=tuple(names)))
    if strange := [name for name in targets.present if name not in names]:
        more = f" (and {len(strange) - 1:,} more)" if len(strange) > 1 else ""
        listed = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
        raise DataError(
            f"the masks have the class {strange[0]!r}{more}, which the model lacks; its classes are "
            f"{listed}{suggest(strange[0], names)}"
        )
    renamed = targets.renamed(names)
    return source if renamed is targets else Renamed(source, renamed)
