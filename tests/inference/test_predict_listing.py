"""Listing images to predict: every kind of place, in a fixed order, with constant memory."""

import io
import json
import os
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet
import pytest
from PIL import Image
from tests.support.prediction_jobs import tiny_images, tiny_pixels

from vitrail.data.decode import decode
from vitrail.data.inputs import A_URL, Item
from vitrail.errors import DataError
from vitrail.inference import listing
from vitrail.inference.listing import list_items
from vitrail.inference.skipped import SkippedFiles


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


def names(items: Iterable[Item]) -> list[str]:
    return [os.fsdecode(item.name) for item in items]


def touch(*paths: str | bytes) -> None:
    for path in paths:
        os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
        with open(path, "wb"):
            pass


def stdin(content: bytes) -> io.BufferedReader:
    return io.BufferedReader(io.BytesIO(content))


def test_files_keep_their_order() -> None:
    touch("b.png", "a.png", "scan")
    assert names(list_items(["b.png", "scan", "a.png", "b.png"])) == ["b.png", "scan", "a.png", "b.png"]


def test_folders_are_sorted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["f/2.JPG", "f/10.png", "f/b/1.webp", "f/b/deep/er/0.gif", "f/a/9.tif", "f/c.d/x.y.jpeg"]
    touch(*files, "f/notes.txt", "f/.hidden.png", "f/.git/1.png", "f/__MACOSX/1.png", "f/png")
    expected = ["f/10.png", "f/2.JPG", "f/a/9.tif", "f/b/1.webp", "f/b/deep/er/0.gif", "f/c.d/x.y.jpeg"]
    assert names(list_items(["f"])) == expected
    touch(*(f"many/{number:03d}.png" for number in range(23)))
    whole = names(list_items(["many", "f"]))
    monkeypatch.setattr(listing, "AT_ONCE", 5)
    assert names(list_items(["many", "f"])) == whole
    assert len(whole) == 23 + len(expected)


def test_masks_beside_images_are_not_listed() -> None:
    touch(
        "d/images/1.jpg", "d/masks/1.png", "d/val/Images/2.jpg", "d/val/Masks/2.png", "d/classes.txt", "e/masks/3.png"
    )
    assert names(list_items(["d"])) == ["d/images/1.jpg", "d/val/Images/2.jpg"]
    assert names(list_items(["e", "d/masks"])) == ["e/masks/3.png", "d/masks/1.png"]


def test_links_in_folders() -> None:
    touch("f/a.png", "elsewhere/b.png")
    os.symlink("../elsewhere", "f/linked")
    os.symlink("..", "f/loop")
    os.symlink("nothing", "f/gone.png")
    items = list(list_items(["f"]))
    assert names(items[:3]) == ["f/a.png", "f/gone.png", "f/linked/b.png"]
    with pytest.raises(DataError, match="it cannot be read: No such file"):
        items[1].read()
    loops = [item for item in items if item.error is not None]
    assert len(loops) == 1
    assert loops[0].error == "a link to a folder that contains it; remove the link"


def test_patterns() -> None:
    touch("p/a1.jpg", "p/b1.jpg", "p/b2.png", "p/q/b3.jpg", "p/q/r/b4.jpg", "p/b.txt", "p/.b5.jpg", "p/[x].jpg")
    assert names(list_items(["p/b*"])) == ["p/b1.jpg", "p/b2.png"]
    assert names(list_items(["p/?1.jpg"])) == ["p/a1.jpg", "p/b1.jpg"]
    assert names(list_items(["p/**/b*.jpg"])) == ["p/b1.jpg", "p/q/b3.jpg", "p/q/r/b4.jpg"]
    assert names(list_items(["p/**"])) == [
        "p/[x].jpg",
        "p/a1.jpg",
        "p/b1.jpg",
        "p/b2.png",
        "p/q/b3.jpg",
        "p/q/r/b4.jpg",
    ]
    assert names(list_items(["p/*/b[0-9].jpg"])) == ["p/q/b3.jpg"]
    assert names(list_items([str(Path("p").absolute()) + "/a*"])) == [str(Path("p/a1.jpg").absolute())]
    assert names(list_items(["p/[x].jpg"])) == ["p/[x].jpg"]  # a file of that name takes precedence
    with pytest.raises(DataError, match=r"no image matches p/\*\.tiff; correct the pattern"):
        list_items(["p/*.tiff"])


