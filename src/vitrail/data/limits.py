"""How much work an image file may ask a decoder for, in counts that its headers tell.

Decoders here are not interrupted, so these counts are what bounds the time of `check`, `predict` and training. The
slowest files that pass were built by hand and timed; docs/guides/data.md has the seconds.
"""

from typing import NamedTuple

from vitrail.errors import DataError

PIXEL_LIMIT = 178_956_970
"""Most pixels of an image: half a gigabyte as RGB. A small file can claim any size, so this is checked first."""
JPEG_SCANS = 100
"""Most scans of a JPEG. Encoders write about 10, and the finest script of mozjpeg 20."""
JPEG_WORK = 2**31
"""Most pixels times scans of a JPEG: the largest image that is taken, with 12 scans. A scan of 250 bytes can make a
decoder look at every coefficient of 179 million pixels."""
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
BMP_RUN_PIXELS = 2**22
"""Most pixels of a run-length encoded BMP, which Pillow decodes in Python."""
PLAIN_BYTES = 8_000_000
"""Most bytes of a PBM, PGM or PPM whose numbers are text, which Pillow reads in Python."""
TIFF_PAGES, TIFF_TAGS = 1000, 65_536
"""Most pages of a TIFF, which may be channels, and most tags of all pages; a page has about 20."""
TILES = 100_000
"""Most tiles or strips of a page: 100,000 × 64 × 64 pixels are twice the largest image that is taken."""
TILE_PIXELS = 2**26
"""Most pixels of one tile, for which libtiff makes room whatever the image's own size is."""
TILED_PIXELS = 2**28
"""Most pixels of all tiles of a page: tiles may be far larger than the image, and share the same bytes."""
TIFF_SCANS = 100
"""Where libtiff itself stops to read the scans of a tile."""
J2K_SAMPLES = 2**27
"""Most pixels times channels of a JPEG 2000, which takes ten times as long to decode as others; a satellite's tile of
10,980×10,980 pixels has fewer."""
J2K_PACKETS, J2K_BLOCKS = 2**22, 2**18
"""Most packets (layers times precincts) and code-blocks of a JPEG 2000; encoders make blocks of 32×32 or 64×64."""
J2K_BOXES = 4096
"""Most boxes before the image of a JP2 file, which has about 5."""


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


def check_count(found: int, most: int, kind: str, what: str, limit: int | None = None) -> None:
    """Refuse more than `most`, which is what is left of the `limit` that the message names."""
    if found > most:
        raise DataError(
            f"a {kind} of more than {most if limit is None else limit:,} {what}, which would take very long to decode; "
            f"save it again with another program, or in another format"
        )
