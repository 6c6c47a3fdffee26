"""Image files before they are decoded: their type, the limits on decoding them, their EXIF orientation.

Decoders cannot be interrupted, so these limits bound the time of `check`, `predict` and training. The slowest files
that pass were built by hand and timed; docs/guides/data.md has the timings.
"""

import contextlib
import importlib
import io
import os
import stat
import warnings
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from PIL import Image, features

from vitrail.data.sources.source import Pixels
from vitrail.errors import DataError

# ── type ──

HEAD = 64
"""Number of bytes needed to detect a file's type."""
ENDINGS = {
    "JPEG": "jpg", "PNG": "png", "GIF": "gif", "WebP": "webp", "BMP": "bmp", "TIFF": "tif", "NumPy": "npy",
    "HEIC": "heic", "AVIF": "avif",
}  # fmt: skip
"""The suffix of each type."""
_STARTS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\x93NUMPY": "NumPy",
}
_HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}
_AVIF = {b"avif", b"avis"}


def sniff(content: bytes) -> str | None:
    """Return the image type of a file by its first bytes, or None."""
    for start, kind in _STARTS.items():
        if content.startswith(start):
            return kind
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WebP"
    if content[:2] == b"BM" and content[6:10] == b"\0\0\0\0":  # many texts start with these two letters
        return "BMP"
    if content[4:8] == b"ftyp":
        # The major brand, and the compatible brands.
        length = int.from_bytes(content[:4], "big")
        brands = {content[8:12], *(content[at : at + 4] for at in range(16, min(length, len(content)), 4))}
        return "AVIF" if brands & _AVIF else "HEIC" if brands & _HEIC else None
    return None


def sniff_file(path: bytes, start: int = 0, size: int = HEAD) -> str | None:
    """Return the image type of a file, or of its content from `start` on; None if it cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading from a pipe might block forever
            return None
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            return sniff(file.read(min(size, HEAD)))
    except OSError:
        return None


@cache
def reads_heic() -> bool:
    """Register HEIC with Pillow if pillow-heif is installed; return whether it is."""
    try:
        importlib.import_module("pillow_heif").register_heif_opener()
    except ImportError:
        return False
    return True


def why_not_read(kind: str) -> str | None:
    """Return what is missing to read an image type; None if nothing is."""
    if kind == "HEIC" and not reads_heic():
        return "reading HEIC images needs pillow-heif: pip install 'vitrail[heif]'"
    if kind == "AVIF" and not features.check("avif"):
        return "this version of Pillow cannot read AVIF images: pip install 'pillow>=11.3'"
    return None


# ── limits ──

PIXEL_LIMIT = 178_956_970
"""Most pixels of an image: 0.5 GB as RGB. A small file can declare any size, so this is checked first."""
JPEG_SCANS = 100
"""Most scans of a JPEG. Encoders write about 10, and mozjpeg at most 20."""
JPEG_WORK = 2**31
"""Most pixels times scans of a JPEG: the largest accepted image with 12 scans. A scan of 250 bytes can make a decoder
visit every coefficient of 179 million pixels."""
JPEG_SEGMENTS = 4096
"""Most segments around the scans; 16 MB of colour profile and metadata take 250."""
JPEG_STRAY = 65_536
"""Most stray bytes between segments; Pillow reads them one by one."""
PNG_CHUNKS, PNG_CHUNK = 4096, 2048
"""Most chunks of a PNG, plus one per this many bytes; encoders write one per 8 kB or more."""
GIF_BLOCKS = 4096
"""Most blocks before a GIF's first frame: 1 MB of comments. Later frames are never read."""
FRAMES = 10_000
"""Most frames of an animated WebP or PNG: five minutes of video. Only the first one is used."""
BMP_RUN_PIXELS = 2**22
"""Most pixels of a run-length encoded BMP, which Pillow decodes in pure Python."""
PLAIN_BYTES = 8_000_000
"""Most bytes of a plain-text PBM, PGM or PPM, which Pillow reads in pure Python."""
TIFF_PAGES, TIFF_TAGS = 1000, 65_536
"""Most pages of a TIFF, which may be channels, and most tags in all pages; a page has about 20."""
TILES = 100_000
"""Most tiles or strips of a page: 100,000 × 64 × 64 pixels are twice the largest accepted image."""
TILE_PIXELS = 2**26
"""Most pixels of one tile, which libtiff allocates regardless of the image's size."""
TILED_PIXELS = 2**28
"""Most pixels of all tiles of a page: tiles may be far larger than the image, and share the same bytes."""
TIFF_SCANS = 100
"""libtiff's own limit on the scans of a tile."""
J2K_SAMPLES = 2**27
"""Most pixels times channels of a JPEG 2000, which takes ten times as long to decode as others; a satellite tile of
10,980×10,980 pixels has fewer."""
J2K_PACKETS, J2K_BLOCKS = 2**22, 2**18
"""Most packets (layers times precincts) and code-blocks of a JPEG 2000; encoders make blocks of 32×32 or 64×64."""
J2K_BOXES = 4096
"""Most boxes before the image of a JP2 file, which has about 5."""


class Outline(NamedTuple):
    """The size and cost of an image file, from its header."""

    width: int
    height: int
    passes: int = 1
    """How often a decoder visits all pixels, at most."""

    @property
    def work(self) -> int:
        """Pixels that a decoder visits."""
        return self.width * self.height * self.passes


def check_count(count: int, most: int, kind: str, what: str, limit: int | None = None) -> None:
    """Raise if `count` exceeds `most`, which is what remains of the `limit` in the message."""
    if count > most:
        raise DataError(
            f"a {kind} with more than {most if limit is None else limit:,} {what} would take very long to decode; "
            f"save it again with another program, or in another format"
        )


# ── orientation ──

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