def test_manifests_keep_every_row() -> None:
    tiny_images(Path("m/images"), 2)
    rows = ["images/00001.png", "images/gone.png", "images/00000.png", "images/00001.png", "ftp://x.org/1.jpg"]
    Path("m/list.csv").write_text("label,path\n" + "".join(f"7,{row}\n" for row in rows) + "3, \n")
    items = list(list_items(["m/list.csv"]))
    assert names(items) == [*(f"m/{row}" for row in rows[:4]), rows[4], "m/list.csv, line 7"]
    assert np.array_equal(decode(items[2].read()), tiny_pixels(0))
    assert items[4].error == A_URL
    assert "instead of an image path" in str(items[5].error)
    Path("m/list.jsonl").write_text("".join(json.dumps({"file": row}) + "\n" for row in rows))
    assert names(list_items(["m/list.jsonl"])) == names(items[:5])
    Path("m/odd.csv").write_text("label,path\n7,images/00001.png,\n7,images/00000.png\n")
    odd = list(list_items(["m/odd.csv"]))
    assert names(odd) == ["m/odd.csv, line 2", "m/images/00000.png"]
    assert "has 3 fields, but the header has 2" in str(odd[0].error)
    arrow.parquet.write_table(arrow.table({"image": rows}), "m/list.parquet")
    assert names(list_items(["m/list.parquet"])) == names(items[:5])


def test_images_inside_parquet() -> None:
    paths = tiny_images(Path("images"), 40)
    rows = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    arrow.parquet.write_table(arrow.table({"image": [*rows, None]}), "data.parquet")
    items = list(list_items(["data.parquet"]))
    assert names(items)[::40] == ["data.parquet, row 1", "data.parquet, row 41"]
    assert np.array_equal(decode(items[39].read()), tiny_pixels(39))
    assert items[40].error is not None


def test_a_folder_of_parquet_files() -> None:
    os.mkdir("shards")
    for number in range(2):
        table = arrow.table({"bytes": [b"%d" % number, b"x"]})
        arrow.parquet.write_table(table, f"shards/{number}.parquet")
    expected = [f"shards/{file}.parquet, row {row}" for file in range(2) for row in (1, 2)]
    for place in ("shards", "shards/*.parquet", "shards/{0..1}.parquet"):
        assert names(list_items([place])) == expected


def test_invalid_manifests() -> None:
    for name, content, words in (
        ("a.csv", b"what,label\n1,2\n", "has no image column"),
        ("b.csv", b"path\n\xe9.png\n", "is not UTF-8"),
        ("c.jsonl", b"[1]\n", "is not a JSON object"),
        ("d.parquet", b"PAR2", "cannot be read as Parquet"),
    ):
        Path(name).write_bytes(content)
        with pytest.raises(DataError, match=words):
            list(list_items([name]))


def packed(path: str, images: list[Path]) -> None:
    with tarfile.open(path, "w") as tar:
        for image in images:
            tar.add(image, arcname=f"set/{image.name}")


def test_tars() -> None:
    images = tiny_images(Path("images"), 4)
    Path("images/00000.cls").write_text("no number")  # labels are ignored
    for number in range(2):
        packed(f"s-{number}.tar", [*images[2 * number : 2 * number + 2], Path("images/00000.cls")])
    expected = [f"s-{number // 2}.tar/set/{number:05d}.png" for number in range(4)]
    for places in (["s-0.tar", "s-1.tar"], ["s-{0..1}.tar"], ["s-*.tar"]):
        items = list(list_items(places))
        assert names(items) == expected
        assert np.array_equal(decode(items[3].read()), tiny_pixels(3))
    os.makedirs("shards")
    os.rename("s-0.tar", "shards/s-0.tar")
    assert names(list_items(["shards"])) == ["shards/s-0.tar/set/00000.png", "shards/s-0.tar/set/00001.png"]
    os.truncate("s-1.tar", 2000)
    cut = list(list_items(["s-1.tar"]))
    assert names(cut) == ["s-1.tar/set/00002.png", "s-1.tar"]
    assert "is truncated" in str(cut[-1].error)
    os.truncate("s-1.tar", 600)
    with pytest.raises(DataError, match="the tar was truncated while it was read"):
        cut[0].read()


