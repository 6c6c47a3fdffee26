"""Detecting and opening datasets."""

import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitrail.data.sources.opening import open_data, open_source, open_unlabelled
from vitrail.data.sources.parquet import ParquetImages
from vitrail.data.sources.parquet_files import FILES_HELD, Tables
from vitrail.data.sources.source import Source, digits
from vitrail.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def folder(root: Path, **counts: int) -> Path:
    """Write a folder with a number of images per class; their content is the class and the number."""
    for label, count in counts.items():
        (root / label).mkdir(parents=True)
        for number in range(count):
            (root / label / f"{number:02}.png").write_text(f"{label} {number}")
    return root


def tar(path: Path, **counts: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for label, count in counts.items():
            for number in range(count):
                for suffix, content in (("png", f"{label} {number}"), ("txt", label)):
                    info = tarfile.TarInfo(f"{label}{number}.{suffix}")
                    info.size = len(content)
                    file.addfile(info, io.BytesIO(content.encode()))
    return path


def contents(source: Source | None) -> list[str]:
    assert source is not None
    result = [bytes(source.read(number)).decode() for number in range(len(source))]
    assert [text.split()[0] for text in result] == [source.classes[label] for label in source.labels]
    return result


def refused(place: str | Path, *, one: bool = False) -> str:
    with pytest.raises(DataError) as caught:
        (open_source if one else open_data)(place)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(place), "DATA")


def test_digits() -> None:
    source = digits()
    assert source.images.shape == (1797, 8, 8)
    assert source.images.dtype == np.uint8
    assert (source.images.min(), source.images.max()) == (0, 255)
    assert np.bincount(source.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert source.images[0, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]  # 0 0 5 13 9 1 0 0
    splits = open_data("digits")
    assert [len(split) for split in splits[:3] if split is not None] == [1259, 179, 359]
    assert len(open_source("digits")) == 1797


def test_a_folder_called_digits_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "digits", one=5, two=5)
    assert open_data("digits").train.classes == ("one", "two")


def test_a_folder_is_split(tmp_path: Path) -> None:
    splits = open_data(folder(tmp_path, cat=20, dog=10), seed=4, val=0.2, test=0.1)
    assert [len(split) for split in splits[:3] if split is not None] == [21, 6, 3]
    result = contents(splits.train) + contents(splits.val) + contents(splits.test)
    assert sorted(result) == sorted(contents(open_source(tmp_path)))
    assert splits.record["counts"]["val"] == {"cat": 4, "dog": 2}
    assert all(name.startswith(("cat/", "dog/")) for name in splits.record["names"]["val"])


def test_a_folder_with_splits(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=4, bee=5, cow=3)
    folder(tmp_path / "validation", cow=2, bee=1)
    folder(tmp_path / "test", bee=2)
    (tmp_path / "notes").mkdir()
    splits = open_data(tmp_path)
    assert [len(split) for split in splits[:3] if split is not None] == [12, 3, 2]
    assert contents(splits.val) == ["bee 0", "cow 0", "cow 1"]
    assert splits.val is not None
    assert splits.val.classes == splits.train.classes == ("ant", "bee", "cow")
    assert splits.val.labels.tolist() == [1, 2, 2]
    assert splits.val.stamp(0)[0] == 5
    assert splits.val.name(0) == f"{tmp_path}/validation/bee/00.png"
    assert (splits.record["method"], splits.record["fractions"], splits.record["seed"]) == ("given", {}, None)
    assert splits.record["names"]["test"] == ["bee/00.png", "bee/01.png"]
    assert refused(tmp_path, one=True) == "DATA has the splits test, train, validation; give the folder of one of them"
    assert len(open_source(tmp_path / "test")) == 2


def test_images_next_to_the_splits_are_not_ignored(tmp_path: Path) -> None:
    for split in ("train", "test", "extra"):
        folder(tmp_path / split, cat=4, dog=4)
    assert "but also images in extra, which would be ignored; move them away" in refused(tmp_path)


def test_train_alone_is_split(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=10, bee=10)
    splits = open_data(tmp_path)
    assert splits.record["method"] == "stratified"
    assert [len(contents(split)) for split in splits[:3]] == [14, 2, 4]


