"""Folders with one sub-folder per class."""

import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support import forked_commands

from vitrail.data.sources import tree
from vitrail.data.sources.folders import open_folder
from vitrail.data.sources.source import Keyed, Source
from vitrail.errors import DataError

NOBODY = "import os\nif os.geteuid() == 0: os.setgid(65534); os.setuid(65534)"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VITRAIL_CACHE", str(folder))
    return folder


def write(root: Path, *names: str | bytes) -> Path:
    """Write one file per name, with the name as content."""
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(os.fsencode(name))
    return root


def age(root: Path) -> None:
    """Set the modification time of all folders to a minute ago."""
    then = time.time() - 60
    for folder, _, _ in os.walk(root):
        os.utime(folder, (then, then))


def keys(source: Source) -> list[str]:
    assert isinstance(source, Keyed)
    return [source.key(number) for number in range(len(source))]


def test_classes_are_the_top_level_folders(tmp_path: Path) -> None:
    write(tmp_path, "dog/b.JPG", "dog/a.png", "cat/deep/er/1.webp", "cat/2.npy", "Ärger/x.jpeg", "cat/deep/0.tif")
    source = open_folder(tmp_path)
    assert source.classes == ("cat", "dog", "Ärger")
    assert keys(source) == [
        "cat/2.npy",
        "cat/deep/0.tif",
        "cat/deep/er/1.webp",
        "dog/a.png",
        "dog/b.JPG",
        "Ärger/x.jpeg",
    ]
    assert source.labels.tolist() == [0, 0, 0, 1, 1, 2]
    assert source.labels.dtype == np.int64
    assert [source.read(number).decode() for number in range(6)] == keys(source)
    assert source.name(0) == f"{tmp_path}/cat/2.npy"
    status = os.stat(tmp_path / "cat/2.npy")
    assert source.stamp(0) == (status.st_size, status.st_ctime_ns)
    checked: Source = source
    assert len(checked) == 6


def test_a_source_can_be_pickled(tmp_path: Path) -> None:
    source = open_folder(write(tmp_path, "a/1.png", "b/2.png"))
    there = pickle.loads(pickle.dumps(source))
    assert [there.read(number) for number in range(2)] == [b"a/1.png", b"b/2.png"]


def test_other_files_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "a/1.png", "a/readme.txt", "a/jpg", "b/1.gif", "loose.jpg", "b/x.jpg.part")
    write(tmp_path, ".git/1.png", "a/.hidden.png", "a/.cache/2.png", "__MACOSX/a/._1.png", "b/__MACOSX/1.png")
    os.mkfifo(tmp_path / "a" / "pipe.png")  # reading it would block forever
    source = open_folder(tmp_path)
    assert (keys(source), source.ignored) == (["a/1.png", "b/1.gif"], 5)
    assert source.read(1) == b"b/1.gif"


def test_names_with_any_bytes(tmp_path: Path) -> None:
    source = open_folder(write(tmp_path, b"a/caf\xe9.png", b"a/new\nline.png", b"b/d\xff/1.png"))
    assert keys(source) == ["a/caf\\xe9.png", "a/new\nline.png", "b/d\\xff/1.png"]
    assert source.name(0) == f"{tmp_path}/a/caf�.png"
    assert source.name(1) == f"{tmp_path}/a/new\\nline.png"
    assert [source.read(number) for number in range(3)] == [b"a/caf\xe9.png", b"a/new\nline.png", b"b/d\xff/1.png"]


def test_links_are_followed(tmp_path: Path) -> None:
    root = write(tmp_path / "root", "a/1.png", "b/2.png")
    write(tmp_path / "elsewhere", "deep/3.png", "4.png")
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "linked.png").symlink_to(tmp_path / "elsewhere" / "4.png")
    (root / "b" / "again").symlink_to(tmp_path / "elsewhere" / "deep")  # the same folder twice is not a loop
    source = open_folder(root)
    assert keys(source) == ["a/1.png", "a/linked.png", "b/2.png", "b/again/3.png", "c/4.png", "c/deep/3.png"]
    assert source.read(1) == b"4.png"


