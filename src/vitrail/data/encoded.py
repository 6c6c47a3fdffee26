"""Images on their way to a decoder on the GPU: workers read the files and headers, and pass the encoded bytes on.

What such a decoder does not do, or not faster, the worker decodes itself: other formats, progressive and CMYK JPEGs,
and files that may be broken. So a broken file is reported with the same words, whatever decodes the others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.decode import Jpeg, LazyImage
from vitrail.data.device_resize import Window
from vitrail.data.packing import PackedArrays, Slot
from vitrail.data.sources.source import Pixels

MOST_PIXELS = 2**25
"""Largest JPEG for a GPU: 33 million pixels, whose resize takes 0.5 GB of its memory."""
COLOURS = ("Gray", "YCbCr")
_BASELINE, _SCAN, _TABLES, _END = 0xC0, 0xDA, {0xC4, 0xDB}, b"\xff\xd9"
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xDA)))


class Encoded(NamedTuple):
    """A JPEG that is left to the GPU."""

    content: bytes
    turn: Image.Transpose | None
    height: int
    """As stored, before its turn."""
    width: int
    window: Window
    """In pixels of the turned image."""


def encoded(image: LazyImage, window: Window, channels: int) -> Encoded | None:
    """Return an opened image as the GPU decodes it; None if a CPU should."""
    if not isinstance(image, Jpeg) or image.colours not in COLOURS or channels not in (1, 3):
        return None
    end = end_of_baseline(image.content) if image.stored_height * image.stored_width <= MOST_PIXELS else None
    if end is None:
        return None
    return Encoded(image.content[:end], image.turn, image.stored_height, image.stored_width, window)


def end_of_baseline(content: bytes) -> int | None:
    """Return where a complete baseline JPEG with one scan ends; None for any other, or one that may be broken."""
    place, tables = 2, set[int]()
    components = 0
    while place + 10 < len(content):
        if content[place] != 0xFF:
            return None
        marker = content[place + 1]
        if marker == 0xFF:  # segments may be padded
            place += 1
            continue
        if marker in _WITHOUT_LENGTH:
            return None
        if 0xC0 <= marker <= 0xCF and marker not in (_BASELINE, 0xC4):  # progressive, arithmetic coding, 12 bits
            return None
        if marker == _BASELINE:
            components = content[place + 9] if content[place + 4] == 8 else 0
        if marker == _SCAN:
            if not components or content[place + 4] != components or tables != _TABLES:
                return None
            # In a scan, these two bytes do not occur.
            end = content.find(_END, place)
            return None if end < 0 else end + len(_END)
        if marker in _TABLES:
            tables.add(marker)
        place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
    return None


# ── turns ──

# Whether the axes are swapped, and whether the stored rows and columns are reversed.
_TURNS: dict[Image.Transpose | None, tuple[bool, bool, bool]] = {
    None: (False, False, False),
    Image.Transpose.FLIP_LEFT_RIGHT: (False, False, True),
    Image.Transpose.FLIP_TOP_BOTTOM: (False, True, False),
    Image.Transpose.ROTATE_180: (False, True, True),
    Image.Transpose.TRANSPOSE: (True, False, False),
    Image.Transpose.TRANSVERSE: (True, True, True),
    Image.Transpose.ROTATE_90: (True, False, True),
    Image.Transpose.ROTATE_270: (True, True, False),
}


class Region(NamedTuple):
    """Whole pixels of an image as it is stored."""

    top: int
    left: int
    bottom: int
    right: int


class StoredJpeg(NamedTuple):
    """An encoded image, and what is decoded of it."""

    content: NDArray[np.uint8]
    turn: Image.Transpose | None
    height: int
    width: int
    region: Region

    @property
    def whole(self) -> bool:
        """Whether the region is the whole image."""
        return self.region == (0, 0, self.height, self.width)


def stored_region(turn: Image.Transpose | None, height: int, width: int, window: Window) -> Region:
    """Return where a window of a turned image is in the stored one, of (height, width)."""
    swap, reverse_rows, reverse_columns = _TURNS[turn]
    rows = window.top, window.top + window.height
    columns = window.left, window.left + window.width
    rows, columns = (columns, rows) if swap else (rows, columns)
    top, bottom = (height - rows[1], height - rows[0]) if reverse_rows else rows
    left, right = (width - columns[1], width - columns[0]) if reverse_columns else columns
    return Region(top, left, bottom, right)


def turned(pixels: Tensor, turn: Image.Transpose | None) -> Tensor:
    """Turn stored pixels (C, H, W)."""
    swap, reverse_rows, reverse_columns = _TURNS[turn]
    axes = [axis for axis, reverse in ((1, reverse_rows), (2, reverse_columns)) if reverse]
    pixels = pixels.flip(axes) if axes else pixels
    return pixels.mT if swap else pixels


# ── a batch ──


class EncodedBatch(NamedTuple):
    """A batch whose images are encoded or, if the GPU does not decode them, ready; without its memory."""

    content: Slot
    """The encoded bytes of all images."""
    stored: Slot
    """(n, 8), int64: where each image's bytes end, its turn (-1: none), its stored size and its region."""
    axes: Slot
    """(n, 8), float64: the axes of its window, rows first."""
    rows: Slot
    """(n,), int64: which row of the batch it becomes."""
    ready: Slot
    """(m, H, W, C), uint8: the images that are ready."""
    ready_rows: Slot
    """(m,), int64."""
    padded: bool
    """Whether a window pads."""

    def jpegs(self, memory: Tensor) -> list[StoredJpeg]:
        """Return the encoded images; their bytes are views of the memory."""
        content, start, jpegs = self.content.of(memory).numpy(), 0, []
        for end, turn, height, width, *region in self.stored.of(memory).tolist():
            turn = None if turn < 0 else Image.Transpose(turn)
            jpegs.append(StoredJpeg(content[start:end], turn, height, width, Region(*region)))
            start = end
        return jpegs


def pack_images(
    images: Sequence[Encoded | Pixels], size: tuple[int, int], channels: int, packed: PackedArrays
) -> EncodedBatch:
    """Pack a batch; `images` are its rows, each encoded or ready (H, W, C)."""
    some = [(row, image) for row, image in enumerate(images) if isinstance(image, Encoded)]
    ready = [(row, image) for row, image in enumerate(images) if not isinstance(image, Encoded)]
    ends = np.cumsum([len(image.content) for _, image in some], dtype=np.int64)
    stored = [
        (end, -1 if image.turn is None else int(image.turn), image.height, image.width, *_stored(image))
        for end, (_, image) in zip(ends, some, strict=True)
    ]
    axes = [(*image.window.rows, *image.window.columns) for _, image in some]
    pixels = np.stack([image for _, image in ready]) if ready else np.zeros((0, *size, channels), np.uint8)
    return EncodedBatch(
        packed.put(np.frombuffer(b"".join(image.content for _, image in some), np.uint8)),
        packed.put(np.array(stored, np.int64).reshape(-1, 8)),
        packed.put(np.array(axes, np.float64).reshape(-1, 8)),
        packed.put(np.array([row for row, _ in some], np.int64)),
        packed.put(pixels),
        packed.put(np.array([row for row, _ in ready], np.int64)),
        any(image.window.is_padded(size) for _, image in some),
    )


def _stored(image: Encoded) -> Region:
    return stored_region(image.turn, image.height, image.width, image.window)
