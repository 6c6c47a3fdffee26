"""Estimate the cost of decoding a file from its structure: scans, segments, chunks, frames, pages, tiles.

A small file can cause hours of work within every limit of bytes and pixels: a progressive JPEG of 471 kB can have
5,000 empty scans, each of which visits the whole image. Only headers are read here, at the speed of `bytes.find`.
"""

import re
import struct
from collections.abc import Callable, Iterator

from vitrail.data.image_files import (
    BMP_RUN_PIXELS,
    FRAMES,
    GIF_BLOCKS,
    J2K_BLOCKS,
    J2K_BOXES,
    J2K_PACKETS,
    J2K_SAMPLES,
    JPEG_SCANS,
    JPEG_SEGMENTS,
    JPEG_STRAY,
    JPEG_WORK,
    PIXEL_LIMIT,
    PLAIN_BYTES,
    PNG_CHUNK,
    PNG_CHUNKS,
    TILES,
    Outline,
    check_count,
)
from vitrail.data.tiff_structure import tiff_outline
from vitrail.errors import DataError

_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.DOTALL)
_ALONE = frozenset((0x01, *range(0xD0, 0xDA)))
"""Markers without a length: restarts, start and end of the image."""
_FIRST_SEGMENT = 0xC0
"""Lower markers have no meaning and no length; after one, libjpeg looks for the next marker."""
_FRAME_HEADERS = frozenset((*range(0xC0, 0xD0),)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL = (0xC0, 0xC1)
_BMP_RUNS, _BMP_HEADER = (1, 2), 65_536
_J2K_MARKERS = frozenset(bytes.fromhex("50515253555758595c5d5e5f6061636474757778909193d9"))
"""The markers that OpenJPEG knows. After any other it looks for one of these, whatever length it claims."""


def outline(content: bytes) -> Outline | None:
    """Read the structure of an image file; raise `DataError` if it would take absurdly long to decode.

    None for other formats and corrupt headers: those are left to the decoder.
    """
    try:
        for start, read in _READERS.items():
            if content.startswith(start):
                return read(content)
        return _jpeg_2000(content)
    except (struct.error, IndexError):  # truncated
        return None


# ── JPEG ──


def _jpeg(content: bytes) -> Outline | None:
    place, segments, stray, size = 2, 0, 0, None
    components = 0  # of a sequential image: if the first scan has all of them, it is the only one
    while True:
        match = _MARKER.search(content, place, place + JPEG_STRAY - stray + 2)
        if match is None:
            if len(content) > place + JPEG_STRAY - stray:
                raise DataError(f"a JPEG with more than {JPEG_STRAY:,} bytes between its segments; it is corrupt")
            return None
        start, marker = match.start(), content[match.start() + 1]
        stray += start - place
        if marker == 0xDA:
            break
        place = start + 2
        segments += 1
        check_count(segments, JPEG_SEGMENTS, "JPEG", "segments")
        if marker == 0xD9:
            return None
        if marker not in _ALONE:
            if marker in _FRAME_HEADERS:
                height, width = struct.unpack_from(">HH", content, start + 5)
                size = width, height
                components = content[start + 9] if marker in _SEQUENTIAL else 0
            place += struct.unpack_from(">H", content, place)[0]
    scans = 1 if components and content[start + 4] == components else _jpeg_scans(content, start, segments)
    if size is None:
        return None
    outline = Outline(*size, passes=scans)
    if outline.width * outline.height <= PIXEL_LIMIT:  # larger ones are rejected for their size
        check_count(outline.work, JPEG_WORK, "JPEG", "pixels times scans")
    return outline


def _jpeg_scans(content: bytes, start: int, segments: int) -> int:
    # The first two bytes of a scan never occur in coded pixels, so if they are rare, there are few scans. What a phone
    # appends to an image (a video, a gain map) may contain more of them.
    most = content.count(b"\xff\xda", start)
    if most <= JPEG_WORK // PIXEL_LIMIT:
        return most
    scans, place = 0, start
    while match := _AFTER_SCAN.search(content, place):
        marker, place = content[match.start() + 1], match.end()
        if marker == 0xD9:
            break
        scans += marker == 0xDA
        segments += marker != 0xDA
        check_count(scans, JPEG_SCANS, "JPEG", "scans")
        check_count(segments, JPEG_SEGMENTS, "JPEG", "segments")
        if marker >= _FIRST_SEGMENT and marker not in _ALONE:
            if place + 2 > len(content):  # truncated here; the scans before are intact
                break
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
            check_count(struct.unpack_from(">I", content, place + 8)[0], FRAMES, "PNG", "frames")
        chunks += 1
        check_count(chunks, most, "PNG", "chunks")
        place += 12 + length
    return Outline(width, height)


def _gif(content: bytes) -> Outline:
    width, height, flags = struct.unpack_from("<HHB", content, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    blocks = 0
    while (begin := content[place]) not in b",;":  # the first frame, or the end of the file
        place += 1
        blocks += 1  # also stray bytes, which Pillow reads one by one
        if begin == 0x21:  # an extension: its label, then blocks of up to 255 bytes and an empty one
            place += 1
            while length := content[place]:
                place += 1 + length
                blocks += 1
                check_count(blocks, GIF_BLOCKS, "GIF", "blocks before its first frame")
            place += 1
        check_count(blocks, GIF_BLOCKS, "GIF", "blocks before its first frame")
    return Outline(width, height)


def _webp(content: bytes) -> Outline | None:
    if content[8:12] != b"WEBP":
        return None
    place, frames = 12, 0
    while place + 8 <= len(content):
        kind, length = struct.unpack_from("<4sI", content, place)
        frames += 1
        check_count(frames, FRAMES, "WebP", "frames")
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
    outline = Outline(abs(width), abs(height))
    if content[14] >= 40 and struct.unpack_from("<I", content, 30)[0] in _BMP_RUNS:
        check_count(outline.work, BMP_RUN_PIXELS, "BMP", "run-length encoded pixels")
        check_count(len(content), 2 * outline.work + _BMP_HEADER, "BMP", f"bytes for {outline.work:,} pixels")
    return outline


def _plain(content: bytes) -> None:
    if content[2:3].isspace():  # other files start with these letters, too
        check_count(len(content), PLAIN_BYTES, "PNM", "bytes of text")


# ── JPEG 2000 ──


def _jpeg_2000(content: bytes) -> Outline | None:
    start = 0 if content.startswith(b"\xff\x4f\xff\x51") else _j2k_codestream(content)
    if start is None:
        return None
    right, bottom, left, top, tile_wide, tile_tall = struct.unpack_from(">IIIIII", content, start + 8)
    (channels,) = struct.unpack_from(">H", content, start + 40)
    tiles = -(-right // max(1, tile_wide)) * -(-bottom // max(1, tile_tall))
    check_count(tiles, TILES, "JPEG 2000", "tiles")
    outline = Outline(max(0, right - left), max(0, bottom - top))
    if outline.work <= PIXEL_LIMIT:
        check_count(outline.work * channels, J2K_SAMPLES, "JPEG 2000", "pixels times channels")
        layers = 1
        for marker, place in _j2k_segments(content, start + 2):
            if marker == 0x52:  # coding of all channels; then of one channel, if it differs
                layers = max(layers, struct.unpack_from(">H", content, place + 4)[0])
                _check_j2k_coding(content, place + 7, content[place + 2], outline, (channels, layers, tiles))
            elif marker == 0x53:
                place += 2 if channels < 257 else 3
                _check_j2k_coding(content, place + 2, content[place + 1], outline, (channels, layers, tiles))
    return outline


def _j2k_codestream(content: bytes) -> int | None:
    """Return where in the boxes of a JP2 file the image itself begins."""
    place, boxes = 0, 0
    while content[4:8] == b"jP  " and place + 8 <= len(content):
        size, kind = struct.unpack_from(">I4s", content, place)
        head = 16 if size == 1 else 8
        if kind == b"jp2c":
            return place + head
        boxes += 1
        check_count(boxes, J2K_BOXES, "JPEG 2000", "boxes before the image")
        place += max(head, struct.unpack_from(">Q", content, place + 8)[0] if size == 1 else size)
    return None


def _j2k_segments(content: bytes, place: int) -> Iterator[tuple[int, int]]:
    """Yield the markers of the main and tile headers, and the offset of each segment's length."""
    after = None  # offset of the next tile
    tile_parts = 0
    while place + 4 <= len(content) and content[place] == 0xFF:
        marker = content[place + 1]
        if marker not in _J2K_MARKERS:
            raise DataError(f"a JPEG 2000 with an unknown marker, FF{marker:02X}; save it again as PNG or JPEG")
        if marker == 0x90:
            tile_parts += 1
            check_count(tile_parts, TILES, "JPEG 2000", "tile-parts")
            (size,) = struct.unpack_from(">I", content, place + 6)
            after = place + max(size, 12) if size else None
        if marker == 0x93:  # the coded pixels of a tile
            if after is None:
                return
            place = after
            continue
        yield marker, place + 2
        place += 2 + struct.unpack_from(">H", content, place + 2)[0]


def _check_j2k_coding(content: bytes, place: int, style: int, outline: Outline, times: tuple[int, int, int]) -> None:
    channels, layers, tiles = times
    levels, wide, tall = struct.unpack_from("BBB", content, place)
    check_count(channels * outline.work >> (wide & 15) + (tall & 15) + 4, J2K_BLOCKS, "JPEG 2000", "code-blocks")
    packets = 0
    for level in range(min(levels, 32) + 1):
        size = content[place + 5 + level] if style & 1 else 0xFF
        shrunk = min(levels, 32) - level
        across, down = outline.width >> shrunk + (size & 15), outline.height >> shrunk + (size >> 4)
        packets += max(tiles, (across + 1) * (down + 1))
    check_count(packets * channels * layers, J2K_PACKETS, "JPEG 2000", "packets")


_READERS: dict[bytes, Callable[[bytes], Outline | None]] = {
    b"\xff\xd8\xff": _jpeg,
    b"\x89PNG\r\n\x1a\n": _png,
    b"GIF8": _gif,
    b"RIFF": _webp,
    b"BM": _bmp,
    b"P1": _plain,
    b"P2": _plain,
    b"P3": _plain,
    b"II*\0": tiff_outline,
    b"MM\0*": tiff_outline,
    b"II+\0": tiff_outline,
    b"MM\0+": tiff_outline,
}
