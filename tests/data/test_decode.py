"""Decoding files of every format, written by other libraries or by hand."""

import io
import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import simplejpeg
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps, features

from vitrail.data import decode as module
from vitrail.data.decode import decode, open_image
from vitrail.data.image_files import ENDINGS, HEAD, reads_heic, sniff
from vitrail.data.sources.source import SUFFIXES
from vitrail.errors import DataError

Array = NDArray[Any]


def scene(height: int = 37, width: int = 53) -> Array:
    """Make a smooth image with distinct corners, to detect rotations and swapped channels."""
    y, x = np.mgrid[0:height, 0:width]
    waves = (127 + 120 * np.sin(x / 9), 127 + 120 * np.cos(y / 7), 40 + 3 * x + 1.2 * y)
    return np.stack(waves, axis=2).clip(0, 255).astype(np.uint8)


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(height: int, width: int, depth: int, colour: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """Write a PNG by hand, according to the standard."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    stride = len(rows) // height
    lines = b"".join(b"\0" + rows[i : i + stride] for i in range(0, len(rows), stride))
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + body


def tiff(array: Array, **options: Any) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, array, **options)
    return file.getvalue()


# ── JPEG ──


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "Gray"])
def test_jpeg_matches_pillow(subsampling: str) -> None:
    content = simplejpeg.encode_jpeg(scene(), quality=92, colorsubsampling=subsampling)
    assert np.array_equal(decode(content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))
    assert np.array_equal(decode(content, 1)[:, :, 0], np.asarray(Image.open(io.BytesIO(content)).convert("L")))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "YCbCr"])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_modes(mode: str, progressive: bool) -> None:
    content = saved(Image.fromarray(scene()).convert(mode), "JPEG", quality=95, progressive=progressive)
    assert np.array_equal(decode(content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))
    if mode != "L":
        assert np.abs(decode(content).astype(int) - scene()).mean() < 6


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100, "lossless": True} if form == "WEBP" else {"quality": 95} if form == "JPEG" else {}
    content = saved(Image.fromarray(scene()), form, exif=exif, **options)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
    image = open_image(content)
    assert (image.height, image.width) == upright.shape[:2]
    assert np.array_equal(image.pixels(3), upright)


def test_invalid_exif_tags_are_ignored() -> None:
    content = saved(Image.fromarray(scene()), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode(content).shape == (37, 53, 3)


@pytest.mark.parametrize("eighths", range(1, 9))
def test_a_reduced_scale_covers_the_request(eighths: int) -> None:
    big = np.asarray(Image.fromarray(scene()).resize((530, 370)))
    content = simplejpeg.encode_jpeg(big, quality=95)
    small = open_image(content).pixels(3, scale=eighths / 8)
    assert small.shape[0] >= 370 * eighths / 8
    assert small.shape[1] >= 530 * eighths / 8
    if eighths <= module.SLOW_SCALE:
        assert small.shape[1] <= 530 * eighths / 8 + 1
    else:
        assert small.shape == big.shape
    expected = np.asarray(Image.fromarray(big).resize(small.shape[1::-1], Image.Resampling.BOX)).astype(int)
    assert np.abs(small.astype(int) - expected).mean() < 3


def test_a_rotated_image_at_a_reduced_scale() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = saved(Image.fromarray(scene(80, 160)), "JPEG", exif=exif, quality=95)
    image = open_image(content)
    assert (image.height, image.width) == (160, 80)
    assert image.pixels(3, scale=0.5).shape == (80, 40, 3)


@pytest.mark.parametrize("scale", [1 / 8, 2 / 8, 3 / 8, 5 / 8])
def test_a_reduced_image_is_aligned_with_the_full_one(scale: float) -> None:
    """The last decoded pixel is only partially covered, so sides are not proportional; `extent` corrects that."""
    y, x = np.mgrid[0:377, 0:501]
    waves = np.stack([127 + 120 * np.sin(x / 5), 127 + 120 * np.sin(y / 5), 127 + 0 * x], axis=2).astype(np.uint8)
    content = simplejpeg.encode_jpeg(waves, quality=95, colorsubsampling="444")
    small = open_image(content).pixels(3, scale=scale)
    whole = (module.extent(501, small.shape[1]), module.extent(377, small.shape[0]))
    assert whole == (501 * scale, 377 * scale)
    shown = Image.fromarray(small).resize((63, 48), Image.Resampling.BILINEAR, box=(0, 0, *whole))
    expected = Image.fromarray(waves).resize((63, 48), Image.Resampling.BILINEAR)
    proportional = Image.fromarray(small).resize((63, 48), Image.Resampling.BILINEAR)
    right, wrong = (np.abs(np.asarray(p).astype(int) - np.asarray(expected)).mean() for p in (shown, proportional))
    assert right < wrong or scale == 5 / 8
    assert right < 8


def test_png_size_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved(Image.fromarray(scene()), "PNG")
    monkeypatch.setattr(Image.Image, "load", None)
    assert open_image(content[:-40]).height == 37


def test_stray_bytes_in_a_jpeg_are_skipped() -> None:
    content = simplejpeg.encode_jpeg(scene(), quality=90)
    where = content.index(b"\xff\xda")  # before the scan
    stray = content[:where] + b"\0\0\0" + content[where:]
    assert np.array_equal(decode(stray), decode(content))


# ── other formats ──


@pytest.mark.parametrize(
    ("form", "options"),
    [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("WEBP", {"lossless": True})],
)
def test_lossless_formats(form: str, options: dict[str, Any]) -> None:
    assert np.array_equal(decode(saved(Image.fromarray(scene()), form, **options)), scene())


def test_first_frame_of_gif_and_webp() -> None:
    frames = [Image.fromarray(scene()), Image.fromarray(scene()[::-1])]
    for form, options in (("GIF", {}), ("WEBP", {"lossless": True})):
        content = saved(frames[0], form, save_all=True, append_images=frames[1:], **options)
        first = Image.open(io.BytesIO(content))
        first.seek(0)
        assert np.array_equal(decode(content), np.asarray(first.convert("RGB")))
        assert np.abs(decode(content).astype(int) - scene()).mean() < 20


def test_png_by_hand() -> None:
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    assert np.array_equal(decode(png(2, 3, 8, 0, grey.tobytes()), 1)[:, :, 0], grey)
    assert np.array_equal(decode(png(2, 3, 8, 0, grey.tobytes())), np.repeat(grey[:, :, None], 3, axis=2))
    bits = png(2, 3, 1, 0, bytes([0b10100000, 0b01000000]))
    assert decode(bits, 1)[:, :, 0].tolist() == [[255, 0, 255], [0, 255, 0]]


@pytest.mark.parametrize("top", [65535, 300, 200])
def test_16_bit_values_are_scaled_not_clipped(top: int) -> None:
    """A dark image whose values would fit into 8 bits is scaled, too."""
    deep = np.linspace(0, top, 20).round().astype(">u2").reshape(4, 5)
    expected = (deep.astype(float) * 255 / 65535).round()
    assert np.array_equal(decode(png(4, 5, 16, 0, deep.tobytes()), 1)[:, :, 0], expected)
    assert np.array_equal(decode(tiff(deep.astype("<u2")), 1)[:, :, 0], expected)
    assert np.array_equal(decode(tiff(deep, byteorder=">"), 3)[:, :, 2], expected)


def test_palettes_and_their_transparency() -> None:
    palette = bytes([255, 0, 0, 0, 255, 0, 0, 0, 255])
    chunks = ((b"PLTE", palette), (b"tRNS", bytes([255, 0, 255])))
    content = png(1, 3, 8, 3, bytes([0, 1, 2]), *chunks)
    assert decode(content)[0].tolist() == [[255, 0, 0], [255, 255, 255], [0, 0, 255]]
    assert decode(png(1, 3, 8, 3, bytes([0, 1, 2]), chunks[0]))[0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF"])
def test_transparent_pixels_show_white(form: str) -> None:
    clear = np.dstack([scene(), np.full(scene().shape[:2], 255, np.uint8)])
    clear[:10, :, 3] = 0
    clear[10:20, :, 3] = 128
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    array = decode(saved(Image.fromarray(clear), form, **options)).astype(int)
    assert (array[:10] == 255).all()
    assert np.abs(array[10:20] - (scene()[10:20].astype(int) + 255) / 2).max() <= 2
    assert np.array_equal(array[20:], scene()[20:])
    assert np.array_equal(decode(saved(Image.fromarray(clear), form, **options), 4), clear)


def test_grey_with_transparency() -> None:
    content = saved(Image.fromarray(np.full((2, 2, 2), [100, 0], np.uint8)), "PNG")
    assert (decode(content) == 255).all()
    assert (decode(content, 1) == 255).all()


def test_pages_are_channels() -> None:
    deep = np.random.default_rng(0).integers(0, 65535, (13, 6, 7), np.uint16)
    content = tiff(deep, photometric="minisblack")
    assert np.array_equal(decode(content, 13), (deep.astype(float) * 255 / 65535).round().transpose(1, 2, 0))
    with pytest.raises(DataError, match="an image with 13 channels, expected 5"):
        decode(content, 5)


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_as_many_pages_as_channels(channels: int) -> None:
    pages = np.arange(channels, dtype=np.uint8)[:, None, None] * 40 * np.ones((1, 4, 5), np.uint8)
    assert np.array_equal(decode(tiff(pages, photometric="minisblack"), channels), pages.transpose(1, 2, 0))


@pytest.mark.parametrize("before", [b"\xff\xfe\x00\x07hello", b"\xff\xff\xff"])
def test_orientation_after_other_segments(before: bytes) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = saved(Image.fromarray(scene()), "JPEG", exif=exif)
    behind = content[:2] + before + content[2:]
    assert decode(behind).shape == (53, 37, 3)


@pytest.mark.parametrize("array", [np.array([["x"]]), np.zeros((2, 2), "datetime64[s]"), np.zeros((2, 2), complex)])
def test_arrays_that_are_not_images(array: Array) -> None:
    file = io.BytesIO()
    np.save(file, array)
    with pytest.raises(DataError, match="is not an image"):
        decode(file.getvalue())


def test_an_array_that_declares_a_huge_shape() -> None:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "|u1", "fortran_order": False, "shape": (4_000_000, 4_000_000)}
    )
    with pytest.raises(DataError, match="exceeds the limit of 178,956,970"):
        decode(file.getvalue())


def test_numpy_files_and_arrays() -> None:
    array = np.random.default_rng(0).integers(0, 255, (6, 7, 5), np.uint8)
    file = io.BytesIO()
    np.save(file, array)
    assert np.array_equal(decode(file.getvalue(), 5), array)
    assert np.array_equal(decode(array[:, :, 0], 3)[:, :, 2], array[:, :, 0])
    assert np.array_equal(decode(scene(), 1)[:, :, 0], np.asarray(Image.fromarray(scene()).convert("L")))
    assert np.array_equal(decode(scene() / 255.0), scene())
    assert decode(np.ones((2, 2), bool), 1).max() == 255
    with pytest.raises(DataError, match=r"float64 values range from -1 to 1; an image has integers 0…255"):
        decode(np.array([[-1.0, 1.0]]))
    with pytest.raises(DataError, match="an image with 5 channels, expected 3"):
        decode(array)


# ── invalid files ──


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"hello, I am a text file", r"it is not an image: the file starts with b'hello, I'"),
        (simplejpeg.encode_jpeg(scene())[:-400], "a corrupt JPEG: image file is truncated"),
        (simplejpeg.encode_jpeg(scene())[:30], "a corrupt JPEG: its header cannot be read"),
        (saved(Image.fromarray(scene()), "PNG")[:-300], "a corrupt PNG: "),
        (saved(Image.fromarray(scene()), "WEBP")[:-100], "a corrupt WebP"),
        (saved(Image.fromarray(scene()), "GIF")[:200], "a corrupt GIF"),
        (tiff(scene())[:-1000], "a corrupt TIFF: "),
        (saved(Image.fromarray(scene()), "BMP")[:-100], "a corrupt BMP: image file is truncated"),
        (b"\x93NUMPY\x01\x00v\x00{", "a corrupt NumPy file: "),
        (png(60_000, 60_000, 8, 0, bytes(60_000)), r"pixels.*limit; make it smaller"),
        (png(14_000, 14_000, 8, 0, bytes(14_000)), r"more than 178,956,970 pixels, the limit"),
    ],
)
def test_undecodable_files(content: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        decode(content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"qoif" + struct.pack(">IIBB", 4, 4, 3, 0) + b"\xcf" + bytes(7) + b"\1", "QOI"),
        (b"8BPS\0\1" + bytes(20), "PSD"),
        (saved(Image.fromarray(scene()), "ICO"), "ICO"),
        (saved(Image.fromarray(scene()), "SGI"), "SGI"),
    ],
)
def test_unsupported_formats_are_named(content: bytes, name: str) -> None:
    with pytest.raises(DataError, match=f"^{name} is not supported; save it as PNG or JPEG$"):
        decode(content)


@pytest.mark.parametrize("kind", ["PPM", "TGA", "PCX", "JPEG2000", "DIB"])
def test_other_formats_are_read(kind: str) -> None:
    assert decode(saved(Image.fromarray(scene()), kind)).shape == scene().shape


def test_every_page_has_its_own_size() -> None:
    made = b"II*\0" + struct.pack("<I", 8)
    for side, after in ((1, 122), (60_000, 0)):
        tags = (256, side), (257, side), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, side), (279, 1)
        made += struct.pack("<H", 9) + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        made += struct.pack("<I", after)
    with pytest.raises(DataError, match=r"60,000×60,000.*exceeds the limit of .*; make it smaller"):
        decode(made, channels=2)


def test_a_jpeg_that_declares_a_huge_size() -> None:
    content = bytearray(simplejpeg.encode_jpeg(scene()))
    frame = content.index(b"\xff\xc0") + 5
    content[frame : frame + 4] = struct.pack(">HH", 65_000, 65_000)
    with pytest.raises(DataError, match="an image of 65,000×65,000 = 4,225,000,000 pixels exceeds the limit"):
        open_image(bytes(content))


@pytest.mark.parametrize("channels", [2, 5])
def test_wrong_number_of_channels(channels: int) -> None:
    for content in (simplejpeg.encode_jpeg(scene()), saved(Image.fromarray(scene()), "PNG")):
        with pytest.raises(DataError, match=f"an image with 3 channels, expected {channels}"):
            decode(content, channels)


# ── HEIC and AVIF ──


@pytest.fixture
def _heic_anew() -> Iterator[None]:
    """Reset the cached HEIC support, before and after."""
    reads_heic.cache_clear()
    yield
    reads_heic.cache_clear()


def heic(**options: object) -> bytes:
    assert reads_heic(), "the extra `test` installs pillow-heif"
    return saved(Image.fromarray(scene()), "HEIF", quality=90, **options)


def test_heic_is_read() -> None:
    pixels = decode(heic())
    assert pixels.shape == scene().shape
    assert np.abs(pixels.astype(int) - scene()).mean() < 6
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(heic(exif=exif.tobytes())).shape == (*scene().shape[1::-1], 3)
    with pytest.raises(DataError, match=r"a corrupt HEI[CF]: "):
        decode(heic()[:-200])


@pytest.mark.usefixtures("_heic_anew")
def test_heic_without_pillow_heif_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    content = heic()
    reads_heic.cache_clear()
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(DataError, match=r"^reading HEIC images needs pillow-heif: pip install 'vitrail\[heif\]'$"):
        open_image(content)


def test_avif_is_read_or_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved(Image.fromarray(scene()), "AVIF", quality=90)
    assert np.abs(decode(content).astype(int) - scene()).mean() < 6
    monkeypatch.setattr(features, "check", lambda feature: False)
    with pytest.raises(
        DataError, match=r"^this version of Pillow cannot read AVIF images: pip install 'pillow>=11\.3'$"
    ):
        open_image(content)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"])
def test_type_detection_by_content(format: str) -> None:
    kind = sniff(saved(Image.fromarray(scene()), format)[:HEAD])
    assert kind is not None
    assert kind.upper() == format
    assert ENDINGS[kind] in SUFFIXES


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_sniffing_never_raises(content: bytes) -> None:
    assert sniff(content) in {None, *ENDINGS}


def test_text_is_not_an_image() -> None:
    for content in (b"", b"BMW and others are cars", b"RIFF\0\0\0\0WAVE", b"\0\0\0\x20ftypmp42\0\0\0\0isom", b"<?php"):
        assert sniff(content) is None
