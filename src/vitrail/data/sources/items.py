"""Arrays, and lists of images with labels: paths, bytes of files, Pillow images, arrays and tensors."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail.data.decode import to_bytes
from vitrail.data.image_files import quiet, turn_of, turned
from vitrail.data.inputs import A_URL, Item, is_url, item_of
from vitrail.data.sources.in_memory import (
    Fingerprint,
    Fingerprinted,
    GivenLabels,
    InMemory,
    array_labels,
    as_list,
    read_labels,
)
from vitrail.data.sources.labelled import Labelled
from vitrail.data.sources.source import Arrays, Labels, Pixels, Source, Subset, read_file, stamp_file
from vitrail.data.sources.targets import AUTOMATIC, Labelling, Targets
from vitrail.errors import DataError, InputError, VitrailError
from vitrail.text import printable_path

CHANNELS = (1, 3, 4)
"""The usual numbers of channels, to tell which axis they are on."""
NORMALISED = (
    "an image has integers 0…255 or floats 0…1; leave out transforms that normalise or augment, Vitrail does both"
)


class FilePath(NamedTuple):
    """The path of an image file."""

    path: str


Stored = bytes | Pixels | FilePath
"""An image as a source holds it."""


@dataclass(frozen=True, eq=False)
class Items:
    """Labelled images from a list; those with paths are read from their files."""

    images: Sequence[Stored]
    labels: Labels
    classes: tuple[str, ...]
    digest: str
    unit: str = "image"
    """How an image without a path is called, with its number."""
    targets: Targets | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def key(self, index: int) -> str:
        """Return the path of an image, or its number with the fingerprint."""
        image = self.images[index]
        return image.path if isinstance(image, FilePath) else f"{self.digest[:12]}: {self.unit} {index}"

    def name(self, index: int) -> str:
        """Return the path of an image, or its number."""
        image = self.images[index]
        return printable_path(image.path) if isinstance(image, FilePath) else f"{self.unit} {index}"

    def read(self, index: int) -> bytes | Pixels:
        """Return an image as it is stored."""
        return read_stored(self.images[index], self.name(index))

    def stamp(self, index: int) -> tuple[int, int]:
        """Return two numbers that change when the stored image does."""
        image = self.images[index]
        if isinstance(image, FilePath):
            return stamp_file(image.path, self.name(index))
        return index, int(self.digest[:15], 16)


def read_stored(image: Stored, name: str) -> bytes | Pixels:
    """Return the bytes or pixels of an image."""
    return read_file(image.path, name) if isinstance(image, FilePath) else image


# ── one image ──


def stored_image(image: object, where: str) -> Stored:
    """Return an image as a source holds it; `where` names it in messages."""
    if isinstance(image, Mapping) and ("bytes" in image or "path" in image):  # as Hugging Face datasets stores it
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str | os.PathLike):
        path = os.fspath(image)
        if is_url(os.fsencode(path)):
            raise DataError(f"{where} is {A_URL}")
        return FilePath(path)
    if isinstance(image, Image.Image):
        return _pillow_pixels(image, where)
    if not isinstance(image, bytes | np.ndarray | Tensor):
        raise InputError(
            f"{where} is of type {type(image).__name__}, not an image; use a path, the bytes of a file, a Pillow "
            "image, an array or a tensor"
        )
    try:
        content = item_of(image, 3).content
        return content if isinstance(content, bytes) else as_pixels(np.asarray(content), where, axes=(2, 3))
    except VitrailError as error:
        raise type(error)(f"{where}: {error}" if where not in str(error) else str(error)) from None


def as_pixels(array: Pixels, where: str, axes: tuple[int, ...]) -> Pixels:
    """Return an array as uint8; integers above 255 are taken as 16 bits, and floats as 0…1."""
    if array.ndim not in axes or not array.size:
        raise DataError(f"{where} has shape {array.shape}, which is not that of images")
    if array.dtype.kind not in "biuf":
        raise InputError(f"{where} holds values of type {array.dtype}, which are not those of images")
    try:
        return to_bytes(array)
    except DataError:
        low, high = float(array.min()), float(array.max())
        raise DataError(f"{where} has values from {low:g} to {high:g}; {NORMALISED}") from None


def _pillow_pixels(image: Image.Image, where: str) -> Pixels:
    """Return the pixels of a Pillow image, upright, in a mode that an array can express."""
    try:
        with quiet():
            turn = turn_of(image)
            image.load()
            if image.mode not in ("L", "RGB", "RGBA") and not image.mode.startswith(("I", "F")):
                grey = image.mode in ("1", "LA", "La") and not image.has_transparency_data
                image = image.convert("L" if grey else "RGBA" if image.has_transparency_data else "RGB")
            pixels = as_pixels(np.asarray(image), where, axes=(2, 3))
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{where} cannot be decoded: {error}") from None
    return pixels if turn is None else turned(pixels, turn)


# ── arrays ──


def array_data(images: Any, labels: object | None, labelling: Labelling = AUTOMATIC) -> InMemory:
    """Open images in one array or tensor, with a label for each, or None."""
    array = _image_array(images)
    labelled = _labels_of(len(array), labels, None, labelling, title="the array data", unit="image")
    fingerprint = Fingerprint()
    fingerprint.add_labels(labelled)
    fingerprint.add(array)
    arrays = Arrays(array, labelled.labels, labelled.classes, labelled.targets)
    return InMemory("arrays", {"train": Fingerprinted(arrays, fingerprint.hex)}, fingerprint.hex)


def _image_array(images: Any) -> Pixels:
    """Return images as uint8, (images, height, width[, channels])."""
    tensor = isinstance(images, Tensor)
    if tensor:
        images = (images.float() if images.is_floating_point() else images).detach().cpu().numpy()
    shape = images.shape
    expected = "(images, channels, height, width)" if tensor else "(images, height, width, channels)"
    here, there = (1, -1) if tensor else (-1, 1)
    if len(shape) == 4 and shape[here] not in CHANNELS and shape[there] in CHANNELS:
        what = "a tensor" if tensor else "an array"
        raise InputError(f"{what} of images should be {expected}, but this is {tuple(shape)}; transpose it")
    if len(shape) not in (3, 4) or not images.size or (len(shape) == 3 and shape[-1] in CHANNELS):
        raise DataError(
            f"the images have shape {tuple(shape)}; expected {expected} with at least one image, or "
            "(images, height, width) for grey ones"
        )
    pixels = as_pixels(images, "the array of images", axes=(3, 4))
    return pixels.transpose(0, 2, 3, 1) if tensor and len(shape) == 4 else pixels


# ── lists ──


def list_data(items: Sequence[object], labelling: Labelling = AUTOMATIC) -> InMemory:
    """Open a list of (image, label), or of images without labels."""
    if not len(items):
        raise DataError("the list of images is empty; give at least one image")
    pairs = [is_pair(item) for item in items]
    if any(pairs) and not all(pairs):
        odd = pairs.index(False)
        raise DataError(f"item {odd} of the list has no label, but others have; pass (image, label) for all, or none")
    images = [item[0] if pairs[0] else item for item in items]  # type: ignore[index]  # pairs have items
    labels = [item[1] for item in items] if pairs[0] else None  # type: ignore[index]
    return column_data(images, labels, labelling)


def column_data(images: Sequence[object], labels: object | None, labelling: Labelling = AUTOMATIC) -> InMemory:
    """Open a list of images of any kind, with a label for each, or None."""
    if not len(images):
        raise DataError("the list has no images; give at least one")
    labelled = _labels_of(len(images), labels, None, labelling, title="the list", unit="item")
    source = item_source("the list", images, labelled, unit="item")
    return InMemory("list", {"train": source}, source.digest)


def item_source(title: str, images: Sequence[object], labelled: Labelled, unit: str) -> Items:
    """Return the source of images of any kind."""
    stored = [stored_image(image, f"{unit} {index} of {title}") for index, image in enumerate(images)]
    _check_files(stored, title, unit)
    fingerprint = Fingerprint()
    fingerprint.add_labels(labelled)
    for image in stored:
        if isinstance(image, FilePath):
            fingerprint.add(image.path)
            fingerprint.add(str(stamp_file(image.path, printable_path(image.path))[0]))
        else:
            fingerprint.add(image)
    return Items(stored, labelled.labels, labelled.classes, fingerprint.hex, unit, labelled.targets)


def _labels_of(
    images: int, labels: object | None, names: Sequence[str] | None, labelling: Labelling, *, title: str, unit: str
) -> Labelled:
    """Return what images are labelled with; None: nothing."""
    if isinstance(labels, Tensor):
        labels = labels.detach().cpu().numpy()
    listed: Any = [None] * images if labels is None else labels
    if not (isinstance(labels, np.ndarray) and labels.ndim == 2):
        listed = as_list(listed, "the labels")
    if len(listed) != images:
        raise DataError(f"{images:,} images with {len(listed):,} labels; give one label per image")
    if isinstance(listed, np.ndarray):
        return array_labels(listed, names, labelling, title=title, unit=unit)
    return read_labels(GivenLabels((listed,), classes=names), labelling, title=title, unit=unit)


def _check_files(stored: Sequence[Stored], title: str, unit: str) -> None:
    """Raise for a path that is not a file, and for one that is there twice."""
    first: dict[str, int] = {}
    missing: list[str] = []
    for index, image in enumerate(stored):
        if not isinstance(image, FilePath):
            continue
        before = first.setdefault(os.path.normpath(image.path), index)
        if before != index:
            raise DataError(
                f"{printable_path(image.path)} is twice in {title}, as {unit}s {before} and {index}; list it once"
            )
        if not os.path.isfile(image.path):
            missing.append(f"{printable_path(image.path)}, {unit} {index} of {title}")
    if missing:
        more = f", nor do {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise DataError(
            f"{missing[0]}, does not exist{more}; correct the paths, which are relative to the working folder"
        )


def is_pair(item: object) -> bool:
    """Whether an item of a list is an image with its label."""
    return isinstance(item, tuple | list) and len(item) == 2 and not hasattr(item, "_fields")


# ── to predict ──


def items_of(data: InMemory) -> list[str] | Iterator[Item]:
    """Return the images to predict: paths if all have one, else items that are read one after the other."""
    sources = list(data.splits.values())
    paths = [path for source in sources for path in _paths(source)]
    return paths if len(paths) == sum(map(len, sources)) else read_items(sources)


def _paths(source: Source) -> list[str]:
    base, indices = (source.base, source.indices) if isinstance(source, Subset) else (source, range(len(source)))
    images = [base.images[int(index)] for index in indices] if isinstance(base, Items) else []
    return [image.path for image in images if isinstance(image, FilePath)]


def read_items(sources: Sequence[Source], place: str = "") -> Iterator[Item]:
    """Yield the images of sources; their names start with `place`."""
    for source in sources:
        for index in range(len(source)):
            name = os.fsencode(place + source.name(index))
            try:
                yield Item(name, content=source.read(index))
            except DataError as error:
                yield Item(name, error=str(error))
