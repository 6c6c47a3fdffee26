"""Images with several labels, or with numbers: the same targets however they are written, and splits of them."""

import io
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import TensorDataset

import vitrail
from vitrail.data.cache import CacheSize, cached
from vitrail.data.sources.given import given_data
from vitrail.data.sources.opening import open_source, open_unlabelled
from vitrail.data.sources.selection import choose_images, match_classes
from vitrail.data.sources.source import Source, Subset
from vitrail.data.sources.splits import keys_of
from vitrail.data.sources.strata import FEWEST, strata_of
from vitrail.data.sources.targets import AUTOMATIC, Labelling, Targets, label_rows, output_names_of, targets_of
from vitrail.errors import ConfigError, DataError

MANY = 60
NAMES = ("beach", "cat", "dog", "sky")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with tiny images 0.png, 1.png, …, each different."""
    place = tmp_path_factory.mktemp("images")
    for number in range(MANY):
        Image.fromarray(pixels_of(number)).save(place / f"{number}.png")
    return place


def pixels_of(number: int) -> np.ndarray[Any, Any]:
    return np.full((8, 8, 3), number, np.uint8)


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels_of(number)).save(file, "PNG")
    return file.getvalue()


def columns(folder: Path, images: int, **others: Sequence[object]) -> dict[str, list[object]]:
    return {
        "path": [str(folder / f"{n}.png") for n in range(images)],
        **{name: list(some) for name, some in others.items()},
    }


def as_csv(folder: Path, name: str = "list.csv", **table: Sequence[object]) -> str:
    frame = pd.DataFrame(columns(folder, len(next(iter(table.values()))), **table))
    frame.to_csv(folder / name, index=False)
    return str(folder / name)


def as_jsonl(folder: Path, **table: Sequence[object]) -> str:
    whole = columns(folder, len(next(iter(table.values()))), **table)
    rows = [dict(zip(whole, row, strict=True)) for row in zip(*whole.values(), strict=True)]
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "list.jsonl")


def as_parquet(folder: Path, **table: Sequence[object]) -> str:
    pq.write_table(pa.table(columns(folder, len(next(iter(table.values()))), **table)), folder / "list.parquet")
    return str(folder / "list.parquet")


def as_bytes(folder: Path, **table: Sequence[object]) -> str:
    images = [png(n) for n in range(len(next(iter(table.values()))))]
    pq.write_table(pa.table({"image": images, **table}), folder / "bytes.parquet", row_group_size=7)
    return str(folder / "bytes.parquet")


def as_tables(folder: Path, **table: Sequence[object]) -> str:
    """Write two files; the labels of one alone may look otherwise."""
    count = len(next(iter(table.values())))
    for number, rows in enumerate((slice(0, count // 2), slice(count // 2, count))):
        images = [png(n) for n in range(count)[rows]]
        pq.write_table(
            pa.table({"image": images, **{k: v[rows] for k, v in table.items()}}), folder / f"two-{number}.parquet"
        )
    return str(folder / "two-*.parquet")


def as_frame(folder: Path, **table: Sequence[object]) -> pd.DataFrame:
    return pd.DataFrame(columns(folder, len(next(iter(table.values()))), **table))


def as_huggingface(folder: Path, **table: Sequence[object]) -> datasets.Dataset:
    images = [Image.fromarray(pixels_of(n)) for n in range(len(next(iter(table.values()))))]
    return datasets.Dataset.from_dict({"image": images, **table})


TABLES: dict[str, Callable[..., Any]] = {
    "csv": as_csv, "jsonl": as_jsonl, "parquet": as_parquet, "bytes": as_bytes, "tables": as_tables,
    "frame": as_frame, "huggingface": as_huggingface,
}  # fmt: skip


def targets(data: Any, labelling: Labelling = AUTOMATIC) -> Targets:
    found = targets_of(open_source(data, labelling=labelling))
    assert found is not None
    assert found.values.dtype == {"labels": "uint8", "values": "float64"}[found.kind]
    return found


def indices_of(source: Source) -> Any:
    assert isinstance(source, Subset)
    return source.indices


def sets_of(found: Targets) -> list[set[str]]:
    return [{name for name, has in zip(found.names, row, strict=True) if has} for row in found.values]


def same(one: Targets, other: Targets) -> None:
    assert (one.kind, one.names) == (other.kind, other.names)
    np.testing.assert_array_equal(one.values, other.values)


# ── reading ──

SETS = st.lists(st.frozensets(st.sampled_from(NAMES)), min_size=2, max_size=12)
ONCE = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@ONCE
@given(SETS)
def test_label_sets_survive_every_format(folder: Path, sets: list[frozenset[str]]) -> None:
    assume(set().union(*sets))
    lists = [sorted(some) for some in sets]
    texts = [" ; ".join(some + some[:1]) for some in lists]  # one is repeated
    several = Labelling("labels")
    for name, table in TABLES.items():
        if name != "csv":
            found = targets(table(folder, label=lists), AUTOMATIC)
            assert sets_of(found) == sets
            assert found.names == tuple(sorted(set().union(*sets)))
        if any(len(some) > 1 for some in lists):
            assert sets_of(targets(table(folder, label=texts), several)) == sets
    assert sets_of(targets(as_csv(folder, label=list(map(json.dumps, lists))))) == sets
    pairs = [(str(folder / f"{n}.png"), labels) for n, labels in enumerate(lists)]
    assert sets_of(targets(pairs)) == sets
    assert sets_of(targets((np.stack([pixels_of(n) for n in range(len(sets))]), list(map(set, lists))))) == sets


@ONCE
@given(SETS)
def test_columns_of_0_and_1_are_as_a_column_of_lists(folder: Path, sets: list[frozenset[str]]) -> None:
    table = {name: [int(name in some) for some in sets] for name in NAMES}
    for write in TABLES.values():
        found = targets(write(folder, **table))
        assert (found.names, list(map(frozenset, sets_of(found)))) == (NAMES, sets)
        asked = targets(write(folder, **table), Labelling(columns=("Sky", "dog")))
        assert sets_of(asked) == [some & {"sky", "dog"} for some in sets]
        assert asked.names == ("sky", "dog")
    # And as the rows of an array, unless they are one-hot.
    rows, images = np.array(list(table.values())).T, np.stack([pixels_of(n) for n in range(len(sets))])
    for kind in (np.int64, bool, np.float32):
        found = targets((images, rows.astype(kind)), Labelling("labels"))
        assert found.names == ("label 0", "label 1", "label 2", "label 3")
        np.testing.assert_array_equal(found.values, rows)
        if not (rows.sum(axis=1) == 1).all():
            same(targets((images, rows.astype(kind))), found)
            same(targets(TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(rows))), found)


@ONCE
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(-50, 1000)), min_size=2, max_size=12))
def test_numbers_survive_every_format(folder: Path, rows: list[tuple[float, int]]) -> None:
    ages, heights = (list(column) for column in zip(*rows, strict=True))
    assume(any(not age.is_integer() for age in ages))
    for write in TABLES.values():
        one = targets(write(folder, target=ages), Labelling("values"))
        assert (one.kind, one.names, one.values[:, 0].tolist()) == ("values", ("target",), ages)
        two = targets(write(folder, age=ages, height=heights), Labelling("values"))
        assert (two.names, two.values.tolist()) == (("age", "height"), [list(row) for row in rows])
        same(targets(write(folder, age=ages, height=heights)), two)
        swapped = targets(write(folder, age=ages, height=heights), Labelling(columns=("height", "age")))
        np.testing.assert_array_equal(swapped.values, two.values[:, ::-1])
    images = np.stack([pixels_of(n) for n in range(len(rows))])
    assert targets((images, ages)).names == ("value",)
    np.testing.assert_array_equal(targets((images, np.array(rows, np.float64)), Labelling("values")).values, two.values)
    dataset = TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor(rows, dtype=torch.float64))
    assert targets(dataset, Labelling("values")).names == ("value 0", "value 1")


def test_reasons(folder: Path) -> None:
    assert targets(as_csv(folder, age=[1, 2.5])).reason == "age has numbers with fractions (2.5)"
    assert targets(as_csv(folder, a=[1, 0], b=[1, 1], c=[0, 0])).reason == "3 columns of 0 and 1"
    assert targets(as_csv(folder, a=[1, 2], b=[1, 1])).reason == "2 columns of numbers"
    texts = as_csv(folder, label=["cat;outdoor", "cat", "outdoor"])
    assert targets(texts).reason == "label holds several labels per image, such as 'cat;outdoor'"
    assert targets(texts, Labelling("labels")).reason == ""
    images = np.zeros((3, 8, 8), np.uint8)
    assert targets((images, [0.5, 1, 2])).reason == "the array data has numbers with fractions (0.5)"
    assert targets((images, np.eye(3)[[0, 1, 1]] + [1, 0, 0] > 0)).reason == "the array data has rows of 0 and 1"


def test_labels_are_ordered_as_classes_are(folder: Path) -> None:
    assert targets(as_csv(folder, label=["10;9", "9", "10"])).names == ("9", "10")
    assert targets(as_csv(folder, label=["b;a10", "a9;b", "a10"]), Labelling("labels")).names == ("a10", "a9", "b")
    assert targets(as_csv(folder, z=[1, 0], a=[1, 0])).names == ("z", "a")


def test_class_names_of_hugging_face(folder: Path) -> None:
    feature = datasets.ClassLabel(names=["zebra", "ant", "bee"])
    images = [Image.fromarray(pixels_of(n)) for n in range(3)]
    features = datasets.Features({"image": datasets.Image(), "objects": datasets.Sequence(feature)})
    data = datasets.Dataset.from_dict({"image": images, "objects": [[0, 2], [], [2]]}, features=features)
    found = targets(data)
    assert (found.names, sets_of(found)) == (("zebra", "bee"), [{"zebra", "bee"}, set(), {"bee"}])
    data.rename_column("objects", "labels").to_parquet(str(folder / "hf.parquet"))
    same(targets(str(folder / "hf.parquet")), found)
    data.save_to_disk(str(folder / "saved"))
    same(targets(str(folder / "saved")), found)


def test_an_empty_text_is_no_label_only_if_there_may_be_several(folder: Path) -> None:
    assert sets_of(targets(as_csv(folder, label=["a;b", "", "a", "b"])))[1] == set()
    assert sets_of(targets(as_csv(folder, label=["a", "", "b"]), Labelling("labels")))[1] == set()
    assert open_source(as_csv(folder, label=["a", "", "b"])).labels.tolist() == [0, -1, 1]
    with pytest.raises(DataError, match=r"line 3 has no label \(found ''\); add one"):
        vitrail.open_data(as_csv(folder, label=["a", "", "b"]))
    with pytest.raises(
        DataError, match=r"line 3 has no label \(found 'null'\) in the column label; leave the text empty"
    ):
        open_source(as_csv(folder, label=["a;b", "null", "a", "b"]))
    for write in (as_jsonl, as_parquet, as_bytes):
        with pytest.raises(DataError, match=r" has no label in the column label; leave the text empty if it has none"):
            open_source(write(folder, label=[["a", "b"], None, ["a"]]))
    frame = open_source(as_frame(folder, label=[["a", "b"], None, ["a"]]))  # not known, which is not the same
    assert frame.labels.tolist() == [0, -1, 0]
    with pytest.raises(DataError, match=r"1\.png has no label; add one \(an empty list if it has none\)"):
        vitrail.open_data(as_frame(folder, label=[["a", "b"], None, ["a"]]))


def test_columns_that_hold_no_labels(folder: Path) -> None:
    """Other columns are not labels by accident."""
    tables: list[dict[str, list[Any]]] = [
        {"caption": ["a", "b", "c"]}, {"a": [1, 0, 1], "b": ["x", 0, 1]}, {"class_id": [3, 1, 2]}, {"flag": [0, 1, 1]},
        {"id": [0.5, 1.5, 2.5]}, {"a": [0.5, np.nan, 1], "b": ["x", 1, 2]},
    ]  # fmt: skip
    for table in tables:
        for write in (as_csv, as_parquet, as_bytes, as_frame, as_huggingface):
            if write in (as_parquet, as_bytes, as_huggingface) and any(
                len(set(map(type, some))) > 1 for some in table.values()
            ):
                continue
            source = open_source(write(folder, **table))
            assert (targets_of(source), set(source.labels.tolist())) == (None, {-1})
            with pytest.raises(DataError, match=r"has no label column; rename|without labels cannot be used here"):
                vitrail.open_data(write(folder, **table))
    index = as_frame(folder, age=[0.5, 1, 2]).to_csv()  # with the index of pandas as an unnamed column
    (folder / "index.csv").write_text(index)
    assert targets(folder / "index.csv").names == ("age",)


def test_asking_for_classes(folder: Path) -> None:
    plain = Labelling("classes")
    for labels in (["a;b", "a", "b"], [0.5, 1.5, 2.5], ["[a]", "b", "a"]):
        source = open_source(as_csv(folder, label=labels), labelling=plain)
        assert (targets_of(source), set(source.classes)) == (None, set(map(str, labels)))
    assert open_source((np.zeros((3, 8, 8)), [0.5, 1, 2]), labelling=plain).classes == ("0.5", "1", "2")
    with pytest.raises(ConfigError, match="one class per image, but 2 columns were named; name one of them"):
        open_source(as_csv(folder, a=[1, 0], b=[1, 0]), labelling=Labelling("classes", ("a", "b")))
    assert open_source(as_csv(folder, a=["x", "y"], label=[1, 0]), labelling=Labelling(columns=("a",))).classes == (
        "x",
        "y",
    )


# ── faults ──


AGE, BITS = Labelling("values", ("age",)), Labelling("labels", ("a", "b"))
WRONG: dict[str, tuple[dict[str, list[object]], Labelling, str]] = {
    "text": ({"age": [1, "tall", 3.5]}, AGE, "line 3 has 'tall' in the column age; write a number"),
    "infinity": ({"age": [1, "inf", 3.5]}, AGE, "line 3 has 'inf' in the column age; write a finite number"),
    "huge": ({"age": [1, "1e999", 3.5]}, AGE, "line 3 has '1e999' in the column age; write a finite number"),
    "huge label": ({"label": [1, "1e999", 3.5]}, AUTOMATIC, "has '1e999' in the column label; write a finite number"),
    "nan": ({"age": [1.5, "nan", 3.5]}, AGE, "line 3 has no number in the column age; write one, or remove the image"),
    "missing": ({"age": [1.5, "", 3], "b": [1, 2, 3]}, AUTOMATIC, "line 3 has no number in the column age; write one"),
    "list": ({"age": [1, "[1, 2]", 3]}, AGE, "line 3 has a list, ['1', '2'] in the column age; write one number"),
    "bit": ({"a": [1, 0, 1], "b": [1, 0, 2]}, BITS, "line 4 has '2' in the column b; write 0 or 1"),
    "no bit": ({"a": [1, 0, 1], "b": [1, 0, ""]}, AUTOMATIC, "line 4 has neither 0 nor 1 in the column b; write one"),
    "neither": (
        {"a": [1, 0], "b": [1, "x"]},
        BITS._replace(kind=None),
        "line 3 has 'x' in the column b; write a number",
    ),
    "column": (
        {"age": [1, 2, 3]},
        Labelling(columns=("agee",)),
        "has no column 'agee'; its columns are 'path', 'age'; did you mean 'age'?",
    ),
    "constant": ({"age": [3, 3, 3], "b": [1, 2, 3]}, AUTOMATIC, "every image has the value 3 in the column age; there"),
    "unused": (
        {"cat": [1, 1], "dog": [0, 0]},
        AUTOMATIC,
        "no training image has the label 'dog'; remove the column or",
    ),
    "no label": ({"cat": [0, 0, 0], "dog": [0, 0, 0]}, AUTOMATIC, "list.csv has any label; add labels to train on"),
    "one image": ({"a": [1], "b": [1]}, AUTOMATIC, "list.csv has 1 image to train on; training needs at least two"),
    "twice": (
        {"a": [1, 0], "a ": [1, 0]},
        Labelling(columns=("a", "a ")),
        "has two columns named 'a'; use unique names",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_used(name: str, folder: Path) -> None:
    table, labelling, sentence = WRONG[name]
    with pytest.raises((DataError, ConfigError)) as caught:
        vitrail.open_data(as_csv(folder, **table), labelling=labelling)
    assert sentence in str(caught.value)
    faults: list[str] = []
    try:  # the check finds the same, besides others
        vitrail.open_data(as_csv(folder, **table), labelling=labelling, faults=faults)
    except DataError as error:
        faults.append(str(error))
    assert any(sentence in fault for fault in faults)


def test_all_faulty_rows_are_named_at_once(folder: Path) -> None:
    path = as_csv(folder, age=["1.5", "x", "2.5", ""])
    with pytest.raises(DataError, match=r"has 2 faults: \(1\) .*line 3 has 'x'.*\(2\) .*line 5 has no number"):
        vitrail.open_data(path, labelling=Labelling("values", ("age",)))
    faults: list[str] = []
    splits = vitrail.open_data(path, labelling=Labelling("values", ("age",)), faults=faults, val=0, test=0.5)
    assert len(faults) == 2
    assert len(splits.train) + len(splits.test) == 2


# ── strata and splits ──


def frame_of(folder: Path, sets: Sequence[Sequence[str]], **others: Sequence[object]) -> pd.DataFrame:
    return as_frame(folder, label=[list(some) for some in sets], **others)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.integers(2, 200), st.integers(1, 6), st.integers(0, 9), st.sampled_from([(0.1, 0.2), (0.2, 0.0), (0.05, 0.05)])
)
def test_frequent_labels_are_in_every_split(
    images: int, labels: int, seed: int, fractions: tuple[float, float]
) -> None:
    generator = np.random.default_rng([images, labels, seed])
    has = generator.random((images, labels)) < generator.random(labels) ** 2
    has[0, ~has.any(axis=0)] = True
    assume(images >= 3)
    val, test = fractions
    data = np.arange(images * 16, dtype=np.uint32).view(np.uint8).reshape(images, 8, 8)
    splits = vitrail.open_data((data, has), seed=seed, val=val, test=test, labelling=Labelling("labels"))
    each = [split for split in (splits.train, splits.val, splits.test) if split is not None]
    assert sorted(np.concatenate([indices_of(split) for split in each])) == list(range(images))
    for split in each:
        found = targets_of(split)
        assert found is not None
        np.testing.assert_array_equal(found.values, has[indices_of(split)])
        assert found.values[:, has.sum(axis=0) >= FEWEST].any(axis=0).all()
    again = vitrail.open_data((data, has), seed=seed, val=val, test=test, labelling=Labelling("labels"))
    assert again.record == splits.record
    for share, drawn in ((val, splits.val), (test, splits.test)):
        assert drawn is None or abs(len(drawn) - share * images) <= len(splits.train.classes) + labels
    if images >= 40:
        restored = vitrail.open_data((data, has), seed=seed + 1, record=splits.record, labelling=Labelling("labels"))
        assert keys_of(restored.train) == keys_of(splits.train)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.floats(-1e9, 1e9), st.integers(0, 3)), min_size=3, max_size=150))
def test_strata_of_numbers(numbers: list[float]) -> None:
    found = Targets("values", ("age",), np.array(numbers, np.float64)[:, None])
    strata = strata_of(found)
    labels = strata.assign(found)
    counts = np.bincount(labels, minlength=len(strata.names))
    assert 1 <= len(strata.names) <= 10
    assert len(set(strata.names)) == len(strata.names)
    assert len(strata.names) == 1 or counts.min() >= FEWEST
    ordered = labels[np.argsort(numbers, kind="stable")]
    assert (np.diff(ordered) >= 0).all()
    assert [len(set(labels[np.array(numbers) == number])) for number in set(numbers)] == [1] * len(set(numbers))


def test_names_of_strata(folder: Path) -> None:
    ages = np.arange(60) / 2
    assert open_source(as_frame(folder, age=ages)).classes == (
        "0 to 4.5", "5 to 9.5", "10 to 14.5", "15 to 19.5", "20 to 24.5", "25 to 29.5",
    )  # fmt: skip
    sets = [["cat", "sky"]] * 12 + [["cat", "other"]] * 20 + [["rare"]] * 3 + [[]] * 15
    source = open_source(frame_of(folder, sets))
    assert source.classes == ("sky", "other", "other labels")
    assert np.bincount(source.labels).tolist() == [12, 20, 18]


def test_splits_that_the_data_defines(folder: Path) -> None:
    sets = [["a", "b"] if n % 2 else ["a"] for n in range(30)] + [["b"]] * 10
    split = ["train"] * 30 + ["test"] * 10
    for data in (frame_of(folder, sets, split=split), as_jsonl(folder, label=sets, split=split)):
        splits = vitrail.open_data(data)
        assert len(splits.test) == 10
        assert [output_names_of(one) for one in splits[:3]] == [("a", "b")] * 3
        chosen = choose_images(data)
        assert (chosen.split, sets_of(targets_of(chosen.source))) == ("test", [{"b"}] * 10)
        restored = vitrail.open_data(data, record=splits.record)
        assert keys_of(restored.val) == keys_of(splits.val)
    frame = frame_of(folder, [["a"]] * 30 + [["b"], ["a", "b"]] * 5, split=split)
    with pytest.raises(DataError, match="the test split of the DataFrame has the label 'b', which the training split"):
        vitrail.open_data(frame)


def test_splits_in_several_objects() -> None:
    images = np.arange(40 * 16, dtype=np.uint32).view(np.uint8).reshape(40, 8, 8)
    train = ["a;b" if n % 2 else "a" for n in range(40)]
    train[0] = "b"
    data = {"test": (images[:3], ["b", "a", ""]), "train": (images, train)}
    splits = vitrail.open_data(data)
    assert sets_of(targets_of(splits.test)) == [{"b"}, {"a"}, set()]
    assert splits.test.classes == splits.train.classes
    everything = choose_images(data, "all").source
    assert output_names_of(everything) == ("a", "b")
    assert len(targets_of(everything)) == len(everything) == 43
    with pytest.raises(DataError, match="the val split of the list has the label 'c', which the training"):
        vitrail.open_data({"train": (list(images), train), "val": (list(images[:2]), ["c", "a"])})
    ages = np.linspace(0, 1, 40)
    splits = vitrail.open_data({"train": (images, ages), "val": (images[:3], [0, 1, 5])})
    assert targets_of(splits.val).values[:, 0].tolist() == [0, 1, 5]
    assert splits.val.labels.tolist() == [0, 3, 3]
    assert choose_images({"train": (images, ages), "val": (images[:3], [0, 1, 5])}).split == "val"
    two, three = np.random.default_rng(0).random((2, 40, 2)), np.zeros((3, 3))
    with pytest.raises(
        DataError, match="the val split of the array data has the columns value 0, value 1, value 2, the"
    ):
        vitrail.open_data({"train": (images, two[0]), "val": (images[:3], three)})


def test_splits_in_several_files(tmp_path: Path) -> None:
    for split, labels in (("train", ["a;b", "a", "b"] * 8), ("test", ["a", "b", ""])):
        images = [png(n + 100 * (split == "test")) for n in range(len(labels))]
        pq.write_table(pa.table({"image": images, "tags": labels}), tmp_path / f"{split}-0.parquet")
    splits = vitrail.open_data(tmp_path)
    assert sets_of(targets_of(splits.test)) == [{"a"}, {"b"}, set()]
    assert splits.record["counts"]["test"] == dict(
        zip(
            splits.train.classes,
            np.bincount(splits.test.labels, minlength=len(splits.train.classes)).tolist(),
            strict=True,
        )
    )
    assert keys_of(vitrail.open_data(tmp_path, record=splits.record).val) == keys_of(splits.val)


def test_subsets() -> None:
    images = np.arange(60 * 16, dtype=np.uint32).view(np.uint8).reshape(60, 8, 8)
    ages = np.linspace(0, 1, 60)
    whole, half = vitrail.open_data((images, ages)), vitrail.open_data((images, ages), fraction=0.5)
    assert set(indices_of(half.train)) < set(indices_of(whole.train))
    np.testing.assert_allclose(targets_of(half.train).values[:, 0], ages[indices_of(half.train)])
    with pytest.raises(ConfigError, match="per_class is 3, but the images of the array data have no classes"):
        vitrail.open_data((images, ages), per_class=3)


def test_targets_pass_through_every_wrapper(tmp_path: Path) -> None:
    images = np.arange(30 * 16, dtype=np.uint32).view(np.uint8).reshape(30, 8, 8)
    labels = np.random.default_rng(0).random((30, 3)) < 0.5
    splits = vitrail.open_data((images, labels))
    kept = cached(splits.train, CacheSize(8, 1), folder=tmp_path)
    for source in (splits.train, kept, pickle.loads(pickle.dumps(kept))):
        np.testing.assert_array_equal(targets_of(source).values, labels[indices_of(splits.train)])


def test_images_to_pretrain_on_need_no_targets(folder: Path) -> None:
    for data in (frame_of(folder, [["a"], ["b"], ["a", "b"]] * 8), as_csv(folder, age=[0.5, 1, 2] * 8)):
        splits = open_unlabelled(data)
        assert splits.train.classes == output_names_of(splits.train) == ("image",)
        assert targets_of(splits.train) is None
        assert label_rows(splits.train).tolist() == [0] * len(splits.train)
        assert len(splits.train) + len(splits.val) == 24


def test_fingerprints_change_with_the_targets() -> None:
    images = np.zeros((4, 8, 8), np.uint8)
    labels = np.array([[1, 0], [1, 1], [0, 1], [1, 1]])
    several = [
        (images, labels), (images, labels[::-1]), (images, 1 - labels), (images, labels + 0.5), (images, labels * 1.5),
        (images, [["a"], ["a", "b"], ["b"], []]), (images, [["a"], ["a", "c"], ["c"], []]), (images, [0, 1, 1, 1]),
    ]  # fmt: skip
    assert len({given_data(data).fingerprint for data in several}) == len(several)
    named = [
        given_data(as_frame(Path(), label=[["a"], [name]]).assign(path=list(images[:2]))).fingerprint for name in "bc"
    ]
    assert len(set(named)) == 2


def test_a_labelling_for_one_kind(folder: Path) -> None:
    """0 and 1 in a column that was named say who has its label; in the column of labels they are labels."""
    assert targets(as_csv(folder, dog=[0, 1, 1]), Labelling("labels", ("dog",))).names == ("dog",)
    assert targets(as_csv(folder, label=[0, 1, 1]), Labelling("labels")).names == ("0", "1")
    assert targets(as_csv(folder, label=["a, b", "c"]), Labelling("labels", separator=";")).names == ("a, b", "c")
    assert targets(as_csv(folder, label=["1;5", "3"]), Labelling("labels")).names == ("1", "3", "5")
    assert targets(as_csv(folder, label=["1,5", "3"])).values.tolist() == [[1.5], [3.0]]


def test_data_with_classes_is_not_labelled_otherwise(folder: Path) -> None:
    images = np.arange(40 * 16, dtype=np.uint32).view(np.uint8).reshape(40, 8, 8)
    with pytest.raises(DataError, match="digits has one class per image, not numbers; list the images in a manifest"):
        vitrail.open_data("digits", labelling=Labelling("values"))
    for opened in (vitrail.open_data, open_source, choose_images):
        with pytest.raises(ConfigError, match="digits has no columns, so 'age' cannot be one; do not name columns"):
            opened("digits", labelling=Labelling(columns=("age",)))
        with pytest.raises(ConfigError, match="the data has no columns, so 'age' cannot be one"):
            opened((images, np.arange(40.0)), labelling=Labelling(columns=("age",)))


# ── evaluation ──


def test_a_classifier_does_not_fit_data_with_targets(folder: Path) -> None:
    source = open_source(frame_of(folder, [["dog"], ["cat", "dog"], []]))
    with pytest.raises(DataError, match="the data has several labels per image, but the model has one class per image"):
        match_classes(source, ("cat", "dog"), 2)
    with pytest.raises(DataError, match="the data has numbers, but the model has one class per image; use a model of"):
        match_classes(open_source(as_frame(folder, age=[0.5, 1])), ("cat", "dog"), 2)