def test_test_without_val(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=10, bee=20)
    folder(tmp_path / "test", ant=3)
    splits = open_data(tmp_path, seed=2)
    assert (len(splits.train), len(contents(splits.val)), len(contents(splits.test))) == (27, 3, 3)
    assert (splits.record["fractions"], splits.record["seed"]) == ({"val": 0.1}, 2)
    assert open_data(tmp_path, val=0).val is None


def test_val_without_test(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=4, bee=4)
    folder(tmp_path / "val", ant=3)
    splits = open_data(tmp_path)
    assert (len(splits.train), len(contents(splits.val)), splits.test) == (8, 3, None)


def test_train_may_be_a_class(tmp_path: Path) -> None:
    assert open_data(folder(tmp_path, bus=5, train=5, tram=5)).train.classes == ("bus", "train", "tram")


def test_a_class_that_train_does_not_have(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=4, bee=4)
    folder(tmp_path / "test", ant=3, cow=1)
    assert refused(tmp_path) == (
        "the test split of DATA has the class 'cow', which the training split does not have; add it there or remove it"
    )
    rows = [f"{tmp_path}/train/ant/0{n}.png,{'ant' if n else 'bee'},train" for n in range(3)]
    table = tmp_path / "list.csv"
    table.write_text("\n".join(["path,label,split", *rows, f"{tmp_path}/test/cow/00.png,cow,val"]))
    assert refused(table).startswith(
        "the val split of DATA has the class 'cow', which the training split does not have"
    )


def test_two_names_of_one_split(tmp_path: Path) -> None:
    for name in ("train", "val", "valid"):
        folder(tmp_path / name, ant=4, bee=4)
    assert refused(tmp_path) == "DATA has val/ and valid/, which are the same split; keep one"


def test_too_little_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").startswith("DATA has no images")
    assert refused(tmp_path / "empty", one=True).startswith("DATA has no images")
    one = folder(tmp_path / "one", cat=9)
    assert refused(one) == "DATA has only one class, 'cat'; training needs at least two classes"
    assert len(open_source(one)) == 9
    assert refused(folder(tmp_path / "few", cat=9, dog=1)) == (
        "class 'dog' has 1 image, too few for 3 splits; add images, remove the class, or use fewer splits"
    )
    flat = tmp_path / "one" / "cat"
    assert "has 9 images but no class folders; put the images of each class" in refused(flat)
    assert open_source(flat).labels.tolist() == [-1] * 9


def test_a_manifest_with_splits(tmp_path: Path) -> None:
    folder(tmp_path, ant=6, bee=6)
    rows = [
        {"file": f"{c}/0{n}.png", "label": c, "split": "test" if n > 3 else "train"}
        for c in ("ant", "bee")
        for n in range(6)
    ]
    table = tmp_path / "list.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    splits = open_data(table, val=0.25)
    assert (len(splits.train), len(contents(splits.val))) == (6, 2)
    assert contents(splits.test) == ["ant 4", "ant 5", "bee 4", "bee 5"]
    assert len(open_source(table)) == 12
    again = open_data(table, record=json.loads(json.dumps(splits.record)), seed=99)
    assert [contents(split) for split in again[:3]] == [contents(split) for split in splits[:3]]
    table.write_text("\n".join(json.dumps({**row, "split": "val"}) for row in rows))
    assert refused(table) == "DATA has no rows of the training split; write train in the split column of some rows"


def test_a_recorded_split_is_restored(tmp_path: Path) -> None:
    place = folder(tmp_path / "here", ant=10, bee=10)
    splits = open_data(place, seed=3)
    before = [contents(split) for split in splits[:3]]
    record = json.loads(json.dumps(splits.record))
    place = place.rename(tmp_path / "elsewhere")
    assert [contents(split) for split in open_data(place, record=record)[:3]] == before
    assert [contents(split) for split in open_data(place, seed=4)[:3]] != before
    gone = record["names"]["val"][0]
    (place / gone).unlink()
    with pytest.raises(DataError, match=f"^{gone}, of the recorded val split, is missing; restore it, or"):
        open_data(place, record=record)


def test_a_split_that_changed_since_the_record(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=4, bee=4)
    folder(tmp_path / "test", ant=3)
    record = open_data(tmp_path).record
    assert contents(open_data(tmp_path, record=record).test) == ["ant 0", "ant 1", "ant 2"]
    (tmp_path / "test" / "ant" / "01.png").unlink()
    with pytest.raises(DataError, match="class 'ant' has 2 images in the test split, but had 3 when the split was"):
        open_data(tmp_path, record=record)


