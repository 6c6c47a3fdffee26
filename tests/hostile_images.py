"""Image files that are small and keep a decoder busy, made by hand."""

import io
import struct
import zlib

from PIL import Image


def jpeg_of_scans(scans: int, side: int = 7000, *, progressive: bool = True) -> bytes:
    """Write a JPEG whose scans hold nothing, each of which walks over the whole image."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG", progressive=True, subsampling=0)
    small = file.getvalue()
    header = bytearray(small[: small.index(b"\xff\xda")])
    frame = header.index(b"\xff\xc2")
    header[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
    if not progressive:  # with a scan for each component, so that all are waited for
        header[frame + 1] = 0xC0
        return bytes(header) + (b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + bytes(80)) * scans + b"\xff\xd9"
    first = b"\xff\xda\x00\x0c\x03\x01\x00\x02\x00\x03\x00\x00\x00\x01" + bytes(80)
    # Every further scan claims to refine the lowest coefficient of all blocks by one bit.
    again = b"\xff\xda\x00\x0c\x03\x01\x00\x02\x00\x03\x00\x00\x00\x10" + bytes(80)
    return bytes(header) + first + again * (scans - 1) + b"\xff\xd9"


def png_chunk(kind: bytes, data: bytes = b"") -> bytes:
    """Write one chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_zeros(side: int, before: bytes = b"") -> bytes:
    """Write a black PNG of 1 bit a pixel and a few kilobytes, with other chunks before its pixels."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(side * 3 + 1)) for _ in range(side)) + packer.flush()
    parts = png_chunk(b"IHDR", head), before, png_chunk(b"IDAT", rows), png_chunk(b"IEND")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff_of_pages(pages: int) -> bytes:
    """Write a TIFF of one pixel a page."""
    tags = ((256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, 1), (279, 1))
    start, size = 16, 2 + 12 * len(tags) + 4
    made = b"II*\0" + struct.pack("<I", start) + bytes(8)
    for page in range(pages):
        after = start + size * (page + 1) if page + 1 < pages else 0
        made += struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        made += struct.pack("<I", after)
    return made


def tiff_of_tags(pages: int, tags: int) -> bytes:
    """Write a TIFF whose pages have many tags, all of which say that it is packed as JPEG."""
    size = 2 + 12 * tags + 4
    made = b"II*\0" + struct.pack("<I", 8)
    for page in range(pages):
        after = 8 + size * (page + 1) if page + 1 < pages else 0
        made += struct.pack("<H", tags) + struct.pack("<HHII", 259, 3, 1, 7) * tags + struct.pack("<I", after)
    return made


def tiff_of_tiles(tiles: int, tile: int = 16) -> bytes:
    """Write the header of a TIFF that claims so many tiles."""
    tags = ((256, 1, 64), (257, 1, 64), (322, 1, tile), (323, 1, tile), (324, tiles, 8), (325, tiles, 8))
    body = b"".join(struct.pack("<HHII", tag, 4, count, value) for tag, count, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + body + bytes(4)
