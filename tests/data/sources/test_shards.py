"""Tar shards in WebDataset layout, compared with Python's `tarfile`."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.sources import index_files, shards
from vitrail.data.sources.shards import open_shards
from vitrail.data.sources.tar import expand_pattern, members
from vitrail.data.sources.targets import Targets, targets_of
from vitrail.errors import DataError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}
LONG = "deep/" * 30 + "image"
"""157 characters, which the ustar format stores in two pieces."""
GOOD = [("a.jpg", b"A"), ("a.cls", b"0")]
LONGER = "folder_of_images/" * 20 + "image" + "x" * 80


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VITRAIL_CACHE", str(folder))
    monkeypatch.setattr(index_files, "YOUNG_NS", -(10**12))  # treat new files as old ones, whose stamps can be trusted
    return folder


def write(path: Path, files: list[tuple[str, bytes]], form: str = "pax") -> Path:
    with tarfile.open(path, "w", format=FORMATS[form], encoding="utf-8") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def listed(path: Path) -> list[tuple[bytes, int, int]]:
    with open(path, "rb") as file:
        return [(m.name, m.start, m.size) for m in members(str(path), file)]


def as_tarfile_lists(path: Path) -> list[tuple[bytes, int, int]]:
    with tarfile.open(path, "r:") as tar:
        return [(os.fsencode(m.name), m.offset_data, m.size) for m in tar if m.isfile()]


@pytest.mark.parametrize("form", FORMATS)
def test_images_and_labels(form: str, tmp_path: Path) -> None:
    names = ["a", "b/c", LONG, "mäuse/猫"] + ([LONGER, "x" * 300] if form != "ustar" else [])
    files = []
    for number, name in enumerate(names):
        files += [(f"{name}.jpg", name.encode() * 100), (f"{name}.cls", str(number % 3).encode())]
    path = write(tmp_path / "one.tar", files, form)
    assert listed(path) == as_tarfile_lists(path)
    source = open_shards([str(path)])
    assert source.classes == ("0", "1", "2")
    assert source.labels.tolist() == [number % 3 for number in range(len(names))]
    assert [source.read(number) for number in range(len(source))] == [name.encode() * 100 for name in names]
    assert [source.key(number) for number in range(len(source))] == [f"one.tar/{name}.jpg" for name in names]
    assert source.name(1) == f"{path}/b/c.jpg"


def test_several_labels_or_numbers(tmp_path: Path) -> None:
    def targets(*labels: bytes) -> Targets:
        files = [
            (f"{n}.{suffix}", content)
            for n, label in enumerate(labels)
            for suffix, content in (("jpg", b""), ("json", label))
        ]
        found = targets_of(open_shards([str(write(tmp_path / "a.tar", files))]))
        assert found is not None
        return found

    several = targets(b'{"label": ["x", "y"]}', b'{"label": []}', b'{"cls": "y"}')
    assert (several.names, several.values.tolist()) == (("x", "y"), [[1, 1], [0, 0], [0, 1]])
    numbers = targets(b'{"label": 0.5}', b'{"label": 3}')
    assert (numbers.names, numbers.values.tolist()) == (("label",), [[0.5], [3.0]])


names_in_tars = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=140)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    files=st.lists(st.tuples(names_in_tars, st.binary(max_size=1500)), min_size=1, max_size=8),
    form=st.sampled_from(["pax", "gnu"]),
)
def test_members_match_tarfile(
    files: list[tuple[str, bytes]], form: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("tar") / "any.tar", files, form)
    assert listed(path) == as_tarfile_lists(path)
    contents = path.read_bytes()
    assert [contents[start : start + size] for _, start, size in listed(path)] == [content for _, content in files]


def test_folders_links_and_global_headers_in_a_tar(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "1.png").write_bytes(b"one")
    (tmp_path / "in" / "deep" / "1.txt").write_bytes(b"cat\n")
    (tmp_path / "in" / "other.link").symlink_to("deep")
    path = tmp_path / "all.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "made by a test"}) as tar:
        tar.add(tmp_path / "in", "./in")
    source = open_shards([str(path)])
    assert (source.key(0), source.classes, source.read(0)) == ("all.tar/./in/deep/1.png", ("cat",), b"one")


def test_large_numbers_are_read(tmp_path: Path) -> None:
    """GNU tar writes sizes over 8 GiB in binary; the file here is mostly a hole."""
    info = tarfile.TarInfo("big.bin")
    info.size = 9 * 2**30
    after = tarfile.TarInfo("a.png")
    after.size = 3
    path = tmp_path / "big.tar"
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        header = info.tobuf(form)
        with open(path, "wb") as file:
            file.write(header)
            file.seek(len(header) + info.size)
            file.write(after.tobuf(form) + b"abc".ljust(512, b"\0") + bytes(1024))
        assert listed(path) == as_tarfile_lists(path)
        assert open_shards([str(path)], unlabelled=True).read(0) == b"abc"


def test_labels_of_every_kind(tmp_path: Path) -> None:
    files = [("a.txt", b"dog\n"), ("a.jpg", b"A"), ("b.png", b"B"), ("b.json", b'{"class": "cat", "size": 3}')]
    files += [("c.cls", b" 1 "), ("c.txt", b"ignored"), ("c.JPEG", b"C"), ("d.webp", b"D"), ("d.json", b'{"label": 0}')]
    files += [("e.json", b'{"cls": 1.0}'), ("e.gif", b"E"), ("f.json", b"{}"), ("f.txt", b"dog"), ("f.bmp", b"F")]
    source = open_shards([str(write(tmp_path / "a.tar", files))])
    assert source.classes == ("0", "1", "cat", "dog")
    assert [source.classes[label] for label in source.labels] == ["dog", "cat", "1", "0", "1", "dog"]
    assert b"".join(source.read(number) for number in range(6)) == b"ABCDEF"


def test_other_files_are_skipped(tmp_path: Path) -> None:
    files = [("a.jpg", b"A"), ("a.cls", b"0"), ("a.seg.png", b"mask"), ("a.npz", b""), ("__MACOSX/._a.jpg", b"")]
    files += [("._a.jpg", b""), ("readme", b""), ("b.cls", b"not read")]
    assert len(open_shards([str(write(tmp_path / "a.tar", files))])) == 1


def test_files_of_one_key_need_not_be_adjacent(tmp_path: Path) -> None:
    files = [("a.jpg", b"A"), ("b.jpg", b"B"), ("B.jpg", b"C"), ("b.cls", b"11"), ("a.cls", b"2"), ("B.cls", b"2")]
    source = open_shards([str(write(tmp_path / "a.tar", files))])
    assert (source.classes, source.labels.tolist()) == (("2", "11"), [0, 1, 0])


def test_several_shards_and_named_classes(tmp_path: Path) -> None:
    paths = [
        str(write(tmp_path / f"{number}.tar", [("x.jpg", b"%d" % number), ("x.cls", b"%d" % number)]))
        for number in range(3)
    ]
    (tmp_path / "classes.txt").write_text("cat\ndog\nhen\nemu\n", encoding="utf-8")
    source = open_shards(paths)
    assert source.classes == ("cat", "dog", "hen", "emu")
    assert source.labels.tolist() == [0, 1, 2]
    assert [source.read(number) for number in range(3)] == [b"0", b"1", b"2"]
    (tmp_path / "classes.txt").write_text("cat\ndog\n", encoding="utf-8")
    assert (
        refused(*paths)
        == f"{paths[0]} and 2 more has the label '2', which is not one of its 2 classes; correct the label"
    )
    (tmp_path / "classes.txt").write_text("cat\ncat\nhen", encoding="utf-8")
    assert "has two classes named 'cat'; use unique names" in refused(*paths)


def test_shards_of_the_same_name_have_different_keys(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "0.tar", [("a.jpg", b"A"), ("a.cls", b"0"), ("b.jpg", b"B"), ("b.cls", b"1")])
    source = open_shards([str(tmp_path / "x/0.tar"), str(tmp_path / "y/0.tar")])
    assert [source.key(i) for i in range(4)] == ["x/0.tar/a.jpg", "x/0.tar/b.jpg", "y/0.tar/a.jpg", "y/0.tar/b.jpg"]


def test_pickling_and_changed_shards(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [("a.jpg", b"A"), ("a.cls", b"0"), ("b.jpg", b"BB"), ("b.cls", b"1")])
    source = pickle.loads(pickle.dumps(open_shards([str(path)])))
    assert source.read(1) == b"BB"
    assert source.stamp(0) != source.stamp(1)
    before = source.stamp(1)
    path.touch()
    assert source.stamp(1)[0] == before[0]
    assert source.stamp(1)[1] > before[1]
    os.truncate(path, 600)
    with pytest.raises(DataError, match=r"a\.tar/b\.jpg cannot be read: the shard was truncated"):
        source.read(1)
    path.unlink()
    for action in (source.read, source.stamp):
        with pytest.raises(DataError, match=r"a\.tar/b\.jpg cannot be read: No such file"):
            action(1)


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    source = open_shards([str(write(tmp_path / f"{n}.tar", GOOD)) for n in range(5)])
    assert [source.read(number) for number in range(5)] == [b"A"] * 5
    assert len(os.listdir("/dev/fd")) == before


def refused(*paths: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        open_shards([str(path) for path in paths])
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            [*GOOD, ("a.jpg", b"again")],
            "a.tar/a.jpg is the second image of its key, after a.jpg; give every image a",
        ),
        (
            [*GOOD, ("a.png", b"again")],
            "a.tar/a.png is the second image of its key, after a.jpg; give every image a",
        ),
        ([*GOOD, ("a.cls", b"1")], "a.tar/a.cls occurs twice; give every image a unique key"),
        (
            [*GOOD, ("b.jpg", b"B")],
            "a.tar/b.jpg has no label; add a file of the same name with suffix .cls, .json or .txt",
        ),
        ([("a.jpg", b""), ("a.cls", b"cat")], "a.tar/a.cls contains 'cat'; a .cls file contains an integer"),
        ([("a.jpg", b""), ("a.cls", b"")], "a.tar/a.cls contains ''; a .cls file contains an integer"),
        ([("a.jpg", b""), ("a.txt", b" \n")], "a.tar/a.txt has no label"),
        ([("a.jpg", b""), ("a.txt", b"\xff")], "a.tar/a.txt is not UTF-8; write the label as UTF-8"),
        ([("a.jpg", b""), ("a.json", b"{")], "a.tar/a.json is not JSON; correct it"),
        ([("a.jpg", b""), ("a.json", b'{"label": null}')], "a.tar/a.json has no label"),
        ([("a.jpg", b""), ("a.json", b'{"label": NaN}')], "a.tar/a.json has no label"),
        ([("a.jpg", b""), ("a.json", b'{"label": [[1]]}')], "a.tar has [1] in a list of labels; list names or numbers"),
        (
            [("notes.md", b"")],
            "a.tar has no images (1 other file, such as notes.md); name them with one dot and one of the suff",
        ),
        (
            [("photo.1.jpg", b""), ("photo.1.cls", b"1")],
            "a.tar has no images (2 other files, such as photo.1.jpg); name them with one dot",
        ),
    ],
)
def test_invalid_shards(files: list[tuple[str, bytes]], message: str, tmp_path: Path) -> None:
    assert message in refused(write(tmp_path / "a.tar", files))


def test_images_without_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [*GOOD, ("b.jpg", b"B")])
    source = open_shards([str(path)], unlabelled=True)
    assert (source.labels.tolist(), source.classes) == ([0, -1], ("0",))


def test_a_tar_truncated_anywhere(tmp_path: Path) -> None:
    """A complete tar ends with zero blocks."""
    whole = write(tmp_path / "a.tar", [*GOOD, (f"{LONGER}.jpg", b"B" * 700), (f"{LONGER}.cls", b"1")])
    content = whole.read_bytes()
    ends = max(start + -(-size // 512) * 512 for _, start, size in listed(whole))
    for length in [*range(1, ends, 37), ends]:
        whole.write_bytes(content[:length])
        assert f"the tar {whole} is truncated: it ends at byte {length}" in refused(whole)
    whole.write_bytes(content[: ends + 512])
    assert len(open_shards([str(whole)])) == 2


def test_files_that_are_not_shards(tmp_path: Path) -> None:
    tar = write(tmp_path / "a.tar", GOOD).read_bytes()
    path = tmp_path / "b.tar"
    for packed in (gzip.compress(tar), bz2.compress(tar), lzma.compress(tar)):
        path.write_bytes(packed)
        assert refused(path) == f"{path} is compressed, which prevents random access; decompress it"
    path.write_bytes(b"")
    assert refused(path) == f"{path} is empty; create the tar again"
    path.write_bytes(b"hello" * 500)
    assert refused(path) == f"{path} is not a tar file; use one, or another suffix"
    path.write_bytes(tar[:1030] + b"x" + tar[1031:])
    assert refused(path) == f"{path} is corrupt at byte 1024; create it again"
    path.write_bytes(tar + tar)
    assert refused(path) == f"{path} has more data at byte {len(tar)} after its end; split concatenated tars"
    assert refused(tmp_path / "c.tar") == f"{tmp_path}/c.tar cannot be read: No such file or directory"
    assert refused(tmp_path) == f"{tmp_path} cannot be read: Is a directory"


def test_corrupt_extended_headers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [(f"{LONGER}.jpg", b"A")])
    content = path.read_bytes()
    at = content.index(b" path=")
    path.write_bytes(content[: at - 3] + b"999" + content[at:])
    assert refused(path) == f"{path} is corrupt at byte 512; create it again"


def test_links_in_shards_raise(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("b.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "a.jpg"
        tar.addfile(link)
    assert refused(path) == f"{path}/b.jpg is a link or a sparse file; write whole files to the shard"


def test_patterns(tmp_path: Path) -> None:
    for name in ("a-08.tar", "a-09.tar", "a-10.tar", "b-1.tar", "[x].txt"):
        (tmp_path / name).touch()

    def names(pattern: str) -> list[str]:
        return [os.path.basename(path) for path in expand_pattern(f"{tmp_path}/{pattern}")]

    assert names("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert names("*.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "b-1.tar"]
    assert names("?-{1..1}*.tar") == ["a-10.tar", "b-1.tar"]
    with pytest.raises(DataError, match=r"/a-11\.tar, which is part of .*a-\{09\.\.11\}\.tar, does not exist;"):
        names("a-{09..11}.tar")
    with pytest.raises(DataError, match=r"a file that matches .*/c\*\.tar does not exist; correct the pattern"):
        names("c*.tar")
    with pytest.raises(DataError, match="a pattern should match only tar shards, or only Parquet files"):
        names("*")
    with pytest.raises(DataError, match=r"the pattern \{10\.\.08\} is not an increasing range"):
        names("a-{10..08}.tar")


def test_the_index_is_used_until_a_shard_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    runs: list[int] = []
    index = shards._index

    def counted(*arguments: object) -> shards.ShardIndex:
        runs.append(1)
        return index(*arguments)

    monkeypatch.setattr(shards, "_index", counted)
    path = write(tmp_path / "a.tar", [*GOOD, ("ü.jpg", b"B"), ("ü.txt", "Bär".encode())])
    progress: list[int] = []
    first, second = (open_shards([str(path)], on_progress=progress.append) for _ in range(2))
    assert (len(runs), progress) == (1, [2, 2])
    assert (first.classes, first.labels.tolist()) == (second.classes, second.labels.tolist()) == (("0", "Bär"), [0, 1])
    assert [second.key(0), second.key(1)] == ["a.tar/a.jpg", "a.tar/ü.jpg"]
    write(path, [("a.jpg", b"A"), ("a.json", json.dumps({"label": "new"}).encode())])
    assert open_shards([str(path)]).classes == ("new",)
    (index_file,) = cache.rglob("*.npz")
    index_file.write_bytes(b"corrupt")
    assert open_shards([str(path)]).classes == ("new",)
    monkeypatch.setattr(index_files, "YOUNG_NS", 2_000_000_000)
    index_file.unlink()
    open_shards([str(path)])
    assert not index_file.exists(), "a shard that just changed is not indexed"
