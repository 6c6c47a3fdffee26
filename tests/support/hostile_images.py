"""Small image files that keep a decoder busy, built by hand."""

import io
import struct
import zlib

from PIL import Image


def jpeg_of_scans(scans: int, side: int = 7000, *, progressive: bool = True) -> bytes:
    """Write a JPEG with empty scans, each of which visits the whole image."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG", progressive=True, subsampling=0)
    small = file.getvalue()
    header = bytearray(small[: small.index(b"\xff\xda")])
    frame = header.index(b"\xff\xc2")
    header[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
    if not progressive:  # one scan per component, so that the decoder waits for all
        header[frame + 1] = 0xC0
        return bytes(header) + (b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + bytes(80)) * scans + b"\xff\xd9"
    first = b"\xff\xda\x00\x0c\x03\x01\x00\x02\x00\x03\x00\x00\x00\x01" + bytes(80)
    # Every further scan declares to refine the lowest coefficient of all blocks by one bit.
    again = b"\xff\xda\x00\x0c\x03\x01\x00\x02\x00\x03\x00\x00\x00\x10" + bytes(80)
    return bytes(header) + first + again * (scans - 1) + b"\xff\xd9"


def jpeg_of_hidden_scans(scans: int, side: int = 7000) -> bytes:
    """Write a JPEG whose scans lie behind a marker that means nothing, as if they were its content."""
    whole = jpeg_of_scans(scans, side)
    first = whole.index(b"\xff\xda")
    second = whole.index(b"\xff\xda", first + 2)
    restarts = _segment(0xDD, b"\0\1")
    return whole[:first] + restarts + whole[first:second] + b"\xff\x02\xff\xff" + whole[second:]


def png_chunk(kind: bytes, data: bytes = b"") -> bytes:
    """Return one chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_zeros(side: int, before: bytes = b"") -> bytes:
    """Write a black 1-bit PNG of a few kilobytes, with other chunks before its pixels."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(side * 3 + 1)) for _ in range(side)) + packer.flush()
    parts = png_chunk(b"IHDR", head), before, png_chunk(b"IDAT", rows), png_chunk(b"IEND")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff_of_pages(pages: int) -> bytes:
    """Write a TIFF with one pixel per page."""
    tags = ((256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, 1), (279, 1))
    start, size = 16, 2 + 12 * len(tags) + 4
    made = b"II*\0" + struct.pack("<I", start) + bytes(8)
    for page in range(pages):
        after = start + size * (page + 1) if page + 1 < pages else 0
        made += struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        made += struct.pack("<I", after)
    return made


def tiff_of_tags(pages: int, tags: int) -> bytes:
    """Write a TIFF whose pages have many tags, all of which declare JPEG compression."""
    size = 2 + 12 * tags + 4
    made = b"II*\0" + struct.pack("<I", 8)
    for page in range(pages):
        after = 8 + size * (page + 1) if page + 1 < pages else 0
        made += struct.pack("<H", tags) + struct.pack("<HHII", 259, 3, 1, 7) * tags + struct.pack("<I", after)
    return made


def tiff_of_tiles(tiles: int, tile: int = 16) -> bytes:
    """Write the header of a TIFF that declares `tiles` tiles."""
    tags = ((256, 1, 64), (257, 1, 64), (322, 1, tile), (323, 1, tile), (324, tiles, 8), (325, tiles, 8))
    body = b"".join(struct.pack("<HHII", tag, 4, count, value) for tag, count, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + body + bytes(4)


def tiff_of_shared_tiles(tiles: int, tall: int, packed: bytes, compression: int = 8, wide: int = 16) -> bytes:
    """Write a TIFF with one row of tiles that share the same bytes and may be far taller than the image."""
    tags = [
        (256, 1, tiles * wide), (257, 1, 1), (258, 1, 8), (259, 1, compression), (262, 1, 1), (277, 1, 1),
        (322, 1, wide), (323, 1, tall),
    ]  # fmt: skip
    arrays = 8 + 2 + 12 * (len(tags) + 2) + 4
    tags += [(324, tiles, arrays), (325, tiles, arrays + 4 * tiles)]
    body = b"".join(struct.pack("<HHII", tag, 4, count, value) for tag, count, value in tags)
    places = struct.pack("<I", arrays + 8 * tiles) * tiles + struct.pack("<I", len(packed)) * tiles
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + body + bytes(4) + places + packed


def tiff_of_odd_tiles(tiles: int, tall: int, packed: bytes, odd: str) -> bytes:
    """Write the same with its directory at the end, and an oddity that libtiff puts up with."""
    tags = [
        (256, 4, 1, tiles * 16), (257, 4, 1, 1), (258, 4, 1, 8), (259, 4, 1, 8), (262, 4, 1, 1), (277, 4, 1, 1),
        (322, 4, 1, 16), (323, 9 if odd == "signed" else 4, 1, tall), *([(323, 4, 1, 16)] if odd == "twice" else []),
        (324, 4, tiles, 8), (325, 4, tiles, 8 + 4 * tiles),
    ]  # fmt: skip
    start = 8 + 8 * tiles
    places = struct.pack("<I", start) * tiles + struct.pack("<I", len(packed)) * tiles
    body = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return (
        b"II*\0" + struct.pack("<I", start + len(packed)) + places + packed + body + (b"" if odd == "cut" else bytes(4))
    )


def _segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def jpeg_of_refinements(scans: int, side: int, *, arithmetic: bool = False) -> bytes:
    """Write a grey JPEG whose scans visit every coefficient: in runs of 32,767 blocks, each a code of 15 bits.

    With arithmetic coding they hold nothing, but every block begins anew.
    """
    one_code = bytes([1]) + bytes(15)
    head = _segment(0xDB, b"\0" + b"\1" * 64)
    head += _segment(0xCA if arithmetic else 0xC2, struct.pack(">BHHBBBB", 8, side, side, 1, 1, 0x11, 0))
    head += _segment(0xC4, b"\0" + one_code + b"\0") + _segment(0xC4, b"\x10" + one_code + b"\xe0")
    if arithmetic:
        head += _segment(0xDD, struct.pack(">H", 1))
    first = _segment(0xDA, b"\1\1\0\0\0\0") + bytes(4)
    runs = "0" + "1" * 14
    blocks = (-(-side // 8)) ** 2
    bits = runs * -(-blocks // 32_767)
    bits += "1" * (-len(bits) % 8)
    coded = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    again = _segment(0xDA, b"\1\1\0\1\x3f\x10") + (bytes(4) if arithmetic else coded)
    return b"\xff\xd8" + head + first + again * (scans - 1) + b"\xff\xd9"


def bmp_of_runs(side: int, rows: bytes = b"\1\0\0\0") -> bytes:
    """Write a run-length encoded BMP with one pixel and an end marker per line."""
    body = rows * side
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(body), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(body), 0, 0, 1078) + head + bytes(1024) + body


def jpeg_2000_header(side: int, channels: int, layers: int = 1, block: int = 4, precincts: bytes = b"") -> bytes:
    """Return the main header of a JPEG 2000: code-blocks have sides of 2 to the power of `block` + 2."""
    size = struct.pack(">HIIIIIIIIH", 0, side, side, 0, 0, side, side, 0, 0, channels) + b"\7\1\1" * channels
    levels = max(0, len(precincts) - 1)
    coding = struct.pack(">BBHBBBBBB", bool(precincts), 0, layers, 0, levels, block, block, 0, 1) + precincts
    return b"\xff\x4f" + _segment(0x51, size) + _segment(0x52, coding)
