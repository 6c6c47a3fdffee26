"""From the bytes that a client sent to pixels: what kind of file, how large, and only then decoded.

`check_upload` reads headers alone and is called where requests are answered; `decode_upload` is called in a process of
its own (see `decoders`), so nothing here may import torch.
"""

from collections.abc import Collection

from vitrail.data.decode import LazyImage, TooManyPixels, open_image
from vitrail.data.limits import Outline
from vitrail.data.preprocess import Preprocess, resized_size
from vitrail.data.sources.source import Pixels
from vitrail.data.structure import outline
from vitrail.errors import DataError, InputError
from vitrail.serving.http_errors import HttpError

NARROWEST = 16
"""How many times longer than wide an image may be where the limit of pixels is lower than what the model needs."""


def kind_of(content: bytes) -> str | None:
    """Return which kind of image file this is, by its first bytes; None for anything that no setting allows."""
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


def check_upload(content: bytes, formats: Collection[str], most_pixels: int) -> Outline | None:
    """Refuse what its first bytes and its header rule out, and say what decoding it takes where the header tells."""
    if not content:
        raise HttpError(400, "the image is empty: 0 bytes")
    kind = kind_of(content)
    if kind not in formats:
        what = "this is not an image" if kind is None else f"{kind} images are not taken here"
        raise HttpError(415, f"{what}; send one of {', '.join(formats)}")
    try:
        found = outline(content)
    except DataError as error:
        raise HttpError(422, f"the image cannot be used: {error}") from None
    if found is not None:
        _check_size(found, most_pixels)
    return found


def decode_upload(content: bytes, preprocess: Preprocess, formats: Collection[str], most_pixels: int) -> Pixels:
    """Make of a file what an engine takes, (height, width, channels); whatever is wrong with it is a `HttpError`."""
    check_upload(content, formats, most_pixels)
    try:
        header = open_image(content)
        _check_size(header, most_pixels)
        _check_shape(header, preprocess, most_pixels)
        return preprocess.fit(header.pixels(preprocess.channels))
    except TooManyPixels:
        raise HttpError(413, f"an image of far more than the {most_pixels:,} pixels that are taken") from None
    except (DataError, InputError) as error:
        raise HttpError(422, f"the image cannot be used: {error}") from None
    except MemoryError:
        raise HttpError(413, "the image is too large for this machine's memory; make it smaller") from None
    except HttpError:
        raise
    except Exception as error:  # Pillow's readers of rare formats fail on damaged files in any way
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise HttpError(422, f"the image cannot be used: it cannot be decoded: {why}") from None


def _check_size(image: LazyImage | Outline, most_pixels: int) -> None:
    if image.width * image.height > most_pixels:
        raise HttpError(
            413,
            f"an image of {image.width:,}×{image.height:,} pixels; at most {most_pixels:,} are taken, so make it "
            f"smaller",
        )


def _check_shape(image: LazyImage, preprocess: Preprocess, most_pixels: int) -> None:
    """Refuse a narrow strip, which a model that wants its shorter side as long as its own makes enormous."""
    if not image.width or not image.height:
        raise DataError("an image without pixels")
    box = preprocess.resize_to or preprocess.size
    wide, tall = resized_size((image.width, image.height), box, preprocess.resize)
    if wide * tall > max(most_pixels, NARROWEST * box[0] * box[1]):
        raise HttpError(
            413,
            f"an image of {image.width:,}×{image.height:,} pixels would be {wide:,}×{tall:,} when it is resized "
            f"for the model, which is too much; make it less narrow",
        )
