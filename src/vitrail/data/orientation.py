"""EXIF orientation: reading it, and rotating pixels upright."""

import contextlib
import io
import warnings
from collections.abc import Iterator

from PIL import Image

from vitrail.data.sources.source import Pixels

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return how to transpose an open Pillow image, without decoding it."""
    if image.format == "TIFF":  # Pillow transposes these itself
        return None
    # For a PNG, Pillow would decode everything to find tags that may be at its end.
    stored = image.info.get("exif", b"") if image.format == "PNG" else None
    exif = image.getexif() if stored is None else _tags(stored)
    return _TURNS.get(exif.get(_ORIENTATION, 1))


def turn_of_jpeg(content: bytes) -> Image.Transpose | None:
    """Return how to transpose a JPEG, without decoding it."""
    if not _has_tags(content):
        return None
    try:
        with quiet():
            return _TURNS.get(Image.open(io.BytesIO(content)).getexif().get(_ORIENTATION, 1))
    except (OSError, ValueError, SyntaxError):  # ignore invalid tags; the pixels may be fine
        return None


def _tags(content: bytes) -> Image.Exif:
    tags = Image.Exif()
    if content:
        tags.load(content)
    return tags


def _has_tags(content: bytes) -> bool:
    """Return whether a JPEG has EXIF tags: much cheaper than reading them, and few files have any."""
    place = 2
    while place + 8 < len(content) and content[place] == 0xFF:
        marker = content[place + 1]
        if marker == 0xFF:  # segments may be padded
            place += 1
            continue
        if marker == 0xDA:  # start of the image data
            return False
        if marker == 0xE1 and content[place + 4 : place + 8] in (b"Exif", b"http"):
            return True
        place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
    return False


def seen_size(height: int, width: int, turn: Image.Transpose | None) -> tuple[int, int]:
    """Return the size of an image after transposing it."""
    return (width, height) if turn is not None and _swaps(turn) else (height, width)


def turned(array: Pixels, turn: Image.Transpose) -> Pixels:
    """Transpose pixels like Pillow, as a view."""
    match turn:
        case Image.Transpose.FLIP_LEFT_RIGHT:
            return array[:, ::-1]
        case Image.Transpose.FLIP_TOP_BOTTOM:
            return array[::-1]
        case Image.Transpose.ROTATE_180:
            return array[::-1, ::-1]
        case Image.Transpose.TRANSPOSE:
            return array.swapaxes(0, 1)
        case Image.Transpose.TRANSVERSE:
            return array[::-1, ::-1].swapaxes(0, 1)
        case Image.Transpose.ROTATE_90:
            return array.swapaxes(0, 1)[::-1]
        case _:
            return array.swapaxes(0, 1)[:, ::-1]


def _swaps(turn: Image.Transpose) -> bool:
    """Return whether a transpose swaps height and width."""
    return turn in (
        Image.Transpose.ROTATE_90,
        Image.Transpose.ROTATE_270,
        Image.Transpose.TRANSPOSE,
        Image.Transpose.TRANSVERSE,
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress Pillow's warnings about what we check ourselves (size) or do not need (invalid tags)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
