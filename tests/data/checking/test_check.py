"""Every kind of problem is found, and images that were checked before are not decoded again."""

import io
import json
import os
import shutil
import struct
import tarfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.data.checking import findings, survey
from vitrail.data.checking.check import Report, check_data, quick_check
from vitrail.data.checking.findings import Finding
from vitrail.data.decode import open_image
from vitrail.data.sources.folders import Folder, open_folder
from vitrail.data.sources.opening import open_data
from vitrail.data.sources.source import Arrays, Source, digits
from vitrail.data.sources.splits import Splits, split_source
from vitrail.errors import DataError
from vitrail.training.recipe_files import read_recipe


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


def save_image(path: Path, seed: int, width: int = 80, height: int = 60, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    Image.fromarray(noise).resize((width, height)).convert(mode).save(path)
    return path


def gigapixel_png() -> bytes:
    """Return a PNG of a few bytes that declares 40,000 × 40,000 pixels."""

    def piece(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", header) + piece(b"IDAT", zlib.compress(b"")) + piece(b"IEND", b"")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Twelve good images of two classes in each of two splits."""
    seed = 0
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            for number in range(3):
                save_image(tmp_path / "data" / split / label / f"{number}.jpg", seed := seed + 1)
    return tmp_path / "data"


def opened(root: Path) -> Splits:
    train, val = (open_folder(root / split) for split in ("train", "val"))
    return Splits(train, val, None, {})


def checked(root: Path, *, size: int = 64, workers: int = 0) -> Report:
    return check_data(opened(root), size=size, workers=workers)


def only(report: Report, kind: str) -> Finding:
    return next(finding for finding in report.findings if finding.kind == kind)


def test_good_data_has_no_findings(root: Path) -> None:
    report = checked(root)
    assert report.findings == ()
    assert report.summary == "12 images in 2 classes; no problems found"
    assert report.counts == {"train": {"cat": 3, "dog": 3}, "val": {"cat": 3, "dog": 3}}
    assert (report.formats, report.modes) == ({"JPEG": 12}, {"colour": 12})
    assert [tuple(span) for span in report.short_sides] == [(32, 64, 12)]
    assert report.bytes == sum(path.stat().st_size for path in root.rglob("*.jpg"))


def test_unreadable_images_are_reported_with_the_reason(root: Path) -> None:
    cats = root / "train" / "cat"
    (cats / "text.jpg").write_text("no image")
    (cats / "empty.jpg").write_bytes(b"")
    whole = save_image(cats / "whole.jpg", 99).read_bytes()
    (cats / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (cats / "giga.png").write_bytes(gigapixel_png())
    report = checked(root)
    reasons = {Path(bad.image.name).name: bad.reason for bad in report.unreadable}
    assert set(reasons) == {"text.jpg", "empty.jpg", "cut.jpg", "giga.png"}
    assert "it is not an image" in reasons["text.jpg"]
    assert reasons["empty.jpg"] == "the file is empty"
    assert "a corrupt JPEG" in reasons["cut.jpg"]
    assert "more than 178,956,970 pixels, the limit" in reasons["giga.png"]
    assert {(bad.image.split, bad.image.label) for bad in report.unreadable} == {("train", "cat")}
    assert report.findings[0].kind == "unreadable"
    assert report.findings[0].serious
    assert report.summary.startswith("17 images in 2 classes; 4 cannot be read")
    assert report.usable


def test_a_file_that_cannot_be_opened(root: Path) -> None:
    splits = opened(root)
    (root / "train" / "cat" / "1.jpg").unlink()
    (bad,) = check_data(splits, size=64).unreadable
    assert (Path(bad.image.name).name, bad.reason) == ("1.jpg", "No such file or directory")


def test_a_failing_decoder_is_a_finding(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(stored: object) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(survey, "open_image", breaks)
    report = checked(root)
    assert not report.usable
    assert report.unreadable[0].reason == "the decoder failed with ZeroDivisionError: division by zero"


def test_running_out_of_memory_is_not_cached(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(survey, "open_image", fail)
        assert {bad.reason for bad in checked(root).unreadable} == {"not enough memory to decode it"}
    assert not checked(root).unreadable


def test_duplicates_by_kind(root: Path) -> None:
    shutil.copy(root / "train/cat/0.jpg", root / "train/cat/again.jpg")
    shutil.copy(root / "train/cat/1.jpg", root / "val/cat/leak.jpg")
    shutil.copy(root / "train/cat/2.jpg", root / "train/dog/other.jpg")
    report = checked(root)
    result = {copies.kind: [Path(which.name).name for which in copies.images] for copies in report.duplicates}
    assert result == {
        "conflicting": ["2.jpg", "other.jpg"],
        "across": ["1.jpg", "leak.jpg"],
        "within": ["0.jpg", "again.jpg"],
    }
    assert [finding.kind for finding in report.findings] == ["conflicting", "across", "within"]
    assert [finding.serious for finding in report.findings] == [True, True, False]
    assert "1 duplicate with different labels, 1 duplicate across splits" in report.summary
    detail = only(report, "across").details[0]
    assert "1.jpg (train, cat) = " in detail
    assert "leak.jpg (val, cat)" in detail


def test_many_copies_are_one_group_and_empty_files_are_not(root: Path) -> None:
    for number in range(4):
        shutil.copy(root / "train/cat/0.jpg", root / f"train/cat/copy{number}.jpg")
        (root / f"train/dog/empty{number}.jpg").write_bytes(b"")
    report = checked(root)
    assert [len(copies.images) for copies in report.duplicates] == [5]
    assert only(report, "within").count == 4


def test_duplicates_among_arrays() -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 40, 40), np.uint8)
    images[3] = images[0]
    source = Arrays(images, np.array([0, 0, 1, 1, 0, 1]), ("a", "b"))
    (copies,) = check_data(Splits(source, None, None, {}), size=64).duplicates
    assert (copies.kind, [which.name for which in copies.images]) == ("conflicting", ["image 0", "image 3"])


def test_sizes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_image(root / "train/cat/tiny.jpg", 50, 40, 20)
    save_image(root / "train/cat/long.jpg", 51, 400, 80)
    save_image(root / "train/cat/huge.jpg", 52, 300, 200)
    monkeypatch.setattr(findings, "HUGE_PIXELS", 50_000)
    report = checked(root)
    for kind, name, size in (("tiny", "tiny", "40×20"), ("long", "long", "400×80"), ("huge", "huge", "300×200")):
        (detail,) = only(report, kind).details
        assert detail.endswith(f"{name}.jpg: {size}")
    assert only(report, "huge").text == "1 image has more than 0.05 megapixels"
    # For a larger model all but the largest one are tiny: a quarter of 512 is 128 pixels.
    assert only(checked(root, size=512), "tiny").count == 14


def test_size_after_exif_rotation(root: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(save_image(root / "train/cat/turned.jpg", 60, 300, 40))
    image.save(root / "train/cat/turned.jpg", exif=exif)
    assert only(checked(root), "long").details[0].endswith("turned.jpg: 40×300")


def test_modes(root: Path) -> None:
    for number, (mode, suffix) in enumerate((("L", "jpg"), ("RGBA", "png"), ("CMYK", "jpg"), ("P", "gif"))):
        save_image(root / f"train/cat/{mode}.{suffix}", 70 + number, mode=mode)
    Image.fromarray(np.full((60, 80), 40_000, np.uint16)).save(root / "train/cat/deep.png")
    report = checked(root)
    assert report.modes == {"colour": 12, "16-bit": 1, "CMYK": 1, "alpha": 1, "grey": 1, "palette": 1}
    finding = only(report, "modes")
    assert (finding.count, finding.brief, finding.serious) == (5, "mixed modes", False)
    assert sorted(Path(line.split(":")[0]).name for line in finding.details) == sorted(
        ["L.jpg", "RGBA.png", "CMYK.jpg", "P.gif", "deep.png"]
    )
    assert report.formats == {"JPEG": 14, "PNG": 2, "GIF": 1}


def test_16_bit_colour_is_detected_from_the_header() -> None:
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 1, 1, 16, 2, 0, 0, 0)
    content = header + struct.pack(">I", zlib.crc32(header[12:])) + struct.pack(">I4s", 9, b"IDAT") + b"x" * 9
    assert survey.stored_format(content) == ("PNG", "16-bit", 3)


def test_images_with_any_number_of_channels() -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 5), np.uint8)
    report = check_data(Splits(Arrays(images, np.array([0, 0, 1, 1]), ("a", "b")), None, None, {}), size=64)
    assert (report.unreadable, report.modes) == ((), {"5 channels": 4})


def test_missing_and_unbalanced_classes(root: Path) -> None:
    shutil.rmtree(root / "val" / "dog")
    for number in range(33):
        save_image(root / "train" / "cat" / f"more{number}.jpg", 100 + number)
    cats = open_folder(root / "val")
    val = Arrays(np.stack([np.full((40, 40), n, np.uint8) for n in range(len(cats))]), np.zeros(3, int), ("cat", "dog"))
    report = check_data(Splits(open_folder(root / "train"), val, None, {}), size=64)
    missing, unbalanced = only(report, "missing"), only(report, "unbalanced")
    assert (missing.details, missing.text) == (("dog: none in val",), "1 class is missing from a split")
    assert "class 'cat' has 12 times as many training images as class 'dog', 36 to 3" in unbalanced.text
    assert "classes unbalanced 12:1" in report.summary


def test_images_of_a_single_colour(root: Path) -> None:
    for name, colour in (("black.jpg", (0, 0, 0)), ("red.png", (200, 10, 20)), ("grey.gif", (128, 128, 128))):
        Image.new("RGB", (70, 64), colour).save(root / "train/cat" / name)
    nearly = np.zeros((64, 70, 3), np.uint8)
    nearly[40, 41] = 255  # a single bright pixel is content
    Image.fromarray(nearly).save(root / "train/cat/star.png")
    for _ in range(2):  # the second time from the cache
        finding = only(checked(root), "flat")
        assert (finding.count, finding.text) == (3, "3 images have only a single colour")
        assert sorted(Path(line.split(" (")[0]).name for line in finding.details) == [
            "black.jpg",
            "grey.gif",
            "red.png",
        ]


def test_advice_names_the_option(root: Path) -> None:
    for number in range(33):
        save_image(root / "train" / "cat" / f"more{number}.jpg", 100 + number)
    (root / "train/cat/empty.jpg").write_bytes(b"")
    save_image(root / "train/cat/tiny.jpg", 50, 40, 20)
    save_image(root / "train/cat/long.jpg", 51, 800, 100)
    report = checked(root, size=96)
    options = {
        "unbalanced": "--set data.balance=true",
        "unreadable": "--set data.bad_files=refuse",
        "tiny": "--set model.image_size=16",
        "long": "--set preprocess.resize=contain",
    }
    for kind, option in options.items():
        assert option in only(report, kind).advice
        read_recipe("scratch-small", [option.removeprefix("--set ")])  # the option exists


def test_skipped_files_are_listed_and_misnamed_images_reported(root: Path) -> None:
    cats = root / "train" / "cat"
    cats.joinpath("0.jpg").rename(cats / "upload.php")
    Image.new("RGB", (64, 64)).save(root / "train/dog/noending", "PNG")
    cats.joinpath("notes.txt").write_text("no image")
    os.mkfifo(cats / "pipe")  # reading it would block forever
    save_image(root / "train" / "loose.jpg", 77)
    for report in (checked(root), quick_check(opened(root), size=64)):
        misnamed, skipped = only(report, "misnamed"), only(report, "skipped")
        assert misnamed.details == (
            f"{cats}/upload.php: a JPEG; rename it to upload.jpg",
            f"{root}/train/dog/noending: a PNG; rename it to noending.png",
        )
        assert misnamed.text == "2 files are images by content but not by name, and are not used"
        assert skipped.details == (f"{cats}/notes.txt", f"{cats}/pipe")
        assert only(report, "outside").details == (f"{root}/train/loose.jpg",)
        assert [misnamed.serious, skipped.serious] == [True, False]


def test_a_quick_check_counts_what_it_does_not_look_into(root: Path) -> None:
    for number in range(5):
        (root / "train" / "cat" / f"{number}.txt").write_text("x")
    result = only(quick_check(opened(root), size=64, most=2), "skipped")
    assert (result.count, len(result.details)) == (5, 2)
    assert result.text.startswith("5 files were skipped")


def test_skipped_files_in_shards_are_listed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.sources.index_files.YOUNG_NS", -(10**12))
    names = {}
    for label in ("cat", "dog"):
        for number in range(3):
            names[f"{label}{number}.jpg"] = (root / "train" / label / f"{number}.jpg").read_bytes()
            names[f"{label}{number}.txt"] = label.encode()
    names["cat0.seg.png"] = b"\x89PNG of which class"  # it belongs to an image, like a mask
    names["in/photo.v2.jpg"] = names["cat1.jpg"]
    names["upload.php"] = names["cat2.jpg"]
    names["upload.txt"] = b"cat"
    names[".hidden"] = names["__MACOSX/x.php"] = names["dog1.jpg"]
    names["notes.md"] = b"no image"
    shard = tmp_path / "data.tar"
    with tarfile.open(shard, "w") as tar:
        for name, content in names.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    for _ in range(2):  # the second time from the index
        splits = open_data(shard, val=0, test=0)
        for report in (check_data(splits, size=64), quick_check(splits, size=64)):
            assert only(report, "misnamed").details == (
                f"{shard}/in/photo.v2.jpg: a JPEG; rename it to photo_v2.jpg (in a shard the suffix starts at the "
                "first dot)",
                f"{shard}/upload.php: a JPEG; rename it to upload.jpg",
            )
            assert only(report, "skipped").details == tuple(
                f"{shard}/{name}" for name in ("cat0.seg.png", "upload.txt", "notes.md")
            )
            assert report.images == 6


def test_advice_about_one_image_is_singular(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.checking.findings.HUGE_PIXELS", 50_000)
    Image.new("RGB", (70, 64)).save(root / "train/cat/black.jpg")
    (root / "train/cat/empty.jpg").write_bytes(b"")
    save_image(root / "train/cat/huge.jpg", 52, 300, 200)
    save_image(root / "train/cat/tiny.jpg", 50, 40, 20)
    save_image(root / "train/cat/long.jpg", 51, 400, 80)
    save_image(root / "train/loose.jpg", 77)
    (root / "train/cat/0.jpg").rename(root / "train/cat/upload.php")
    (root / "train/cat/notes.txt").write_text("no image")
    shutil.copy(root / "train/cat/1.jpg", root / "val/dog/other.jpg")
    report = checked(root, size=96)
    advice = {finding.kind: finding.advice for finding in report.findings if finding.count == 1}
    kinds = {"flat", "unreadable", "huge", "tiny", "long", "outside", "misnamed", "skipped", "conflicting"}
    assert kinds <= advice.keys()
    assert advice["flat"] == "remove it, or export it again"
    assert advice["unreadable"].startswith("fix or remove it; training would replace it by another image")
    for kind in kinds:
        assert not {"them", "their", "they", "ones", "others", "each"} & set(advice[kind].replace(",", "").split()), (
            kind
        )


def test_faults_of_open_data_are_findings(root: Path) -> None:
    report = check_data(opened(root), size=64, faults=["one link is broken", "a class is empty"])
    assert only(report, "faults").details == ("one link is broken", "a class is empty")
    assert (report.findings[0].kind, report.faults) == ("faults", ("one link is broken", "a class is empty"))
    assert json.loads(json.dumps(report.as_dict()))["faults"] == list(report.faults)


def test_findings_have_advice_and_the_report_is_json(root: Path) -> None:
    (root / "train/cat/empty.jpg").write_bytes(b"")
    shutil.copy(root / "train/cat/1.jpg", root / "val/dog/leak.jpg")
    save_image(root / "train/cat/tiny.jpg", 50, 40, 20, mode="L")
    report = checked(root)
    assert all(finding.advice and finding.text and finding.brief for finding in report.findings)
    result = json.loads(json.dumps(report.as_dict()))
    assert result["summary"] == report.summary
    assert result["unreadable"][0]["reason"] == "the file is empty"
    assert result["duplicates"][0]["images"][1]["split"] == "val"
    assert [finding["kind"] for finding in result["findings"]] == ["unreadable", "conflicting", "tiny", "modes"]
    assert result["short_sides"][0] == {"low": 0, "high": 32, "images": 1}


def test_workers_give_the_same_report(root: Path) -> None:
    for number in range(40):
        save_image(root / f"train/cat/more{number}.jpg", 200 + number)
    for number in range(0, 40, 7):
        (root / f"train/dog/bad{number}.jpg").write_bytes(b"bad %d" % number)
    seen: list[tuple[int, int]] = []
    alone = check_data(opened(root), cache=False)
    together = check_data(opened(root), workers=2, cache=False, on_progress=lambda *now: seen.append(now))
    assert together == alone
    assert seen[-1] == (58, 58)
    assert seen == sorted(seen)


def test_a_killed_worker_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        save_image(root / f"train/cat/more{number}.jpg", 200 + number)
    monkeypatch.setattr(survey, "_inspect_chunk", lambda *_: os._exit(1))
    with pytest.raises(DataError, match="memory ran out; use fewer workers"):
        check_data(opened(root), workers=2, cache=False)


# ── remembering ──


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Collect the content of every image that is opened."""
    contents: list[bytes] = []

    def counted(stored: bytes) -> object:
        contents.append(stored)
        return open_image(stored)

    monkeypatch.setattr(survey, "open_image", counted)
    return contents


def test_only_new_and_changed_images_are_decoded_again(root: Path, decoded: list[bytes]) -> None:
    (root / "train/cat/bad.jpg").write_bytes(b"bad")
    first = checked(root)
    assert len(decoded) == 13
    assert checked(root) == first
    assert len(decoded) == 13
    save_image(root / "train/dog/0.jpg", 300, 90, 70)
    save_image(root / "train/dog/new.jpg", 301)
    changed = checked(root)
    assert len(decoded) == 15
    assert changed.images == 14
    assert changed.unreadable == first.unreadable
    assert changed == check_data(opened(root), size=64, cache=False)


@dataclass(frozen=True, eq=False)
class Stamped:
    """A folder whose stamps never change, as when a disk fails or a network share is locked."""

    base: Folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def __len__(self) -> int:
        return len(self.base)

    def stamp(self, index: int) -> tuple[int, int]:
        return 1, 1


def test_unreadable_and_changed_files_are_noticed_despite_equal_stamps(root: Path, decoded: list[bytes]) -> None:
    splits = Splits(Stamped(open_folder(root / "train")), None, None, {})
    assert check_data(splits, size=64).findings == ()
    assert check_data(splits, size=64).findings == ()
    assert len(decoded) == 6
    gone, flipped = root / "train/cat/1.jpg", root / "train/dog/2.jpg"
    gone.unlink()
    gone.mkdir()  # opening it fails like a locked file, also for root
    content = bytearray(flipped.read_bytes())
    content[2:4] = b"\0\0"
    flipped.write_bytes(content)
    reasons = {Path(bad.image.name).name: bad.reason for bad in check_data(splits, size=64).unreadable}
    assert reasons["1.jpg"] == "Is a directory"
    assert "2.jpg" in reasons
    assert len(decoded) == 7


def test_a_moved_file_is_not_decoded_again(root: Path, decoded: list[bytes]) -> None:
    checked(root)
    (root / "train/cat/0.jpg").rename(root / "train/cat/moved.jpg")
    assert checked(root).unreadable == ()
    assert len(decoded) == 12


def test_an_interrupted_second_check_keeps_the_cache(root: Path, decoded: list[bytes]) -> None:
    checked(root)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_data(opened(root), on_progress=interrupt)
    checked(root)
    assert len(decoded) == 12


def test_a_corrupt_cache_is_ignored(root: Path, decoded: list[bytes], tmp_path: Path) -> None:
    first = checked(root)
    files = list((tmp_path / "cache").rglob("*.npz"))
    assert files
    assert not list((tmp_path / "cache").rglob("*.part"))
    for content in (b"", b"no zip", files[0].read_bytes()[:200]):
        for file in files:
            file.write_bytes(content)
        assert checked(root) == first
    assert len(decoded) == 4 * 12


def test_an_unwritable_cache_is_ignored(root: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert checked(root).images == 12


def test_an_interrupted_check_is_cached(root: Path, decoded: list[bytes]) -> None:
    for number in range(20):
        save_image(root / f"train/cat/more{number}.jpg", 200 + number)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_data(opened(root), on_progress=interrupt)
    assert len(decoded) == survey.CHUNK
    check_data(opened(root))
    assert len(decoded) == 32


def test_images_in_memory_are_not_cached(decoded: list[bytes], tmp_path: Path) -> None:
    splits = split_source(digits())
    assert check_data(splits).checked == check_data(splits).checked == 1797
    assert len(decoded) == 2 * 1797
    assert not list(tmp_path.rglob("*.npz"))


# ── the quick one ──


def test_the_quick_check_reads_headers_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = save_image(root / "train/cat/whole.jpg", 99).read_bytes()
    (root / "train/cat/cut.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "train/cat/text.jpg").write_text("no image")
    save_image(root / "train/cat/tiny.jpg", 50, 40, 20)
    report = quick_check(opened(root), size=64)
    assert [Path(bad.image.name).name for bad in report.unreadable] == ["text.jpg"]  # the other has a valid header
    assert (report.decoded, report.duplicates, report.checked, report.compared) == (False, (), 16, 16)
    assert report.not_checked[0] == "corruption after the header of a file"
    assert only(report, "tiny").count == 1
    few = quick_check(opened(root), size=64, most=5)
    assert (few.checked, few.compared, few.images) == (5, 16, 16)
    assert "16 images in 2 classes (headers of 5 read, contents of 16 compared)" in few.summary
    assert few == quick_check(opened(root), size=64, most=5)


def test_the_quick_check_finds_duplicates_and_conflicting_labels(root: Path) -> None:
    shutil.copy(root / "train/cat/0.jpg", root / "train/cat/again.jpg")
    shutil.copy(root / "train/cat/1.jpg", root / "val/cat/leak.jpg")
    shutil.copy(root / "train/cat/2.jpg", root / "train/dog/other.jpg")
    quick, whole = quick_check(opened(root), size=64, most=2), checked(root)
    assert sorted(quick.duplicates or ()) == sorted(whole.duplicates or ())
    assert [finding.kind for finding in quick.findings][:3] == ["conflicting", "across", "within"]
    assert whole.not_checked == ("near-duplicates: the same image cropped, resized or re-encoded",)


def test_unchecked_duplicates_are_not_an_empty_list(root: Path) -> None:
    report = quick_check(opened(root), size=64, seconds=0)
    assert (report.compared, report.duplicates) == (1, None)
    result = report.as_dict()
    assert result["duplicates"] == "not checked among all"
    assert result["not_checked"][0] == "duplicates among 11 of the images"


def test_the_quick_check_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Arrays):
        def read(self, index: int) -> np.ndarray:
            time.sleep(0.01)
            return super().read(index)

    source: Source = Slow(np.zeros((500, 40, 40), np.uint8), np.arange(500) % 2, ("a", "b"))
    began = time.monotonic()
    report = quick_check(Splits(source, None, None, {}), seconds=0.1)
    assert time.monotonic() - began < 2
    assert 1 <= report.checked < 500
