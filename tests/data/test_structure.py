"""Decoding cost is estimated before decoding, and absurd amounts raise."""

import contextlib
import io
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.support.hostile_images import (
    bmp_of_runs,
    jpeg_2000_header,
    jpeg_of_hidden_scans,
    jpeg_of_refinements,
    jpeg_of_scans,
    png_chunk,
    png_of_zeros,
    tiff_of_odd_tiles,
    tiff_of_pages,
    tiff_of_shared_tiles,
    tiff_of_tags,
    tiff_of_tiles,
)

from vitrail import Bundle, Classifier, Preprocess, ViTConfig, create
from vitrail.data import image_files
from vitrail.data.augmentation.augment import preset
from vitrail.data.batches import Evaluation, Training, evaluation_batches, training_batches
from vitrail.data.checking.survey import survey
from vitrail.data.decode import decode, open_image
from vitrail.data.sources.opening import open_data
from vitrail.data.stream import Stream
from vitrail.data.structure import outline
from vitrail.errors import DataError, VitrailError

KINDS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000")


def saved(kind: str, size: tuple[int, int] = (37, 23), **options: object) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


LARGE = 13_377
"""The side of the largest accepted square image."""
HOSTILE = {
    "scans": (jpeg_of_scans(5000), "JPEG with more than 100 scans"),
    "scans of a sequential one": (jpeg_of_scans(5000, progressive=False), "JPEG with more than 100 scans"),
    "stray bytes": (b"\xff\xd8\xff" + bytes(33_000_000), "JPEG with more than 65,536 bytes between its segments"),
    "filled": (b"\xff\xd8" + b"\xff" * 33_000_000, "JPEG with more than 65,536 bytes between its segments"),
    "segments": (b"\xff\xd8" + b"\xff\xe5\0\2" * 8_000_000, "JPEG with more than 4,096 segments"),
    "late segments": (
        jpeg_of_scans(2)[:-2] + b"\xff\xfe\0\4\xff\xda" * 5_000_000 + b"\xff\xd9",
        "JPEG with more than 4,096 segments",
    ),
    "chunks": (png_of_zeros(8, png_chunk(b"teSt") * 1_000_000), "PNG with more than 9,9[0-9]{2} chunks"),
    "frames of a PNG": (
        png_of_zeros(8, png_chunk(b"acTL", struct.pack(">II", 2**31, 0))),
        "PNG with more than 10,000 frames",
    ),
    "comments": (
        b"GIF89a\1\0\1\0\0\0\0!\xfe" + (b"\1c" * 5_000_000),
        "GIF with more than 4,096 blocks before its first frame",
    ),
    "empty comments": (b"GIF89a\1\0\1\0\0\0\0" + b"!\xfe\0" * 5_000_000, "GIF with more than 4,096 blocks"),
    "frames of a WebP": (
        b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(10) + b"ANMF\0\0\0\0" * 1_000_000,
        "WebP with more than 10,000 frames",
    ),
    "pages": (tiff_of_pages(2000), "TIFF with more than 1,000 pages"),
    "tags": (tiff_of_tags(100, 4000), "TIFF with more than 65,536 tags"),
    "tiles": (tiff_of_tiles(2**31), "TIFF with more than 100,000 tiles"),
    "one tile": (tiff_of_tiles(1, 2**16), "TIFF with more than 67,108,864 pixels in one tile"),
    "tiles of JPEG 2000": (
        b"\xff\x4f\xff\x51" + struct.pack(">HHIIIIIIIIH", 47, 0, 7000, 7000, 0, 0, 1, 1, 0, 0, 3) + bytes(99),
        "JPEG 2000 with more than 100,000 tiles",
    ),
    "hidden scans": (jpeg_of_hidden_scans(600), "JPEG with more than 100 scans"),
    "scans that are cut off": (
        jpeg_of_refinements(100, LARGE)[:-2] + b"\xff\xe0",
        "JPEG with more than 2,147,483,648 pixels times scans",
    ),
    **{
        f"tiles, {odd}": (tiff_of_odd_tiles(100, 2**22, b"x", odd), "TIFF with more than 268,435,456 pixels in its")
        for odd in ("cut", "signed", "twice")
    },
    "scans of many pixels": (jpeg_of_refinements(100, LARGE), "JPEG with more than 2,147,483,648 pixels times scans"),
    "arithmetic scans": (jpeg_of_refinements(13, LARGE, arithmetic=True), "JPEG with more than 2,147,483,648 pix"),
    "tiles that share bytes": (
        tiff_of_shared_tiles(100_000, 2**22, b"x"),
        "TIFF with more than 268,435,456 pixels in its tiles",
    ),
    "tiles that are the same JPEG": (
        tiff_of_shared_tiles(100, 2**17, jpeg_of_scans(90), compression=7),
        "TIFF with more than 2,147,483,648 pixels times scans",
    ),
    "tiles that the size makes": (tiff_of_tiles(1, 16).replace(b"\x40\0\0\0", b"\0\0\1\0"), "more than 100,000 tiles"),
    "runs of a BMP": (bmp_of_runs(LARGE), "BMP with more than 4,194,304 run-length encoded pixels"),
    "runs of nothing": (bmp_of_runs(8, b"\1\0" * 100_000), "BMP with more than 65,664 bytes"),
    "numbers as text": (b"P2 4000 4000 255\n" + b"0 " * 16_000_000, "PNM with more than 8,000,000 bytes of text"),
    "samples of JPEG 2000": (jpeg_2000_header(LARGE, 3), "JPEG 2000 with more than 134,217,728 pixels times channels"),
    "layers": (jpeg_2000_header(64, 257, 65_535), "JPEG 2000 with more than 4,194,304 packets"),
    "precincts": (jpeg_2000_header(10_980, 1, precincts=b"\x11" * 6), "JPEG 2000 with more than 4,194,304 packets"),
    "code-blocks": (jpeg_2000_header(10_980, 1, block=0), "JPEG 2000 with more than 262,144 code-blocks"),
    "code-blocks behind an unknown marker": (
        jpeg_2000_header(10_980, 1, block=0).replace(b"\xff\x52", b"\xff\x30\xff\x52"),
        "JPEG 2000 with an unknown marker, FF30",
    ),
    "code-blocks after a long box": (
        b"\0\0\0\x0cjP  \r\n\x87\n" + struct.pack(">I4s", 100_008, b"xml ") + jpeg_2000_header(64, 1).ljust(100_000)
        + bytes(4) + b"jp2c" + jpeg_2000_header(10_980, 1, block=0),
        "JPEG 2000 with more than 262,144 code-blocks",
    ),
    "code-blocks of one tile": (
        jpeg_2000_header(10_980, 1) + b"\xff\x90" + struct.pack(">HHIBB", 10, 0, 99, 0, 1)
        + jpeg_2000_header(10_980, 1, block=0)[-14:],
        "JPEG 2000 with more than 262,144 code-blocks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_absurd_work_raises_immediately(name: str) -> None:
    content, sentence = HOSTILE[name]
    start = time.process_time()
    with pytest.raises(DataError, match=sentence):
        open_image(content)
    assert time.process_time() - start < 1  # the fake JPEG took 6 s, the scans minutes


def test_the_slowest_accepted_files() -> None:
    # Each takes seconds, as listed in docs/guides/data.md; one more of each count raises.
    assert outline(jpeg_of_refinements(12, LARGE)) == (LARGE, LARGE, 12)
    assert outline(jpeg_of_refinements(12, LARGE, arithmetic=True)) == (LARGE, LARGE, 12)
    assert outline(jpeg_of_scans(43)) == (7000, 7000, 43)
    assert outline(tiff_of_shared_tiles(4, 2**22, b"x")) == (64, 1, 1)
    assert outline(bmp_of_runs(2048)) == (2048, 2048, 1)
    assert outline(jpeg_2000_header(6688, 3)) == (6688, 6688, 1)
    for content in (
        jpeg_of_refinements(13, LARGE),
        jpeg_of_scans(44),
        tiff_of_shared_tiles(5, 2**22, b"x"),
        bmp_of_runs(2049),
        jpeg_2000_header(6689, 3),
    ):
        with pytest.raises(DataError, match="would take very long to decode"):
            outline(content)


def test_hostile_files_of_an_ordinary_size_decode() -> None:
    """So the files above are rejected for their counts, not because they are invalid."""
    for content, shape in (
        (jpeg_of_refinements(20, 64), (64, 64, 3)),
        (jpeg_of_refinements(20, 64, arithmetic=True), (64, 64, 3)),
        (tiff_of_shared_tiles(20, 2**10, zlib.compress(bytes(2**14))), (1, 320, 3)),
        *(
            (tiff_of_odd_tiles(20, 2**10, zlib.compress(bytes(2**14)), odd), (1, 320, 3))
            for odd in ("cut", "signed", "twice")
        ),
        (jpeg_of_hidden_scans(20, 64), (64, 64, 3)),
        (bmp_of_runs(64), (64, 64, 3)),
        (b"P2 4 4 255\n" + b"0 " * 16, (4, 4, 3)),
    ):
        assert decode(content).shape == shape


def test_what_a_phone_appends_to_a_large_progressive_image_does_not_count() -> None:
    image = jpeg_of_scans(10)
    for appended in (jpeg_of_scans(40, 64), np.random.default_rng(0).bytes(6_000_000)):  # a gain map, a video
        assert (image + appended).count(b"\xff\xda") > 43
        assert outline(image + appended) == (7000, 7000, 10)


def test_channels_in_tiles_of_their_own_and_tiles_of_the_same_bytes_are_taken() -> None:
    planes = tiff_of_tiles(4800, 512).replace(b"\x40\0\0\0", b"\x10\x27\0\0")  # 10,000×10,000 pixels
    planes = planes.replace(b"\x08\0\0\0\x06\0", b"\x08\0\0\0\x08\0")[:-4]
    planes += struct.pack("<HHIIHHII", 277, 4, 1, 3, 284, 4, 1, 2) + bytes(4)
    assert outline(planes) == (10_000, 10_000, 1)
    blank = tiff_of_shared_tiles(1000, 2**12, saved("JPEG", (16, 16)), compression=7)
    assert outline(blank) == (16_000, 1, 1)


def test_tiles_of_one_scan_each_are_one_pass() -> None:
    tile, tiles = saved("JPEG", (16, 16)), 1000
    shared = tiff_of_shared_tiles(tiles, 2**12, tile * tiles, compression=7)
    with pytest.raises(DataError, match="pixels times scans"):  # each tile may have all scans
        outline(shared)
    places = len(shared) - len(tile) * tiles - 8 * tiles
    start = places + 8 * tiles
    own = struct.pack(f"<{tiles}I", *range(start, len(shared), len(tile))) + struct.pack("<I", len(tile)) * tiles
    assert outline(shared[:places] + own + shared[start:]) == (16 * tiles, 1, 1)


def test_ordinary_files_pass() -> None:
    for kind in KINDS:
        assert outline(saved(kind)) == (37, 23, 1)
    for options in ({"lossless": True}, {"exif": Image.Exif().tobytes() + bytes(40)}):
        assert outline(saved("WEBP", **options)) == (37, 23, 1)
    progressive = outline(saved("JPEG", progressive=True))
    assert progressive is not None
    assert 2 <= progressive.passes <= 12
    assert outline(b"") is None
    assert outline(b"\x93NUMPY") is None


def test_scans_of_embedded_and_appended_images_do_not_count() -> None:
    preview = saved("JPEG", progressive=True) * 20
    assert preview.count(b"\xff\xda") > image_files.JPEG_SCANS
    plain = saved("JPEG")
    segment = b"\xff\xe2" + struct.pack(">H", 2 + len(preview)) + preview
    for content in (plain[:2] + segment + plain[2:], plain + preview):
        assert outline(content) == (37, 23, 1)
        assert decode(content).shape == (23, 37, 3)


def test_later_frames_of_an_animation_cost_nothing() -> None:
    first, other = Image.new("RGB", (64, 64), "red"), Image.new("RGB", (64, 64), "blue")
    for kind in ("GIF", "PNG", "WEBP"):
        file = io.BytesIO()
        first.save(file, kind, save_all=True, append_images=[other] * 50)
        assert decode(file.getvalue())[0, 0, 0] > 200  # red, like the first frame


def test_scans_are_counted_per_page() -> None:
    pages = [Image.effect_noise((64, 64), 100) for _ in range(150)]
    file = io.BytesIO()
    pages[0].save(file, "TIFF", compression="jpeg", save_all=True, append_images=pages[1:])
    assert file.getvalue().count(b"\xff\xda") > image_files.JPEG_SCANS
    assert decode(file.getvalue(), 1).shape == (64, 64, 1)


def test_a_tiff_page_with_many_scans_raises() -> None:
    scans = jpeg_of_scans(5000)
    tags = (
        (256, 7000),
        (257, 7000),
        (258, 8),
        (259, 7),
        (262, 6),
        (273, 200),
        (277, 3),
        (278, 7000),
        (279, len(scans)),
    )
    page = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    with pytest.raises(DataError, match="TIFF with more than 101 scans"):
        open_image((b"II*\0" + struct.pack("<I", 8) + page).ljust(200, b"\0") + scans)


def test_postscript_is_not_run() -> None:
    with pytest.raises(DataError, match="PostScript is not supported"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.data())
def test_corruption_raises_or_is_left_to_the_decoder(kind: str, data: st.DataObject) -> None:
    content = bytearray(saved(kind))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        outline(bytes(content[: data.draw(st.integers(0, len(content)))]))


def test_predict_training_and_check_reject_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    for label in ("a", "b"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "data" / label / f"{number}.jpg").write_bytes(saved("JPEG"))
    path = tmp_path / "data" / "a" / "0.jpg"
    path.write_bytes(jpeg_of_scans(5000))
    preprocess = Preprocess(size=(16, 16))
    config = ViTConfig(image_size=16, patch_size=8, width=48, depth=2, heads=3, classes=2)
    with pytest.raises(VitrailError, match="more than 100 scans"):
        Classifier(Bundle(create(config), preprocess, ("a", "b")), device="cpu")(path)
    source = open_data(tmp_path / "data", val=0, test=0).train
    for batches in (
        evaluation_batches(Evaluation(source, preprocess, 6, bad_files="skip"), workers=0),
        training_batches(Training(source, Stream(6, 6, seed=0), preprocess, preset("none")), 0, 1, workers=0),
    ):
        (batch,) = batches
        assert ["more than 100 scans" in bad.reason for bad in batch.bad] == [True]
    (bad,) = survey({"train": source}, workers=0).faults.values()
    assert "more than 100 scans" in bad
