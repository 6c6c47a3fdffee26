"""Decode image files to pixels: uint8, (height, width, channels), upright, with the channels a model takes.

`open_image` reads only the header, so that a training pipeline can choose a crop before decoding; a JPEG is then
decoded at the smallest scale that still covers the crop.
"""

import contextlib
import io
import math
from typing import Protocol

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError, features

from vitrail.data.image_files import (
    HEAD,
    PIXEL_LIMIT,
    quiet,
    reads_heic,
    seen_size,
    sniff,
    turn_of,
    turn_of_jpeg,
    turned,
    why_not_read,
)
from vitrail.data.sources.source import Pixels
from vitrail.data.structure import outline
from vitrail.errors import DataError

BACKGROUND = 255
"""Background for transparent pixels: white."""
SLOW_SCALE = 5
"""JPEGs are decoded at 1/8 … 5/8 of their size, or in full: the scales in between take longer than a full decode."""


FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "JPEG2000", "PPM", "TGA", "PCX", "SUN", "EPS")
"""Formats that Pillow may open, besides HEIC and AVIF. Others are rare, and some are decoded in pure Python."""


LOSSY = ("JPEG", "JPEG2000", "WEBP", "AVIF", "HEIF")
"""Formats that usually change the values of pixels."""


class TooManyPixels(DataError):  # noqa: N818 - named for what is wrong
    """An image exceeds the pixel limit."""


class LazyImage(Protocol):
    """An image whose size is known and whose pixels are decoded on demand."""

    height: int
    width: int

    def pixels(self, channels: int, *, scale: float = 1.0) -> Pixels:
        """Decode: uint8, (height, width, channels).

        With a `scale` below 1 the result may be smaller, but each side is at least that fraction of the original.
        """


def open_image(stored: bytes | Pixels | Image.Image) -> LazyImage:
    """Read the header of an image file; pixels and open Pillow images are used as they are."""
    if isinstance(stored, np.ndarray):
        return _Array(stored)
    if isinstance(stored, Image.Image):
        return _Opened(stored)
    if not stored:
        raise DataError("the file is empty")
    outline(stored)  # raises for files that would take very long, before any decoder runs
    if stored[:3] == b"\xff\xd8\xff":
        with contextlib.suppress(ValueError):  # Pillow decides about files that libjpeg-turbo rejects
            return Jpeg(stored)
    if stored[:6] == b"\x93NUMPY":
        return _Array(_numpy(stored))
    return _Other(stored)


def decode(stored: bytes | Pixels, channels: int = 3) -> Pixels:
    """Decode a whole image: uint8, (height, width, channels)."""
    return open_image(stored).pixels(channels)


def decode_values(stored: bytes | Pixels) -> Pixels:
    """Decode an image with one channel without changing its values: (height, width), upright; a palette's indices."""
    image = open_image(stored)
    if isinstance(image, _Array | _Opened):
        return image.values()
    raise DataError("it is a JPEG, which changes the values of pixels; save it as PNG")