def test_a_fraction_of_the_training_split(tmp_path: Path) -> None:
    whole = open_data(folder(tmp_path / "data", ant=20, bee=10), seed=5)
    some, few = (open_data(tmp_path / "data", seed=5, fraction=fraction) for fraction in (0.5, 0.2))
    for splits in (some, few):
        assert contents(splits.val) == contents(whole.val)
        assert contents(splits.test) == contents(whole.test)
    assert np.bincount(some.train.labels).tolist() == [7, 4]  # of 14 and 7
    assert set(contents(few.train)) < set(contents(some.train)) < set(contents(whole.train))
    assert set(contents(open_data(tmp_path / "data", seed=5, per_class=2).train)) < set(contents(some.train))
    with pytest.raises(ConfigError, match="the fraction is 0; it should be above 0 and at most 1"):
        open_data("nowhere", fraction=0)


@pytest.mark.parametrize("defined", [("train",), ("train", "test"), ("train", "val", "test")])
def test_a_recorded_fraction_of_any_splits_is_restored(tmp_path: Path, defined: tuple[str, ...]) -> None:
    for split in defined:
        folder(tmp_path / split, ant=20, bee=10)
    splits = open_data(tmp_path, seed=6, fraction=0.3)
    whole = open_data(tmp_path, seed=6)
    assert [contents(split) for split in splits[1:3]] == [contents(split) for split in whole[1:3]]
    record = json.loads(json.dumps(splits.record))
    again = open_data(tmp_path, record=record)
    assert [contents(split) for split in again[:3]] == [contents(split) for split in splits[:3]]
    # Another image that the run did not train on changes nothing of what it trained on.
    (tmp_path / "train" / "ant" / "99.png").write_text("ant 99")
    assert contents(open_data(tmp_path, record=record).train) == contents(splits.train)


def test_shards(tmp_path: Path) -> None:
    one = tar(tmp_path / "a" / "0.tar", ant=6, bee=6)
    tar(tmp_path / "a" / "1.tar", ant=6, cow=6)
    assert len(open_source(one)) == 12
    for place in (tmp_path / "a", f"{tmp_path}/a/*.tar", f"{tmp_path}/a/{{0..1}}.tar"):
        assert len(open_source(place)) == 24
        splits = open_data(place)
        assert splits.train.classes == ("ant", "bee", "cow")
        assert [len(contents(split)) for split in splits[:3]] == [17, 3, 4]
        assert splits.record["counts"]["val"] == {"ant": 1, "bee": 1, "cow": 1}


def test_shards_of_splits(tmp_path: Path) -> None:
    for name, counts in (("train", {"ant": 4, "bee": 4}), ("val", {"bee": 2})):
        tar(tmp_path / "named" / f"{name}-000.tar", **counts)
        tar(tmp_path / "folders" / name / "000.tar", **counts)
    for place in (tmp_path / "named", tmp_path / "folders", f"{tmp_path}/named/*.tar"):
        splits = open_data(place)
        assert (len(contents(splits.train)), contents(splits.val), splits.test) == (8, ["bee 0", "bee 1"], None)
        assert splits.val is not None
        assert splits.val.labels.tolist() == [1, 1]
    assert refused(tmp_path / "named", one=True) == (
        "DATA has shards of the splits train, val; select one split with a pattern"
    )
    assert len(open_source(f"{tmp_path}/named/val-*.tar")) == 2


def test_invalid_paths(tmp_path: Path) -> None:
    for one in (False, True):
        assert refused(tmp_path / "digit", one=one) == (
            "DATA does not exist; give a folder, a manifest, tar shards, or the word digits"
        )
        for name in ("a.tar.gz", "b.TGZ", "c.zip"):
            (tmp_path / name).touch()
            assert refused(tmp_path / name, one=one) == (
                "DATA is compressed, which prevents random access; unpack it and use the result"
            )
        (tmp_path / "notes.docx").touch()
        assert refused(tmp_path / "notes.docx", one=one) == (
            "DATA is neither a folder nor a file of a known type; "
            "give a folder, a manifest (.csv, .tsv, .jsonl, .parquet) or tar shards"
        )
        if not one:
            os.symlink("nowhere", tmp_path / "link.csv")
        assert refused(tmp_path / "link.csv", one=one) == "DATA is a dangling link; correct the link"


