"""What kind of image a file is, by how it begins; and what reads the kinds that Pillow alone does not."""

import importlib
import os
import stat
from functools import cache

from PIL import features

HEAD = 64
"""So many bytes tell the kind of a file."""
ENDINGS = {
    "JPEG": "jpg", "PNG": "png", "GIF": "gif", "WebP": "webp", "BMP": "bmp", "TIFF": "tif", "NumPy": "npy",
    "HEIC": "heic", "AVIF": "avif",
}  # fmt: skip
"""What the names of files of each kind should end with."""
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
    """Return the kind of image that a file is by its first bytes, or None."""
    for start, kind in _STARTS.items():
        if content.startswith(start):
            return kind
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WebP"
    if content[:2] == b"BM" and content[6:10] == b"\0\0\0\0":  # two letters alone begin many a text
        return "BMP"
    if content[4:8] == b"ftyp":
        # The brands: the first says what the file is, the others what it can be read as.
        length = int.from_bytes(content[:4], "big")
        brands = {content[8:12], *(content[at : at + 4] for at in range(16, min(length, len(content)), 4))}
        return "AVIF" if brands & _AVIF else "HEIC" if brands & _HEIC else None
    return None


def sniff_file(path: bytes, start: int = 0, size: int = HEAD) -> str | None:
    """Return the kind of image that a file is, or what lies in it from `start` on; None where it cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading from a pipe might never end
            return None
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            return sniff(file.read(min(size, HEAD)))
    except OSError:
        return None


@cache
def reads_heic() -> bool:
    """Make Pillow read HEIC where pillow-heif is installed; return whether it does."""
    try:
        importlib.import_module("pillow_heif").register_heif_opener()
    except ImportError:
        return False
    return True


def why_not_read(kind: str) -> str | None:
    """Say what is missing to read a kind of image here; None where nothing is."""
    if kind == "HEIC" and not reads_heic():
        return "a HEIC image, which needs pillow-heif to be read: pip install 'vitrail[heif]'"
    if kind == "AVIF" and not features.check("avif"):
        return "an AVIF image, which this Pillow does not read: pip install 'pillow>=11.3'"
    return None