def refused(root: Path) -> str:
    with pytest.raises(DataError) as caught:
        open_folder(root)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(root), "ROOT")


def test_a_link_loop_is_reported(tmp_path: Path) -> None:
    write(tmp_path, "a/1.png", "b/2.png")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert refused(tmp_path) == "ROOT/a/up is a link to a folder that contains it; remove the link"
    (tmp_path / "a" / "up").unlink()
    (tmp_path / "b" / "round").symlink_to(tmp_path / "b" / "round")
    assert refused(tmp_path) == "ROOT/b/round is a circular link; correct or remove the link"


def test_a_broken_link_is_reported(tmp_path: Path) -> None:
    write(tmp_path, "a/1.png", "b/2.png")
    (tmp_path / "b" / "gone.png").symlink_to("nowhere.png")
    assert refused(tmp_path) == (
        "ROOT/b/gone.png is a link to nowhere.png, which does not exist; correct or remove the link"
    )


def test_folders_without_images(tmp_path: Path) -> None:
    assert refused(tmp_path) == "ROOT has no images; use a folder with one sub-folder of images per class"
    write(tmp_path, "a/1.png", "b/notes.txt")
    assert refused(tmp_path) == (
        "the class folder ROOT/b has no images (1 file, such as notes.txt, without an image suffix); "
        "add some, or remove the folder"
    )
    flat = write(tmp_path / "flat", "1.png", "2.png")
    assert refused(flat) == (
        "ROOT has 2 images but no class folders; "
        "put the images of each class in their own folder, or use a manifest with labels"
    )


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    root = write(tmp_path / "data", "a/1.png", "a/deep/2.png", "b/3.png", "b/notes.txt", "loose.png")
    (root / "a" / "gone.png").symlink_to("nowhere.png")
    (root / "a" / "round").symlink_to(root / "a" / "round")
    (root / "a" / "deep" / "up").symlink_to(root / "a")
    (root / "c").mkdir()
    message = refused(root)
    assert message.startswith("ROOT has 4 faults: (1) ROOT/a/gone.png is a link to nowhere.png, which does not exist; ")
    for text in (
        "(2) ROOT/a/round is a circular link; correct or remove the link. ",
        "(3) ROOT/a/deep/up is a link to a folder that contains it; remove the link. ",
        "(4) the class folder ROOT/c has no images; add some, or remove the folder",
    ):
        assert text in message
    faults: list[str] = []
    source = open_folder(root, faults=faults)
    assert len(faults) == 4
    assert (keys(source), source.classes) == (["a/1.png", "a/deep/2.png", "b/3.png"], ("a", "b"))
    assert source.labels.tolist() == [0, 0, 1]
    age(root)
    again: list[str] = []
    open_folder(root, faults=again)
    assert again == faults, "a listing with faults is not taken from the index"


def test_skipped_files_are_listed(tmp_path: Path) -> None:
    write(tmp_path, "a/1.png", "a/readme.txt", "b/deep/x.php", "b/1.gif", "loose.jpg", "list.csv")
    age(tmp_path)
    for _ in range(2):  # the second time from the index
        source = open_folder(tmp_path)
        assert sorted(file.name for file in source.skipped()) == [
            f"{tmp_path}/{name}" for name in ("a/readme.txt", "b/deep/x.php", "list.csv")
        ]
        assert (list(source.outside()), source.ignored) == ([f"{tmp_path}/loose.jpg"], 4)


def test_a_class_folder_that_is_not_utf8(tmp_path: Path) -> None:
    write(tmp_path, b"caf\xe9/1.png", "b/2.png")
    assert refused(tmp_path) == "the name of the class folder b'caf\\xe9' in ROOT is not UTF-8; rename it"


def test_missing_folder_and_not_a_folder(tmp_path: Path) -> None:
    assert refused(tmp_path / "nothing") == "ROOT cannot be read: No such file or directory"
    (tmp_path / "file").write_text("")
    assert refused(tmp_path / "file") == "ROOT cannot be read: Not a directory"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that other users can access, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