def table(path: Path, labels: str, **columns: list[str]) -> Path:
    """Write a Parquet file with one image per label; its bytes are the label and the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = labels.split()
    content = [f"{label} {path.stem} {number}".encode() for number, label in enumerate(names)]
    pq.write_table(pa.table({"image": content, "label": names, **columns}), path, row_group_size=2)
    return path


def test_a_folder_of_parquet_files_is_one_source(tmp_path: Path) -> None:
    table(tmp_path / "data/split-0.parquet", "cat cat dog cat cat")
    table(tmp_path / "data/split-1.parquet", "dog dog dog emu")
    table(tmp_path / "data/split-2.parquet", "emu emu emu dog emu")
    for place in (tmp_path / "data", tmp_path / "data" / "*.parquet", tmp_path / "data" / "split-{0..2}.parquet"):
        source = open_source(place)
        assert isinstance(source, Tables)
        assert source.classes == ("cat", "dog", "emu")
        assert contents(source)[4:6] == ["cat split-0 4", "dog split-1 0"]
        assert source.name(5) == f"{tmp_path}/data/split-1.parquet, row 1"
        assert len({source.key(number) for number in range(len(source))}) == len(source) == 14
        assert source.stamp(5)[0] == (tmp_path / "data/split-1.parquet").stat().st_size
    splits = open_data(tmp_path / "data")
    assert sorted(contents(splits.train) + contents(splits.val) + contents(splits.test)) == sorted(contents(source))
    again = open_data(tmp_path / "data", record=json.loads(json.dumps(splits.record)))
    assert contents(again.test) == contents(splits.test)
    there = pickle.loads(pickle.dumps(source))
    for number in (0, 13, 5, 0, 13):  # in any order, with the row groups of at most two files in memory
        assert there.read(number) == source.read(number)
        held = [one for one in there.tables if isinstance(one, ParquetImages) and one._held]
        assert len(held) <= FILES_HELD


def test_parquet_files_of_splits(tmp_path: Path) -> None:
    names = {"train": "cat dog cat dog cat dog", "validation": "dog cat", "test": "cat"}
    for split, labels in names.items():
        for number in range(2):
            table(tmp_path / f"hub/{split}-0000{number}-of-00002.parquet", labels)
            table(tmp_path / f"folders/{split}/{number}.parquet", labels)
    for place in (tmp_path / "hub", tmp_path / "folders"):
        splits = open_data(place, val=0)
        assert splits.val is not None
        assert splits.test is not None
        assert [len(split) for split in (splits.train, splits.val, splits.test)] == [12, 4, 2]
        assert contents(splits.val)[0].startswith("dog ")
        assert " splits test, train, val" in refused(place, one=True)
    column = ["train"] * 4 + ["test"] * 2
    table(tmp_path / "column/a.parquet", names["train"], split=column)
    table(tmp_path / "column/b.parquet", names["train"], split=column)
    splits = open_data(tmp_path / "column", val=0)
    assert splits.test is not None
    assert (len(splits.train), len(splits.test)) == (8, 4)
    table(tmp_path / "column/b.parquet", names["train"])
    assert refused(tmp_path / "column").endswith("b.parquet has none; add it there, or remove it")
    tar(tmp_path / "column/c.tar", cat=1)
    assert refused(tmp_path / "column") == "DATA has both tar shards and Parquet files; select one kind with a pattern"


def test_usable_data_is_opened_and_faults_are_listed(tmp_path: Path) -> None:
    root = folder(tmp_path / "one", cat=1, dog=2, emu=5)
    (root / "emu" / "gone.png").symlink_to("nowhere.png")
    (root / "fox").mkdir()
    message = refused(root)
    assert message.startswith("DATA has 2 faults: ")
    faults: list[str] = []
    splits = open_data(root, faults=faults)
    assert [text.split(" ", 3)[2] for text in faults[2:]] == ["has", "has"]
    assert "class 'cat' has 1 image, too few for 3 splits" in faults[2]
    assert (len(faults), len(splits.train), splits.val) == (4, 8, None)
    data = tmp_path / "given"
    folder(data / "train", cat=2, dog=2)
    folder(data / "val", cat=1, emu=1, fox=1)
    assert refused(data).startswith("DATA has 2 faults: (1) the val split of DATA has the class 'emu'")
    faults.clear()
    splits = open_data(data, faults=faults)
    assert splits.val is not None
    assert (len(faults), splits.val.classes, contents(splits.val)) == (2, ("cat", "dog"), ["cat 0"])
    faults.clear()
    assert len(open_data(folder(tmp_path / "single", cat=5), faults=faults).train) == 5
    assert faults == [f"{tmp_path}/single has only one class, 'cat'; training needs at least two classes"]


def test_good_data_has_no_faults(tmp_path: Path) -> None:
    faults: list[str] = []
    splits = open_data(folder(tmp_path / "data", cat=10, dog=10), faults=faults)
    assert (faults, len(splits.train)) == ([], 14)


# ── images to pretrain on ──


def pretraining_names(place: Path) -> set[str]:
    """Return the contents of the images that pretraining sees."""
    splits = open_unlabelled(place, val=0.2)
    assert splits.test is None
    return {bytes(some.read(number)).decode() for some in splits[:2] if some is not None for number in range(len(some))}


def listed(root: Path, name: str, **columns: list[str]) -> Path:
    """Write the images "a 0" to "a 11" and a table of them."""
    files = sorted(str(file) for file in folder(root, a=12).rglob("*.png"))
    table = {"path": files, **columns}
    if name.endswith(".parquet"):
        pq.write_table(pa.table(table), root / name)
    elif name.endswith(".jsonl"):
        objects = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
        (root / name).write_text("\n".join(map(json.dumps, objects)))
    else:
        lines = [",".join(row) for row in zip(*table.values(), strict=True)]
        (root / name).write_text("\n".join([",".join(table), *lines]))
    return root / name


@pytest.mark.parametrize("name", ["list.csv", "list.jsonl", "list.parquet"])
@pytest.mark.parametrize("labelled", [True, False])
def test_pretraining_sees_only_the_training_rows_of_a_table(name: str, labelled: bool, tmp_path: Path) -> None:
    labels = {"label": ["cat", "dog"] * 6} if labelled else {}
    place = listed(tmp_path, name, **labels, split=["train", "train", "val", "test"] * 3)
    assert pretraining_names(place) == {f"a {number}" for number in range(12) if number % 4 < 2}


def test_pretraining_needs_a_training_split_if_there_are_splits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows of the training split"):
        open_unlabelled(listed(tmp_path, "list.csv", split=["test"] * 12))


@pytest.mark.parametrize("layout", ["flat", "classes", "shards"])
def test_pretraining_does_not_open_other_splits(layout: str, tmp_path: Path) -> None:
    """Neither the training split nor the test split needs class folders."""
    if layout == "shards":
        tar(tmp_path / "train-0.tar", a=6)
        (tmp_path / "test-0.tar").write_bytes(b"not a tar file")
    else:
        for split in ("train", "test"):
            folder(tmp_path, **{split: 6})
    if layout == "classes":
        folder(tmp_path / "train", a=6)
        for number in range(6):
            (tmp_path / "train" / f"{number:02}.png").unlink()
    first = "train" if layout == "flat" else "a"
    assert pretraining_names(tmp_path) == {f"{first} {number}" for number in range(6)}


@pytest.mark.parametrize("name", ["list.csv", "list.jsonl", "list.parquet"])
def test_some_labels_may_be_missing_where_none_is_needed(name: str, tmp_path: Path) -> None:
    place = listed(tmp_path, name, label=["cat", "", "dog", "cat"] * 3)
    source = open_source(place)
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [0, -1, 1, 0] * 3
    assert len(pretraining_names(place)) == 12
    assert open_unlabelled(place).train.classes == ("image",)
    with pytest.raises(DataError, match=r"has no label \(found ''\); add one, or remove the image"):
        open_data(place)


def test_classes_serve_to_compare_two_images_or_more(tmp_path: Path) -> None:
    place = folder(tmp_path, cat=10, dog=10)
    few, enough = open_unlabelled(place, val=0.05), open_unlabelled(place, val=0.1)
    assert [len(splits.val or ()) for splits in (few, enough)] == [1, 2]
    assert [splits.train.classes for splits in (few, enough)] == [("image",), ("cat", "dog")]