def test_skipped_files_are_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    photo = tiny_images(Path("p"), 3)[0].read_bytes()
    touch("p/notes.txt", "p/.hidden", "p/in/list.csv", "p/__MACOSX/x.php")
    Path("p/upload.php").write_bytes(photo)
    for at_once in (65_536, 2):  # a folder that is scanned several times is counted once
        monkeypatch.setattr(listing, "AT_ONCE", at_once)
        for place, others in (("p", ["p/notes.txt", "p/in/list.csv"]), ("p/*", ["p/notes.txt"])):
            skipped = SkippedFiles()
            assert len(list(list_items([place], skipped=skipped))) == 3
            assert (skipped.count, skipped.images, skipped.named) == (len(others) + 1, 1, others)
            assert skipped.misnamed == ["p/upload.php: a PNG; rename it to upload.png"]
    touch("p/in/a.bin", "p/in/b.bin", "p/in/c.bin", "p/in/d.bin")
    skipped = SkippedFiles()
    list(list_items(["p"], skipped=skipped))
    assert skipped.messages() == [
        "1 file is an image by content but not by name; skipped (p/upload.php: a PNG; rename it to upload.png)",
        "6 files were skipped: no image suffix (p/notes.txt, p/in/a.bin, p/in/b.bin, "
        "p/in/c.bin, p/in/d.bin, and 1 more)",
    ]


def test_skipped_files_in_tars_are_counted_and_named() -> None:
    images = tiny_images(Path("p"), 2)
    Path("p/upload.php").write_bytes(images[0].read_bytes())
    touch("p/00000.cls", "p/notes.md", "p/.hidden")
    files = [*images, *(Path("p", name) for name in ("upload.php", "00000.cls", "notes.md", ".hidden"))]
    os.makedirs("shards")
    packed("shards/s.tar", files)
    touch("shards/classes.txt", "shards/list.csv")
    for place, others in (("shards/s.tar", []), ("shards", ["shards/list.csv"])):
        skipped = SkippedFiles()
        assert len(list(list_items([place], skipped=skipped))) == 2
        assert skipped.named == ["shards/s.tar/set/notes.md", *others]
        assert skipped.misnamed == ["shards/s.tar/set/upload.php: a PNG; rename it to upload.png"]


def test_lists_from_stdin() -> None:
    touch("a.png", "folder/x.png")
    content = b"a.png\r\n\nfolder\nftp://x.org/1.png\na.png\ncaf\xe9.png"
    items = list(list_items(["-"], stdin=stdin(content)))
    assert [item.name for item in items] == [b"a.png", b"folder", b"ftp://x.org/1.png", b"a.png", b"caf\xe9.png"]
    with pytest.raises(DataError, match=r"^a folder; pass it on the command line"):
        items[1].read()
    assert items[2].error == A_URL
    null = list(list_items(["-", "a.png"], stdin=stdin(b"new\nline.png\0b.png\0"), null=True))
    assert [item.name for item in null] == [b"new\nline.png", b"b.png", b"a.png"]
    with pytest.raises(DataError, match=r"NUL bytes; .* add -0"):
        list(list_items(["-"], stdin=stdin(b"a.png\0b.png\0")))


def test_digits() -> None:
    items = list(list_items(["digits"]))
    assert (len(items), names(items[:1])) == (1797, ["digits/0"])
    assert decode(items[0].read(), 1).shape == (8, 8, 1)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("gone.png", r"gone\.png does not exist; give files, folders, patterns, manifests .* or - to read paths"),
        ("ftp://example.org/a.png", r"ftp://example\.org/a\.png is a URL, which is not downloaded; download it"),
        ("sftp://host/a.png", "download it first"),
        ("all.tar.gz", r"all\.tar\.gz is compressed; unpack it"),
    ],
)
def test_places_that_raise_immediately(place: str, words: str) -> None:
    touch("all.tar.gz")
    with pytest.raises(DataError, match=words):
        list_items([place])


def test_special_files() -> None:
    os.mkfifo("pipe.png")
    (item,) = list_items(["pipe.png"])
    with pytest.raises(DataError, match="a pipe, a socket or a device"):
        item.read()


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Endless(io.RawIOBase):
    """A list of paths generated while it is read."""

    def __init__(self, paths: int) -> None:
        self.left = paths

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        lines = min(self.left, len(buffer) // 12)
        text = b"".join(b"%07d.png\n" % (self.left - line) for line in range(lines))
        self.left -= lines
        buffer[: len(text)] = text
        return len(text)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read as Linux shows it")
@pytest.mark.slow
def test_a_million_paths_in_constant_memory() -> None:
    items = list_items(["-"], stdin=io.BufferedReader(Endless(1_000_000)))
    for _ in range(10_000):
        next(items)
    before = resident()
    assert sum(1 for _ in items) == 990_000
    assert resident() - before < 4e6


def test_items_pickle_small() -> None:
    Image.fromarray(tiny_pixels(0)).save("a.png")
    (item,) = list_items(["a.png"])
    assert item == Item(b"a.png", b"a.png")
    assert item.content is None
