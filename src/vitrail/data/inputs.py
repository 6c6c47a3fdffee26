"""Image inputs: from a path, bytes, an image, an array or a tensor to pixels of the right size."""

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail.data.decode import LazyImage, open_image
from vitrail.data.image_files import PIXEL_LIMIT
from vitrail.data.preprocess import Preprocess, resized_size
from vitrail.data.remote.filesystems import is_remote
from vitrail.data.remote.stored_files import read_at, read_remote
from vitrail.data.sources.source import Pixels, reason_of
from vitrail.errors import DataError, InputError, VitrailError
from vitrail.io import open_regular
from vitrail.text import printable_path

T = TypeVar("T")
ImageInput = str | os.PathLike[str] | bytes | Image.Image | np.ndarray[Any, Any] | Tensor
"""A path, the bytes of a file, a Pillow image, an array (height, width[, channels]) or a tensor ([channels,] height,
width)."""
A_URL = "a URL, which is not downloaded; download it first"
_URL = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]+://|data:image/")


class Item(NamedTuple):
    """An image and its location."""

    name: bytes
    """Its name in an output row: a file path, a path in a tar, or a row of a manifest."""
    file: bytes = b""
    start: int = 0
    """Its offset in the file; of content that a table holds, its row, from 0."""
    size: int | None = None
    """Its length in the file; None: the file is the image."""
    content: bytes | Pixels | Image.Image | None = None
    """The image itself, if it is not in a file."""
    error: str | None = None
    """An error found when the image was listed."""

    def read(self) -> bytes | Pixels | Image.Image:
        """Return the image as it is stored."""
        if self.error is not None:
            raise DataError(self.error)
        if self.content is not None:
            return self.content
        if is_remote(self.file):
            return read_remote(os.fsdecode(self.file), self.size, self.start)
        try:
            with open_regular(self.file) as file:
                content = file.readall() if self.size is None else read_at(file, self.size, self.start)
        except IsADirectoryError:
            raise DataError("a folder; pass it on the command line to read the images in it") from None
        except (OSError, ValueError) as fault:
            raise DataError(f"it cannot be read: {reason_of(fault)}") from None
        if self.size is not None and len(content) < self.size:
            raise DataError("the tar was truncated while it was read")
        return content


def is_url(place: bytes) -> bool:
    """Return whether an input is a URL, not a local path."""
    return _URL.match(place) is not None and not os.path.lexists(place)


def fitted(item: Item, preprocess: Preprocess, *, quick: bool = False) -> Pixels:
    """Read, resize and crop an image: (height, width, channels), uint8; `quick` as in `Preprocess.fit`."""
    return prepared(item, preprocess, partial(_fit, quick=quick))


def prepared(item: Item, preprocess: Preprocess, prepare: Callable[[LazyImage, Preprocess], T]) -> T:
    """Read and open an image, and return what `prepare` makes of it; every failure is a `VitrailError`."""
    try:
        image = open_image(item.read())
        size = resized_size((image.width, image.height), preprocess.resize_to or preprocess.size, preprocess.resize)
        if size[0] * size[1] > PIXEL_LIMIT:
            raise DataError(f"an image of {image.height:,}×{image.width:,} pixels is too narrow to be resized")
        return prepare(image, preprocess)
    except VitrailError:
        raise
    except Exception as error:  # Pillow's readers of rare formats may raise anything on corrupt files
        raise DataError(f"it cannot be decoded: {type(error).__name__}: {str(error)[:200]}") from None


def _fit(image: LazyImage, preprocess: Preprocess, *, quick: bool) -> Pixels:
    return preprocess.fit(image.pixels(preprocess.channels), quick=quick)


def is_one(images: object) -> bool:
    """Return whether an input is a single image."""
    if isinstance(images, np.ndarray | Tensor):
        return images.ndim < 4
    return isinstance(images, str | os.PathLike | bytes | Image.Image)


def name_of(image: object, number: int | None) -> str:
    """Return an image's name for messages; `number` is its position among several."""
    if isinstance(image, Item):
        return printable_path(image.name)
    if isinstance(image, str | os.PathLike):
        return printable_path(os.fspath(image))
    return "the image" if number is None else f"image {number}"


def item_of(image: object, channels: int) -> Item:
    """Turn an input into an item, for a model with `channels` channels."""
    match image:
        case Item():
            return image
        case str() | os.PathLike():
            path = os.fsencode(image)
            if is_url(path):
                raise InputError(A_URL)
            if os.path.isdir(path):
                raise InputError("a folder; pass its files, or use the command line")
            return Item(path, path)
        case bytes() | Image.Image():
            return Item(b"", content=image)
        case np.ndarray():
            _check_axes(image.shape, channels, last=True)
            return Item(b"", content=image)
        case Tensor():
            _check_axes(tuple(image.shape), channels, last=False)
            # NumPy has no bf16.
            array = (image.float() if image.is_floating_point() else image).detach().cpu().numpy()
            return Item(b"", content=array.transpose(1, 2, 0) if array.ndim == 3 else array)
    raise no_image(image)


def _check_axes(shape: Sequence[int], channels: int, *, last: bool) -> None:
    """Raise if the channels are at the wrong end of the shape."""
    likely = (1, 3, 4, channels)
    if len(shape) == 3 and shape[-1 if last else 0] not in likely and shape[0 if last else -1] in likely:
        what, axes = ("an array", "(height, width, channels)") if last else ("a tensor", "(channels, height, width)")
        raise InputError(f"{what} should be {axes}, but this is {tuple(shape)}; transpose it")


def no_image(value: object) -> InputError:
    """Return the error for an input that is not an image."""
    kinds = "a path, the bytes of a file, a Pillow image, an array or a tensor, or several of them"
    return InputError(f"expected {kinds}, found {type(value).__name__}")
