"""From the bytes that a client sent to pixels: what kind of file, how large, and only then decoded."""

from collections.abc import Collection

from vitrail.data.decode import Picture, TooManyPixels, open_picture
from vitrail.data.given import Item, fitted
from vitrail.data.preprocess import Preprocess, resized_size
from vitrail.data.sources.source import Pixels
from vitrail.errors import DataError, InputError
from vitrail.serving.refusal import Refusal

NARROWEST = 16
"""How many times longer than wide a picture may be where the limit of pixels is lower than what the model needs."""


def kind_of(content: bytes) -> str | None:
    """Return which kind of picture file this is, by its first bytes; None for anything that no setting allows."""
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


def decode_upload(content: bytes, preprocess: Preprocess, formats: Collection[str], most_pixels: int) -> Pixels:
    """Make of a file what an engine takes, (height, width, channels); whatever is wrong with it is a `Refusal`."""
    if not content:
        raise Refusal(400, "the picture is empty: 0 bytes")
    kind = kind_of(content)
    if kind not in formats:
        what = "this is no picture" if kind is None else f"{kind} pictures are not taken here"
        raise Refusal(415, f"{what}; send one of {', '.join(formats)}")
    try:
        header = open_picture(content)
        if header.width * header.height > most_pixels:
            raise Refusal(
                413,
                f"a picture of {header.width:,}×{header.height:,} pixels; at most {most_pixels:,} are taken, so make "
                f"it smaller",
            )
        _check_shape(header, preprocess, most_pixels)
        return fitted(Item(b"", content=content), preprocess)
    except TooManyPixels:
        raise Refusal(413, f"a picture of far more than the {most_pixels:,} pixels that are taken") from None
    except (DataError, InputError) as error:
        raise Refusal(422, f"the picture cannot be used: {error}") from None
    except MemoryError:
        raise Refusal(413, "the picture is too large for this machine's memory; make it smaller") from None


def _check_shape(picture: Picture, preprocess: Preprocess, most_pixels: int) -> None:
    """Refuse a narrow strip, which a model that wants its shorter side as long as its own makes enormous."""
    if not picture.width or not picture.height:
        raise DataError("a picture without pixels")
    box = preprocess.resize_to or preprocess.size
    wide, tall = resized_size((picture.width, picture.height), box, preprocess.resize)
    if wide * tall > max(most_pixels, NARROWEST * box[0] * box[1]):
        raise Refusal(
            413,
            f"a picture of {picture.width:,}×{picture.height:,} pixels would be {wide:,}×{tall:,} when it is resized "
            f"for the model, which is too much; make it less narrow",
        )
