"""Check and decode uploaded images: file type first, then size, then pixels.

`check_upload` only reads headers and runs in the service; `decode_upload` runs in a separate process (see `decoders`),
so nothing here may import torch.
"""

from collections.abc import Collection
from typing import NamedTuple

from vitrail.data.decode import LazyImage, TooManyPixels, open_image
from vitrail.data.image_files import Outline
from vitrail.data.preprocess import Preprocess, resized_size
from vitrail.data.sources.source import Pixels
from vitrail.data.structure import outline
from vitrail.errors import DataError, InputError
from vitrail.serving.http_errors import HttpError

MAX_ASPECT = 16
"""Maximum aspect ratio when the pixel limit is lower than what the model needs."""


class Upload(NamedTuple):
    """An uploaded image, decoded."""

    pixels: Pixels
    """Preprocessed: (height, width, channels)."""
    size: tuple[int, int]
    """Height and width of the original, as it is displayed."""


def kind_of(content: bytes) -> str | None:
    """Detect the image format by its magic bytes; None if unknown."""
    if content.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    if content.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if content.startswith(b"BM"):
        return "bmp"
    if content.startswith((b"II*\0", b"MM\0*")):
        return "tiff"
    return None


def check_upload(content: bytes, formats: Collection[str], max_pixels: int) -> Outline | None:
    """Raise if the magic bytes or the header are not acceptable; return the image's outline if the header has it."""
    if not content:
        raise HttpError(400, "the image is empty: 0 bytes")
    kind = kind_of(content)
    if kind not in formats:
        what = "this is not an image" if kind is None else f"{kind} images are not accepted"
        raise HttpError(415, f"{what}; send one of {', '.join(formats)}")
    try:
        header = outline(content)
    except DataError as error:
        raise HttpError(422, f"the image cannot be used: {error}") from None
    if header is not None:
        _check_size(header, max_pixels)
    return header


def decode_upload(content: bytes, preprocess: Preprocess, formats: Collection[str], max_pixels: int) -> Upload:
    """Decode and preprocess a file; any problem raises `HttpError`."""
    check_upload(content, formats, max_pixels)
    try:
        image = open_image(content)
        _check_size(image, max_pixels)
        _check_shape(image, preprocess, max_pixels)
        return Upload(preprocess.fit(image.pixels(preprocess.channels)), (image.height, image.width))
    except TooManyPixels:
        raise HttpError(413, f"the image is far larger than the limit of {max_pixels:,} pixels") from None
    except (DataError, InputError) as error:
        raise HttpError(422, f"the image cannot be used: {error}") from None
    except MemoryError:
        raise HttpError(413, "the image is too large for this machine's memory; resize it") from None
    except HttpError:
        raise
    except Exception as error:  # Pillow's plugins can raise anything on corrupt files
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise HttpError(422, f"the image cannot be used: it cannot be decoded: {why}") from None


def _check_size(image: LazyImage | Outline, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        raise HttpError(
            413,
            f"the image has {image.width:,}×{image.height:,} pixels; at most {max_pixels:,} are accepted, so resize it",
        )


def _check_shape(image: LazyImage, preprocess: Preprocess, max_pixels: int) -> None:
    """Raise for a narrow strip, which resizing its shorter side to the model's input would make enormous."""
    if not image.width or not image.height:
        raise DataError("the image has no pixels")
    box = preprocess.resize_to or preprocess.size
    wide, tall = resized_size((image.width, image.height), box, preprocess.resize)
    if wide * tall > max(max_pixels, MAX_ASPECT * box[0] * box[1]):
        raise HttpError(
            413,
            f"the image has {image.width:,}×{image.height:,} pixels and would be {wide:,}×{tall:,} after resizing "
            f"for the model; crop it to a less extreme aspect ratio",
        )