def extent(original: int, decoded: int) -> float:
    """Return the length of the original side in decoded pixels.

    A JPEG at k/8 of its size is rounded up to whole pixels, the last of which is only partially covered.
    """
    eighths = round(8 * decoded / original)
    return original * eighths / 8 if -(-original * eighths // 8) == decoded else float(decoded)


class _Array:
    """Pixels that do not need decoding."""

    def __init__(self, array: Pixels) -> None:
        if array.ndim not in (2, 3) or array.size == 0:
            raise DataError(f"an array of shape {array.shape} is not an image; use (height, width[, channels])")
        self.array = array if array.ndim == 3 else array[:, :, None]
        self.height, self.width = self.array.shape[:2]
        _check_size(self.width, self.height)

    def pixels(self, channels: int, *, scale: float = 1.0) -> Pixels:  # noqa: ARG002 - already decoded
        array = to_bytes(self.array)
        actual = array.shape[2]
        if actual == channels:
            return array
        if actual == 1 and channels == 3:
            return np.broadcast_to(array, (self.height, self.width, 3))
        if actual in (3, 4) and channels in (1, 3):
            return _as_mode(Image.fromarray(np.ascontiguousarray(array)), "L" if channels == 1 else "RGB")
        raise _other_channels(actual, channels)

    def values(self) -> Pixels:
        """Return the values of the one channel, unchanged."""
        if self.array.shape[2] != 1:
            raise _not_one_channel(f"an array with {self.array.shape[2]} channels")
        return self.array[:, :, 0]


class Jpeg:
    """A JPEG, decoded by libjpeg-turbo at the requested scale; unusual ones are left to Pillow."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.stored_height, self.stored_width, self.colours, _ = simplejpeg.decode_jpeg_header(content)
        _check_size(self.stored_width, self.stored_height)
        self.turn = turn_of_jpeg(content)
        self.height, self.width = seen_size(self.stored_height, self.stored_width, self.turn)

    def pixels(self, channels: int, *, scale: float = 1.0) -> Pixels:
        """Decode, at a reduced scale if that suffices."""
        if channels not in (1, 3):
            raise _other_channels(3, channels)
        if self.colours not in ("Gray", "YCbCr", "RGB"):
            return _Other(self.content).pixels(channels)
        try:
            array = self._decoded(int(np.ceil(8 * scale)))
        except ValueError:  # Pillow skips stray bytes, and reports truncated files
            return _Other(self.content).pixels(channels)
        if self.turn is not None:
            array = turned(array, self.turn)
        if array.shape[2] == channels:
            return array
        return _grey(array) if channels == 1 else np.broadcast_to(array, (*array.shape[:2], 3))

    def _decoded(self, eighths: int) -> Pixels:
        small = eighths <= SLOW_SCALE
        return simplejpeg.decode_jpeg(  # type: ignore[no-any-return]
            self.content,
            colorspace="GRAY" if self.colours == "Gray" else "RGB",
            min_height=-(-self.stored_height * eighths // 8) if small else 0,
            min_width=-(-self.stored_width * eighths // 8) if small else 0,
        )


class _Opened:
    """An image opened by Pillow."""

    def __init__(self, image: Image.Image) -> None:
        self.image = image
        try:
            with quiet():
                self.turn = turn_of(image)
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"a corrupt {image.format or 'image'}: {_reason(error)}") from None
        _check_size(*image.size)
        self.height, self.width = seen_size(image.height, image.width, self.turn)

    def pixels(self, channels: int, *, scale: float = 1.0) -> Pixels:  # noqa: ARG002 - only JPEG decodes at a reduced scale
        try:
            with quiet():
                self.image.load()
            pages = getattr(self.image, "n_frames", 1) if self.image.format == "TIFF" else 1
            if channels in (1, 3, 4) and not (pages == channels > 1):
                array = _as_mode(self.image, {1: "L", 3: "RGB", 4: "RGBA"}[channels])
            else:
                array = _frames(self.image, channels)
        except (OSError, ValueError, SyntaxError, EOFError, RuntimeError, Image.DecompressionBombError) as error:
            raise DataError(f"a corrupt {self.image.format or 'image'}: {_reason(error)}") from None
        return array if self.turn is None else turned(array, self.turn)

    def values(self) -> Pixels:
        """Decode the values of the one channel, or the indices of the palette, unchanged."""
        if self.image.format in LOSSY:
            raise DataError(f"it is a {self.image.format}, which changes the values of pixels; save it as PNG")
        if self.image.mode not in ("1", "L", "P") and not self.image.mode.startswith("I"):
            raise _not_one_channel(f"an image of mode {self.image.mode}")
        if self.image.mode == "L" and (bits := _grey_bits(self.image)) < 8:
            raise DataError(
                f"its grey values have {bits} bits, which programs scale to 0…255 when they read them; save it with 8 "
                "bits, or with a palette"
            )
        try:
            with quiet():
                array = np.asarray(self.image)
        except (OSError, ValueError, SyntaxError, EOFError, RuntimeError) as error:
            raise DataError(f"it is a corrupt {self.image.format or 'image'}: {_reason(error)}") from None
        return array if self.turn is None else turned(array, self.turn)


class _Other(_Opened):
    """A file of any other format, decoded by Pillow."""

    def __init__(self, content: bytes) -> None:
        kind = sniff(content[:HEAD])
        if kind is not None and (missing := why_not_read(kind)) is not None:
            raise DataError(missing)
        try:
            with quiet():
                image = Image.open(io.BytesIO(content), formats=_formats())
                turn_of(image)
            if image.format == "EPS":  # a program that Pillow would run with Ghostscript
                raise DataError("PostScript is not supported; save it as PNG or JPEG")
        except Image.DecompressionBombError:
            raise TooManyPixels(f"an image of more than {PIXEL_LIMIT:,} pixels, the limit; make it smaller") from None
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, RuntimeError):
            if kind is not None:
                raise DataError(f"a corrupt {kind}: its header cannot be read") from None
            raise _not_an_image(content) from None
        super().__init__(image)


def _grey_bits(image: Image.Image) -> int:
    """Return how many bits a grey value has in the file; 8 if Pillow does not say."""
    modes = (str(mode) for tile in getattr(image, "tile", ()) for mode in np.atleast_1d(tile[3])[:1])
    return next((int(mode[2]) for mode in modes if mode[:2] == "L;" and mode[2:3] in ("2", "4")), 8)


def _formats() -> list[str]:
    return [*FORMATS, *(("AVIF",) if features.check("avif") else ()), *(("HEIF",) if reads_heic() else ())]


def _not_an_image(content: bytes) -> DataError:
    Image.init()
    for name, (_, accept) in Image.OPEN.items():
        if name not in FORMATS and accept is not None and accept(content[:16]) is True:
            return DataError(f"{name} is not supported; save it as PNG or JPEG")
    return DataError(f"it is not an image: the file starts with {content[:8]!r}")


def _as_mode(image: Image.Image, mode: str) -> Pixels:
    """Convert any Pillow mode to grey, RGB or RGBA, 8 bits each."""
    if image.mode.startswith(("I", "F")):
        # Pillow uses mode "I" for 16-bit images of some formats, whose values may all be small.
        array = np.asarray(image)
        sixteen = image.mode == "I" and image.format in ("PNG", "PPM")
        grey = Image.fromarray(to_bytes(array.clip(0, 65535).astype(np.uint16) if sixteen else array))
        image = grey if mode == "L" else grey.convert("RGB")
    if mode != "RGBA" and image.has_transparency_data:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (BACKGROUND,) * 4)
        image = Image.alpha_composite(ground, image).convert("RGB")
    if image.mode != mode:
        image = image.convert(mode)
    array = np.asarray(image)
    return array if array.ndim == 3 else array[:, :, None]


def _frames(image: Image.Image, channels: int) -> Pixels:
    """Use the pages of a TIFF as channels, as in microscopy and satellite images."""
    pages = getattr(image, "n_frames", 1)
    if pages != channels:
        actual = pages if pages > 1 else len(image.getbands())
        raise (
            _other_channels(actual, channels)
            if actual != channels
            else DataError(f"an image of mode {image.mode} cannot be used as {channels} channels")
        )
    layers = []
    for page in range(pages):
        image.seek(page)
        _check_size(*image.size)  # each page has its own size
        layers.append(to_bytes(np.asarray(image)))
    if any(layer.shape != layers[0].shape or layer.ndim != 2 for layer in layers):
        raise DataError(f"the {pages} pages are not grey images of equal size, so they cannot be channels")
    return np.stack(layers, axis=2)


def to_bytes(array: Pixels) -> Pixels:
    """Convert values to 0…255: 16-bit values are scaled, floats are expected in 0…1."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    low, high = float(array.min()), float(array.max())
    sixteen = array.dtype.kind == "u" and array.dtype.itemsize == 2
    if sixteen or (array.dtype.kind in "iu" and low >= 0 and 255 < high <= 65535):
        return ((array.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    if array.dtype.kind in "iu" and low >= 0 and high <= 255:
        return array.astype(np.uint8)
    if array.dtype.kind == "f" and low >= 0 and high <= 1:
        return (array * 255).round().astype(np.uint8)
    raise DataError(
        f"its {array.dtype} values range from {low:g} to {high:g}; an image has integers 0…255 or 0…65535, or floats "
        f"0…1"
    )


def _grey(array: Pixels) -> Pixels:
    return np.asarray(Image.fromarray(array).convert("L"))[:, :, None]


def _numpy(content: bytes) -> Pixels:
    """Read an array, after checking in its header that it is an image within the limits."""
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(file)
    except Exception as error:  # a corrupt header may raise anything
        raise DataError(f"a corrupt NumPy file: {_reason(error)}") from None
    if dtype.kind not in "biuf" or len(shape) not in (2, 3):
        raise DataError(f"an array of {dtype} and shape {shape} is not an image")
    _check_size(shape[1], shape[0])
    if math.prod(shape) > 64 * PIXEL_LIMIT:
        raise DataError(f"an array of shape {shape} is larger than any image")
    try:
        return np.asarray(np.load(io.BytesIO(content), allow_pickle=False))
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"a corrupt NumPy file: {_reason(error)}") from None


def _check_size(width: int, height: int) -> None:
    if width * height > PIXEL_LIMIT:
        raise TooManyPixels(
            f"an image of {height:,}×{width:,} = {height * width:,} pixels exceeds the limit of {PIXEL_LIMIT:,}; "
            f"make it smaller"
        )


def _not_one_channel(what: str) -> DataError:
    return DataError(
        f"it is {what}, but the value of a pixel should be its class; save it with one channel, or with a palette"
    )


def _other_channels(actual: int, expected: int) -> DataError:
    return DataError(f"an image with {actual} channels, expected {expected}")


def _reason(error: Exception) -> str:
    """Return a library's error message, in one line."""
    return str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__
