"""Detect image types by file signature, and which optional packages some of them need."""

import importlib
import os
import stat
from functools import cache

from PIL import features

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
