"""What a person gives as a picture, and what an engine takes: from a path or an array to pixels of the right size."""

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail.data.decode import open_picture
from vitrail.data.limits import PIXEL_LIMIT
from vitrail.data.preprocess import Preprocess, resized_size
from vitrail.data.sources.listing import shown
from vitrail.data.sources.shards import read_at
from vitrail.data.sources.source import Pixels, reason_of
from vitrail.errors import DataError, InputError, VitrailError
from vitrail.io import open_regular

Picture = str | os.PathLike[str] | bytes | Image.Image | np.ndarray[Any, Any] | Tensor
"""A path, the content of a file, a picture of Pillow, an array (height, width[, channels]) or a tensor ([channels,]
height, width)."""
A_URL = "a URL, and nothing is fetched from there; download it first"
_URL = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]+://|data:image/")


class Item(NamedTuple):
    """A picture, and where it is."""

    name: bytes
    """What its row calls it: the path of its file, of a tar and inside it, or the number of a row."""
    file: bytes = b""
    start: int = 0
    """Where it begins in its file."""
    size: int | None = None
    """How long it is there; None: the file is the picture."""
    content: bytes | Pixels | Image.Image | None = None
    """The picture itself, where it lies in no file of its own."""
    error: str | None = None
    """What was wrong already when it was listed."""

    def read(self) -> bytes | Pixels | Image.Image:
        """Return the picture as it is stored."""
        if self.error is not None:
            raise DataError(self.error)
        if self.content is not None:
            return self.content
        try:
            with open_regular(self.file) as file:
                content = file.readall() if self.size is None else read_at(file.fileno(), self.size, self.start)
        except IsADirectoryError:
            raise DataError("a folder; name it on the command line to have the images in it read") from None
        except (OSError, ValueError) as fault:
            raise DataError(f"it cannot be read: {reason_of(fault)}") from None
        if self.size is not None and len(content) < self.size:
            raise DataError("the tar has become shorter while it was read")
        return content


def is_url(place: bytes) -> bool:
    """Tell whether somebody gave the address of something that is not on this machine."""
    return _URL.match(place) is not None and not os.path.lexists(place)


def fitted(item: Item, preprocess: Preprocess) -> Pixels:
    """Read a picture and make of it what an engine takes: (height, width, channels), uint8."""
    try:
        picture = open_picture(item.read())
        size = resized_size((picture.width, picture.height), preprocess.resize_to or preprocess.size, preprocess.resize)
        if size[0] * size[1] > PIXEL_LIMIT:
            raise DataError(f"a picture of {picture.height:,}×{picture.width:,} pixels is too narrow to be resized")
        return preprocess.fit(picture.pixels(preprocess.channels))
    except VitrailError:
        raise
    except Exception as error:  # Pillow's readers of rare formats fail on damaged files in any way
        raise DataError(f"it cannot be decoded: {type(error).__name__}: {str(error)[:200]}") from None


def is_one(given: object) -> bool:
    """Say whether somebody gave one picture, and not several."""
    if isinstance(given, np.ndarray | Tensor):
        return given.ndim < 4
    return isinstance(given, str | os.PathLike | bytes | Image.Image)


def name_of(picture: object, number: int | None) -> str:
    """Return what a message calls a picture, given alone or as one of many."""
    if isinstance(picture, str | os.PathLike):
        return shown(os.fspath(picture))
    return "the picture" if number is None else f"picture {number}"


def item_of(picture: object, channels: int) -> Item:
    """Make of what was given something that can be read, for a model of so many channels."""
    match picture:
        case str() | os.PathLike():
            path = os.fsencode(picture)
            if is_url(path):
                raise InputError(A_URL)
            if os.path.isdir(path):
                raise InputError("a folder; give its files, or name it on the command line")
            return Item(path, path)
        case bytes() | Image.Image():
            return Item(b"", content=picture)
        case np.ndarray():
            _check_axes(picture.shape, channels, last=True)
            return Item(b"", content=picture)
        case Tensor():
            _check_axes(tuple(picture.shape), channels, last=False)
            # NumPy has no bf16.
            array = (picture.float() if picture.is_floating_point() else picture).detach().cpu().numpy()
            return Item(b"", content=array.transpose(1, 2, 0) if array.ndim == 3 else array)
    raise no_picture(picture)


def _check_axes(shape: Sequence[int], channels: int, *, last: bool) -> None:
    """Refuse a picture whose channels stand at the other end."""
    likely = (1, 3, 4, channels)
    if len(shape) == 3 and shape[-1 if last else 0] not in likely and shape[0 if last else -1] in likely:
        what, axes = ("an array", "(height, width, channels)") if last else ("a tensor", "(channels, height, width)")
        raise InputError(f"{what} is taken as {axes}, and this is {tuple(shape)}; turn its axes")


def no_picture(found: object) -> InputError:
    """Say what would have been a picture."""
    kinds = "a path, the bytes of a file, a picture of Pillow, an array or a tensor, or several of them"
    return InputError(f"expected {kinds}, found {type(found).__name__}")