def test_without_permission(shared: Path) -> None:
    closed = write(shared / "data", "a/1.png", "b/2.png") / "b"
    other = write(shared / "other", "a/1.png", "b/2.png")
    (other / "a" / "1.png").chmod(0)
    code = (
        "import sys; from vitrail.data.sources.folders import open_folder; from vitrail.errors import DataError\n"
        f"{NOBODY}\n"
        "for action in (lambda: open_folder(sys.argv[1]), lambda: open_folder(sys.argv[2]).read(0)):\n"
        "    try: action()\n"
        "    except DataError as fault: print(fault)\n"
    )
    closed.chmod(0)
    try:
        environment = {**os.environ, "VITRAIL_CACHE": str(shared / "no" / "cache")}
        done = forked_commands.run(shared / "data", other, code=code, environment=environment)
    finally:
        closed.chmod(0o700)
    assert done.stdout.splitlines() == [
        f"{closed} cannot be read: Permission denied",
        f"{other}/a/1.png cannot be read: Permission denied",
    ], done.stderr


def test_an_image_that_was_deleted(tmp_path: Path) -> None:
    source = open_folder(write(tmp_path, "a/1.png", "b/2.png"))
    (tmp_path / "a" / "1.png").unlink()
    for action in (source.read, source.stamp):
        with pytest.raises(DataError, match=r"a/1\.png cannot be read: No such file or directory"):
            action(0)


def test_images_without_labels(tmp_path: Path) -> None:
    flat = open_folder(write(tmp_path / "flat", "2.png", "1.png", "notes.txt"), unlabelled=True)
    assert (keys(flat), flat.labels.tolist(), flat.classes) == (["1.png", "2.png"], [-1, -1], ())
    mixed = open_folder(write(tmp_path / "mixed", "0.png", "a/x.txt", "b/1.png", "c/d/2.png"), unlabelled=True)
    assert (keys(mixed), mixed.labels.tolist()) == (["0.png", "b/1.png", "c/d/2.png"], [-1, 0, 1])
    assert mixed.classes == ("b", "c")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no images; use a folder with images"):
        open_folder(tmp_path / "empty", unlabelled=True)


def test_the_index_is_used_until_a_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    walks: list[str] = []
    walk = tree._walk

    def counted(root: str, *rest: object) -> tree.Listing:
        walks.append(root)
        return walk(root, *rest)

    monkeypatch.setattr(tree, "_walk", counted)
    write(tmp_path, "a/1.png", "b/deep/2.png", "b/notes.txt")
    fresh = open_folder(tmp_path)
    assert not list(cache.rglob("*.npz")), "a folder that just changed is not indexed"
    age(tmp_path)
    open_folder(tmp_path)
    assert len(walks) == 2
    again = open_folder(tmp_path)
    assert len(walks) == 2
    assert (keys(again), again.ignored) == (keys(fresh), fresh.ignored)
    assert again.labels.tolist() == fresh.labels.tolist()
    write(tmp_path, "b/deep/3.png")
    assert keys(open_folder(tmp_path)) == ["a/1.png", "b/deep/2.png", "b/deep/3.png"]
    (tmp_path / "b" / "deep" / "2.png").unlink()
    assert keys(open_folder(tmp_path)) == ["a/1.png", "b/deep/3.png"]
    age(tmp_path)
    open_folder(tmp_path)
    (tmp_path / "b" / "deep").rename(tmp_path / "b" / "other")
    assert keys(open_folder(tmp_path)) == ["a/1.png", "b/other/3.png"]


def test_a_corrupt_index_is_rebuilt(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, "a/1.png", "b/2.png")
    age(tmp_path)
    open_folder(tmp_path)
    (index,) = cache.rglob("*.npz")
    good = index.read_bytes()
    index.write_bytes(good[: len(good) // 2])
    assert len(open_folder(tmp_path)) == 2
    assert index.read_bytes() == good


def test_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "PROGRESS_EVERY", 2)
    write(tmp_path, "a/1.png", "a/2.png", "a/3.png", "b/1.png", "b/2.png")
    age(tmp_path)
    progress: list[int] = []
    open_folder(tmp_path, on_progress=progress.append)
    assert progress == [2, 4, 5]
    progress.clear()
    open_folder(tmp_path, on_progress=progress.append)
    assert progress == [5]
