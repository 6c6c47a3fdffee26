"""Estimate the cost of decoding a TIFF: its pages, tags, tiles, and the scans of JPEG tiles."""

import itertools
import struct
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from vitrail.data.image_files import (
    JPEG_SCANS,
    JPEG_WORK,
    TIFF_PAGES,
    TIFF_SCANS,
    TIFF_TAGS,
    TILE_PIXELS,
    TILED_PIXELS,
    TILES,
    Outline,
    check_count,
)

_WIDTH, _HEIGHT, _COMPRESSION, _SAMPLES, _ROWS, _PLANAR, _TILE_WIDTH, _TILE_HEIGHT = (
    256, 257, 259, 277, 278, 284, 322, 323,
)  # fmt: skip
_PLACES, _SIZES = (273, 324), (279, 325)
"""Tags of the offsets and byte counts of strips and tiles."""
_JPEG_IN_TIFF = (6, 7)
_PLANAR_SEPARATE = 2
"""Each channel has tiles of its own."""
MOST_PLANES = 4
"""A tile has all channels of its pixels, or each channel has its own tile: the work is the same."""
BY_CHANCE = 2**15
"""In this many random bytes, two look like the start of a scan half of the time."""
_NUMBERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q", 17: "q", 18: "Q"}
"""The integer types that libtiff accepts for a size."""


class _Array(NamedTuple):
    """The values of a tag."""

    order: str
    kind: str
    length: int
    place: int

    def read(self, content: bytes, most: int) -> tuple[int, ...]:
        return struct.unpack_from(f"{self.order}{min(most, self.length)}{self.kind}", content, self.place)


class _Page(NamedTuple):
    """A page of a TIFF."""

    outline: Outline
    tags: int
    tiles: int
    """Number of tiles listed."""
    used: int
    """Number of tiles a decoder reads for its size."""
    tile: int
    """Pixels per tile."""
    compression: int
    arrays: dict[int, _Array]
    after: int
    """Offset of the next page."""


def tiff_outline(content: bytes) -> Outline | None:
    """Read the structure of a TIFF; its first page is the image."""
    order = "<" if content[:2] == b"II" else ">"
    big = struct.unpack_from(f"{order}H", content, 2)[0] == 43
    (place,) = struct.unpack_from(f"{order}Q" if big else f"{order}I", content, 8 if big else 4)
    pages: list[_Page] = []
    seen: set[int] = set()
    tags = 0
    while place and place not in seen and place < len(content):
        seen.add(place)
        check_count(len(seen), TIFF_PAGES, "TIFF", "pages")
        try:
            pages.append(_page(content, place, order, TIFF_TAGS - tags, big=big))
        except struct.error:  # truncated; the pages before this one are intact
            break
        tags, place = tags + pages[-1].tags, pages[-1].after
    _check_scans(content, pages)
    return pages[0].outline if pages else None


