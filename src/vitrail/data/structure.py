"""What a file would make a decoder do, counted before it is decoded: scans, segments, chunks, frames, pages, tiles.

A small file can ask for hours of work inside every limit of bytes and pixels: a progressive JPEG of 471 kB can have
5,000 empty scans, each of which walks over the whole image. Only headers are read here, at the speed of `bytes.find`.
"""

import re
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vitrail.errors import DataError

JPEG_SCANS = 100
"""Most scans of a JPEG. Encoders write about 10, and the finest script of mozjpeg 20."""
JPEG_SEGMENTS = 4096
"""Most segments around the scans; 16 MB of colour profile and notes take 250."""
JPEG_STRAY = 65_536
"""Most bytes between segments that belong to none; Pillow reads them one by one."""
PNG_CHUNKS, PNG_CHUNK = 4096, 2048
"""Most chunks of a PNG, beside one for every so many bytes; encoders write one for every 8 kB or more."""
GIF_BLOCKS = 4096
"""Most blocks before a GIF's first frame, 1 MB of comments. Later frames are never read."""
FRAMES = 10_000
"""Most frames of an animated WebP or PNG: five minutes of film. The first one is used."""
TIFF_PAGES, TIFF_TAGS = 1000, 65_536
"""Most pages of a TIFF, which may be channels, and most tags of all pages; a page has about 20."""
TILES = 100_000
"""Most tiles or strips of a page: 100,000 × 64 × 64 pixels are twice the largest image that is taken."""
TILE_PIXELS = 2**26
"""Most pixels of one tile, for which libtiff makes room whatever the image's own size is."""

_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.DOTALL)
_ALONE = frozenset((0x01, *range(0xD0, 0xDA)))
"""Markers without a length: restarts, start and end of the image."""
_FRAME_HEADERS = frozenset((*range(0xC0, 0xD0),)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL = (0xC0, 0xC1)


class Outline(NamedTuple):
    """What the header of an image file says."""

    width: int
    height: int
    passes: int = 1
    """How often a decoder walks over all pixels, at most."""

    @property
    def work(self) -> int:
        """Pixels that a decoder touches."""
        return self.width * self.height * self.passes


def outline(content: bytes) -> Outline | None:
    """Read the structure of an image file; one that would take absurdly long to decode raises `DataError`.

    None where the format is another, or the header is damaged: that is for the decoder to judge.
    """
    try:
        for start, read in _READERS.items():
            if content.startswith(start):
                return read(content)
        return _jpeg_2000(content)
    except (struct.error, IndexError):  # it ends too soon
        return None


# ── JPEG ──


def _jpeg(content: bytes) -> Outline | None:
    place, segments, stray, size = 2, 0, 0, None
    components = 0  # of a sequential image: one whose first scan has all of them is done with it
    while True:
        found = _MARKER.search(content, place, place + JPEG_STRAY - stray + 2)
        if found is None:
            if len(content) > place + JPEG_STRAY - stray:
                raise DataError(f"a JPEG with more than {JPEG_STRAY:,} bytes between its segments; it is damaged")
            return None
        start, marker = found.start(), content[found.start() + 1]
        stray += start - place
        if marker == 0xDA:
            break
        place = start + 2
        segments += 1
        _check(segments, JPEG_SEGMENTS, "JPEG", "segments")
        if marker == 0xD9:
            return None
        if marker not in _ALONE:
            if marker in _FRAME_HEADERS:
                height, width = struct.unpack_from(">HH", content, start + 5)
                size = width, height
                components = content[start + 9] if marker in _SEQUENTIAL else 0
            place += struct.unpack_from(">H", content, place)[0]
    scans = 1 if components and content[start + 4] == components else _jpeg_scans(content, start, segments)
    return None if size is None else Outline(*size, passes=scans)


def _jpeg_scans(content: bytes, start: int, segments: int) -> int:
    # In coded pixels a scan's first two bytes cannot stand, so few of them are proof; more may be in an embedded image.
    most = content.count(b"\xff\xda", start)
    if most <= JPEG_SCANS:
        return most
    scans, place = 0, start
    while found := _AFTER_SCAN.search(content, place):
        marker, place = content[found.start() + 1], found.end()
        if marker == 0xD9:
            break
        scans += marker == 0xDA
        segments += marker != 0xDA
        _check(scans, JPEG_SCANS, "JPEG", "scans")
        _check(segments, JPEG_SEGMENTS, "JPEG", "segments")
        if marker not in _ALONE:
            place += struct.unpack_from(">H", content, place)[0]
    return scans


# ── PNG, GIF, WebP, BMP ──


def _png(content: bytes) -> Outline:
    width, height = struct.unpack_from(">II", content, 16)
    most = PNG_CHUNKS + len(content) // PNG_CHUNK
    place, chunks = 8, 0
    while place + 8 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        if kind == b"acTL" and length >= 4:
            _check(struct.unpack_from(">I", content, place + 8)[0], FRAMES, "PNG", "frames")
        chunks += 1
        _check(chunks, most, "PNG", "chunks")
        place += 12 + length
    return Outline(width, height)


def _gif(content: bytes) -> Outline:
    width, height, flags = struct.unpack_from("<HHB", content, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    blocks = 0
    while (begin := content[place]) not in b",;":  # the first frame, or the end
        place += 1
        blocks += 1  # also stray bytes, which Pillow reads one by one
        if begin == 0x21:  # an extension: its kind, then blocks of up to 255 bytes and an empty one
            place += 1
            while length := content[place]:
                place += 1 + length
                blocks += 1
                _check(blocks, GIF_BLOCKS, "GIF", "blocks before its first frame")
            place += 1
        _check(blocks, GIF_BLOCKS, "GIF", "blocks before its first frame")
    return Outline(width, height)


def _webp(content: bytes) -> Outline | None:
    if content[8:12] != b"WEBP":
        return None
    place, frames = 12, 0
    while place + 8 <= len(content):
        kind, length = struct.unpack_from("<4sI", content, place)
        frames += 1
        _check(frames, FRAMES, "WebP", "frames")
        place += 8 + length + length % 2
    kind = content[12:16]
    if kind == b"VP8X":
        wide, tall = (int.from_bytes(content[at : at + 3], "little") + 1 for at in (24, 27))
        return Outline(wide, tall)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        return Outline((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    wide, tall = struct.unpack_from("<HH", content, 26)
    return Outline(wide & 0x3FFF, tall & 0x3FFF)


def _bmp(content: bytes) -> Outline:
    width, height = struct.unpack_from("<HH" if content[14] == 12 else "<ii", content, 18)
    return Outline(abs(width), abs(height))


# ── TIFF and JPEG 2000 ──

_WIDTH, _HEIGHT, _COMPRESSION, _STRIPS, _TILE_WIDTH, _TILE_HEIGHT, _TILE_PLACES = 256, 257, 259, 273, 322, 323, 324
_JPEG_IN_TIFF = (6, 7)
BY_CHANCE = 2**15
"""In so many bytes of noise, half of the times, there are two that look like the start of a scan."""
_NUMBERS = {1: "B", 3: "H", 4: "I", 16: "Q"}


class _Page(NamedTuple):
    """A page of a TIFF."""

    outline: Outline
    tags: int
    tiles: int
    compression: int
    after: int
    """Where the next page begins."""


def _tiff(content: bytes) -> Outline | None:
    order = "<" if content[:2] == b"II" else ">"
    big = struct.unpack_from(f"{order}H", content, 2)[0] == 43
    (place,) = struct.unpack_from(f"{order}Q" if big else f"{order}I", content, 8 if big else 4)
    pages: list[_Page] = []
    seen: set[int] = set()
    tags = 0
    while place and place not in seen and place < len(content):
        seen.add(place)
        _check(len(seen), TIFF_PAGES, "TIFF", "pages")
        pages.append(_tiff_page(content, place, order, TIFF_TAGS - tags, big=big))
        tags, place = tags + pages[-1].tags, pages[-1].after
    _check_tiff_scans(content, pages)
    return pages[0].outline if pages else None


def _tiff_page(content: bytes, place: int, order: str, most_tags: int, *, big: bool) -> _Page:
    count_format, tag_format, size = ("Q", "HHQ", 20) if big else ("H", "HHI", 12)
    (count,) = struct.unpack_from(order + count_format, content, place)
    place += struct.calcsize(count_format)
    _check(count, most_tags, "TIFF", "tags", limit=TIFF_TAGS)
    found: dict[int, int] = {}
    tiles = 1
    for entry in range(place, place + count * size, size):
        tag, kind, values = struct.unpack_from(order + tag_format, content, entry)
        if tag in (_STRIPS, _TILE_PLACES):
            tiles = values
        elif kind in _NUMBERS and values == 1:
            (found[tag],) = struct.unpack_from(order + _NUMBERS[kind], content, entry + size - (8 if big else 4))
    _check(tiles, TILES, "TIFF", "tiles")
    _check(found.get(_TILE_WIDTH, 0) * found.get(_TILE_HEIGHT, 0), TILE_PIXELS, "TIFF", "pixels in one tile")
    (after,) = struct.unpack_from(f"{order}Q" if big else f"{order}I", content, place + count * size)
    whole = Outline(found.get(_WIDTH, 0), found.get(_HEIGHT, 0))
    return _Page(whole, count, tiles, found.get(_COMPRESSION, 1), after)


def _check_tiff_scans(content: bytes, pages: Sequence[_Page]) -> None:
    packed = [page.compression in _JPEG_IN_TIFF for page in pages]
    if not any(packed):
        return
    most = JPEG_SCANS + sum(page.tiles for page in pages)  # every tile is a JPEG of one scan
    if not all(packed):  # in pixels that are packed otherwise, or not at all, anything may look like a scan
        most += len(content) // BY_CHANCE
    _check(content.count(b"\xff\xda"), most, "TIFF", "scans")


def _jpeg_2000(content: bytes) -> Outline | None:
    start = content.find(b"\xff\x4f\xff\x51", 0, 65_536)
    if start != 0 and not (start > 0 and content[4:8] == b"jP  "):
        return None
    right, bottom, left, top, tile_wide, tile_tall = struct.unpack_from(">IIIIII", content, start + 8)
    tiles = -(-right // max(1, tile_wide)) * -(-bottom // max(1, tile_tall))
    _check(tiles, TILES, "JPEG 2000", "tiles")
    return Outline(max(0, right - left), max(0, bottom - top))


def _check(found: int, most: int, kind: str, what: str, limit: int | None = None) -> None:
    """Refuse more than `most`, which is what is left of the `limit` that the message names."""
    if found > most:
        raise DataError(
            f"a {kind} of more than {most if limit is None else limit:,} {what}, which would take very long to decode; "
            f"save it again with another program"
        )


_READERS: dict[bytes, Callable[[bytes], Outline | None]] = {
    b"\xff\xd8\xff": _jpeg,
    b"\x89PNG\r\n\x1a\n": _png,
    b"GIF8": _gif,
    b"RIFF": _webp,
    b"BM": _bmp,
    b"II*\0": _tiff,
    b"MM\0*": _tiff,
    b"II+\0": _tiff,
    b"MM\0+": _tiff,
}