def _page(content: bytes, place: int, order: str, most_tags: int, *, big: bool) -> _Page:
    count_format, tag_format, size = ("Q", "HHQ", 20) if big else ("H", "HHI", 12)
    (count,) = struct.unpack_from(order + count_format, content, place)
    place += struct.calcsize(count_format)
    check_count(count, most_tags, "TIFF", "tags", limit=TIFF_TAGS)
    tags: dict[int, int] = {}
    arrays: dict[int, _Array] = {}
    for entry in range(place, place + count * size, size):
        tag, kind, values = struct.unpack_from(order + tag_format, content, entry)
        value = entry + size - (8 if big else 4)
        if tag in (*_PLACES, *_SIZES):
            number = _NUMBERS.get(kind, "I")
            if values * struct.calcsize(order + number) > (8 if big else 4):  # too long to be stored inline
                (value,) = struct.unpack_from(f"{order}Q" if big else f"{order}I", content, value)
            arrays.setdefault(tag, _Array(order, number, values, value))
        elif kind in _NUMBERS and values == 1:  # of a duplicate tag, libtiff takes the first
            tags.setdefault(tag, struct.unpack_from(order + _NUMBERS[kind], content, value)[0])
    next_place, next_format = place + count * size, f"{order}Q" if big else f"{order}I"
    ends_here = next_place + struct.calcsize(next_format) > len(content)  # decoders tolerate that
    after = 0 if ends_here else struct.unpack_from(next_format, content, next_place)[0]
    tiles = max((arrays[tag].length for tag in _PLACES if tag in arrays), default=1)
    outline = Outline(tags.get(_WIDTH, 0), tags.get(_HEIGHT, 0))
    planes = tags.get(_SAMPLES, 1) if tags.get(_PLANAR) == _PLANAR_SEPARATE else 1
    used, tile = _tiling(tags, outline, planes)
    check_count(max(tiles, used), TILES, "TIFF", "tiles")
    check_count(tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_HEIGHT, 0), TILE_PIXELS, "TIFF", "pixels in one tile")
    if _TILE_WIDTH in tags:
        check_count(used * tile, TILED_PIXELS * min(planes, MOST_PLANES), "TIFF", "pixels in its tiles")
    return _Page(outline, count, tiles, used, tile, tags.get(_COMPRESSION, 1), arrays, after)


def _tiling(tags: dict[int, int], outline: Outline, planes: int) -> tuple[int, int]:
    """Return how many tiles or strips a decoder reads, and how many pixels each has."""
    if _TILE_WIDTH in tags:
        wide, tall = max(1, tags[_TILE_WIDTH]), max(1, tags.get(_TILE_HEIGHT, 1))
    else:
        wide, tall = max(1, outline.width), max(1, min(tags.get(_ROWS, outline.height), outline.height))
    return -(-outline.width // wide) * -(-outline.height // tall) * planes, wide * tall


# ── JPEG tiles ──


def _check_scans(content: bytes, pages: Sequence[_Page]) -> None:
    packed = [page.compression in _JPEG_IN_TIFF for page in pages]
    if not any(packed):
        return
    most = JPEG_SCANS + sum(page.tiles for page in pages)  # every tile is a JPEG with one scan
    if not all(packed):  # in other encodings, any bytes may look like a scan
        most += len(content) // BY_CHANCE
    scans = content.count(b"\xff\xda")
    check_count(scans, most, "TIFF", "scans")
    for page in pages:
        if page.compression in _JPEG_IN_TIFF and page.used * page.tile * min(scans, TIFF_SCANS) > JPEG_WORK:
            _check_work(content, page, scans)


def _check_work(content: bytes, page: _Page, scans: int) -> None:
    """Count the scans of a page; if its tiles share some of their bytes, each may have all of the scans."""
    spans = _spans(content, page)
    if spans:
        counts = {span: min(content.count(b"\xff\xda", span[0], sum(span)), TIFF_SCANS) for span in spans}
        work = max(sum(counts[span] * times for span, times in spans.items()), page.used) * page.tile
    else:
        work = page.used * page.tile * min(scans, TIFF_SCANS)
    check_count(work, JPEG_WORK, "TIFF", "pixels times scans")


def _spans(content: bytes, page: _Page) -> Counter[tuple[int, int]]:
    """Count the tiles by offset and length of their bytes; empty if these are missing, guessed or overlapping."""
    try:
        places, sizes = (
            [page.arrays[tag].read(content, page.used) for tag in tags if tag in page.arrays]
            for tags in (_PLACES, _SIZES)
        )
    except struct.error:
        return Counter()
    if (len(places), len(sizes)) != (1, 1):
        return Counter()
    spans = Counter(zip(places[0], sizes[0], strict=False))  # tiles of one colour may share their bytes
    apart = all(start + size <= after for (start, size), (after, _) in itertools.pairwise(sorted(spans)))
    guessed = any(start and not size for start, size in spans)  # by libtiff, if the size is missing
    return spans if apart and not guessed else Counter()
