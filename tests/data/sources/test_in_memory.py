"""Data in Python: every kind becomes the same source, and what cannot be used is said in one sentence."""

import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from tests.support.python_data import KINDS, Digits, make, some_digits, write_folder
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import vitrail
from vitrail.data.decode import decode
from vitrail.data.sources.given import given_data, lists_images
from vitrail.data.sources.in_memory import InMemory, recorded_kind
from vitrail.data.sources.opening import open_source, open_unlabelled
from vitrail.data.sources.selection import choose_images
from vitrail.errors import DataError, InputError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("digits")
    write_folder(place)
    return place


class Telling(Digits):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[int] = self.numbers.tolist()


def opened(data: object) -> InMemory:
    given = given_data(data)
    assert isinstance(given, InMemory)
    return given


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_same_source_as_the_folder(kind: str, folder: Path) -> None:
    expected, actual = open_source(folder), pickle.loads(pickle.dumps(open_source(make(kind, folder))))
    assert actual.classes == expected.classes
    np.testing.assert_array_equal(actual.labels, expected.labels)
    for index in range(len(expected)):
        np.testing.assert_array_equal(decode(actual.read(index), 3), decode(expected.read(index), 3))
    splits, theirs = vitrail.open_data(make(kind, folder)), vitrail.open_data(folder)
    for one, other in zip(splits[:3], theirs[:3], strict=True):
        np.testing.assert_array_equal(one.indices, other.indices)
    restored = vitrail.open_data(make(kind, folder), record=splits.record, seed=5)
    np.testing.assert_array_equal(restored.test.indices, splits.test.indices)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fingerprint_is_of_the_content(kind: str, folder: Path) -> None:
    first, again = opened(make(kind, folder)), opened(make(kind, folder))
    assert str(first) == str(again)
    assert recorded_kind(str(first)) == first.kind
    assert recorded_kind(f"/data/{first}") is None


def test_other_data_has_another_fingerprint() -> None:
    images, labels = some_digits()
    other = images.copy()
    other[-1, 0, 0] += 1
    several = [(images, labels), (other, labels), (images, labels[::-1]), (images, labels.astype(str)), images]
    fingerprints = [opened(data).fingerprint for data in (*several, {"train": (images, labels)})]
    assert len(set(fingerprints)) == len(fingerprints) - 1  # "0" and 0 are the same class
    assert fingerprints[0] == fingerprints[3]
    rows = datasets.Dataset.from_dict({"image": [Image.fromarray(one) for one in images], "label": labels.tolist()})
    shuffled = rows.shuffle(seed=1)
    assert opened(rows).fingerprint != opened(shuffled).fingerprint


def test_a_split_of_one_dataset_does_not_fit_another() -> None:
    images, labels = some_digits()
    record = vitrail.open_data((images, labels)).record
    assert choose_images((images, labels), record=record).split == "test"
    assert choose_images((255 - images, labels), record=record).split == "all"


def test_labels_of_a_dataset_are_known_without_reading_it() -> None:
    reading, telling = Digits(), Telling()
    whole = opened(telling).splits["train"]
    np.testing.assert_array_equal(whole.labels, opened(reading).splits["train"].labels)
    assert telling.reads == len(telling) + 9  # sampled, and every fourth once more
    assert reading.reads == 2 * len(reading) + 9
    telling.targets = telling.targets[::-1]  # not those of the items
    np.testing.assert_array_equal(opened(telling).splits["train"].labels, whole.labels)


def test_parts_of_datasets() -> None:
    images, labels = some_digits()
    whole = TensorDataset(torch.from_numpy(images)[:, None], torch.from_numpy(labels))
    part = Subset(whole, range(0, len(whole), 2))
    np.testing.assert_array_equal(open_source(part).labels, labels[::2])
    both = open_source(ConcatDataset([part, whole]))
    np.testing.assert_array_equal(both.labels, [*labels[::2], *labels])
    named = Digits()
    named.classes = ["zero", "one", "two", "three"]  # type: ignore[attr-defined]
    assert open_source(Subset(named, [0, 1])).classes == ("zero", "one", "two", "three")


def test_splits_by_name() -> None:
    images, labels = some_digits()
    splits = vitrail.open_data(
        {"train": (images, labels), "Validation": (images[::4], labels[::4].astype(str))}, test=0
    )
    assert (len(splits.train), len(splits.val), splits.test) == (36, 9, None)
    assert splits.val.name(0) == "val image 0"
    only = choose_images({"test": (images, labels)})
    assert (only.split, only.held_out, len(only.source)) == ("test", True, 36)
    everything = choose_images({"train": (images, labels), "test": Digits()}, "all").source
    assert len(everything) == 72
    with pytest.raises(DataError, match="the array data has no train split; give one, besides test"):
        vitrail.open_data({"test": (images, labels)})


def test_a_column_of_splits(folder: Path) -> None:
    frame = make("dataframe", folder)
    frame["split"] = (["train"] * 8 + ["valid"] * 2 + ["test"] * 2) * 3
    splits = vitrail.open_data(frame)
    assert tuple(map(len, splits[:3])) == (24, 6, 6)
    rows = make("huggingface", folder).add_column("split", frame["split"].tolist())
    assert tuple(map(len, vitrail.open_data(rows)[:3])) == (24, 6, 6)
    frame["class_name"] = [("zero", "one", "two")[label] for label in frame["label"]]
    assert vitrail.open_data(frame).train.classes == ("one", "two", "zero")


def test_a_saved_huggingface_dataset(folder: Path, tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    rows = make("huggingface", folder)
    rows.save_to_disk(str(tmp_path / "one"))
    assert tuple(map(len, vitrail.open_data(tmp_path / "one")[:3])) == tuple(map(len, vitrail.open_data(folder)[:3]))
    three = datasets.DatasetDict({"train": rows, "validation": rows.select(range(0, 36, 3)), "test": rows})
    three.save_to_disk(str(tmp_path / "three"))
    assert tuple(map(len, vitrail.open_data(tmp_path / "three")[:3])) == (36, 12, 36)
    assert tuple(map(len, vitrail.open_data(three)[:3])) == (36, 12, 36)
    assert choose_images(tmp_path / "three").split == "test"
    assert len(open_unlabelled(tmp_path / "three", val=0.5).train) == 18
    with pytest.raises(DataError, match="the Hugging Face dataset has the splits train, val, test; give one of them"):
        open_source(tmp_path / "three")
    os.truncate(tmp_path / "one" / "data-00000-of-00001.arrow", 100)
    with pytest.raises(DataError, match="cannot be read as a Hugging Face dataset"):
        vitrail.open_data(tmp_path / "one")


def test_columns_of_a_huggingface_dataset(folder: Path) -> None:
    rows = make("huggingface", folder)
    cifar = rows.rename_columns({"image": "img", "label": "fine_label"})
    assert open_source(cifar).classes == ("0", "1", "2")
    two = cifar.add_column("coarse_label", [0] * 36).cast_column("coarse_label", datasets.ClassLabel(names=["x"]))
    with pytest.raises(DataError, match=r"several columns of labels \(fine_label, coarse_label\); call the one to use"):
        open_source(two)
    with pytest.raises(DataError, match=r"has no image column \(fine_label\); cast one"):
        open_source(cifar.remove_columns("img"))
    with pytest.raises(InputError, match="IterableDataset without random access; pass a Dataset, loaded with"):
        open_source(rows.to_iterable_dataset())
    unknown = rows.remove_columns("label").add_column("label", [-1] * 36)
    unlabelled = unknown.cast_column("label", datasets.ClassLabel(names=["a", "b"]))
    assert set(open_source(unlabelled).labels) == {-1}
    transformed = rows.with_transform(lambda batch: {"image": [0] * len(batch["image"])})
    np.testing.assert_array_equal(open_source(transformed).labels, open_source(rows).labels)
    assert isinstance(open_source(transformed).read(0), bytes)


def test_modes_of_pillow_images() -> None:
    colours = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    turned = Image.new("L", (4, 8))
    turned.getexif()[0x0112] = 6
    images = [colours, colours.convert("P"), colours.convert("1"), clear, Image.new("I;16", (8, 8), 65535), turned]
    source = open_source(images)
    assert [np.shape(source.read(index))[:2] for index in range(5)] == [(8, 8)] * 5
    assert np.shape(source.read(5)) == (4, 8)
    for index, image in enumerate(images[:4]):
        np.testing.assert_array_equal(decode(source.read(index), 3), vitrail_pixels(image))
    assert decode(source.read(4), 3).max() == 255


def vitrail_pixels(image: Image.Image) -> np.ndarray:
    from vitrail.data.decode import open_image

    return open_image(image).pixels(3)


# ── what cannot be used ──


class Normalised(Digits):
    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.images[index])[None] / 50 - 1, int(self.numbers[index])


class Augmented(Digits):
    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return np.full((8, 8), self.reads, np.uint8), int(self.numbers[index])


class Flipped(Digits):
    """Some items are flipped, as by a random transform; the first one is not."""

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        image = self.images[index]
        return (image[:, ::-1] if self.reads % 37 == 5 else image), int(self.numbers[index])


class Broken(Digits):
    def __getitem__(self, index: int) -> Any:
        raise KeyError("label_7")


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


GREY = np.zeros((4, 8, 8), np.uint8)
ONE = np.zeros((8, 8), np.uint8)
WRONG: dict[str, tuple[object, str]] = {
    "empty list": ([], "the list of images is empty"),
    "empty arrays": ((GREY[:0], []), r"the images have shape (0, 8, 8); expected"),
    "empty dataset": (TensorDataset(torch.zeros(0, 3, 8, 8)), "the dataset is empty"),
    "empty mapping": ({}, "an empty mapping"),
    "empty frame": (pd.DataFrame({"path": [], "label": []}), "the DataFrame has no images"),
    "mixed labels": (
        [(ONE, 0), (ONE, "cat")],
        "the list has labels of type int (item 0) and str (item 1); use one type",
    ),
    "mixed list": ([(ONE, 0), ONE], "item 1 of the list has no label, but others have"),
    "missing label": ([(ONE, 0), (ONE + 1, None), (ONE + 2, 1)], "item 1 has no label; add one, or remove the image"),
    "other length": ((GREY, [0, 1]), "4 images with 2 labels; give one label per image"),
    "one-hot": ((GREY, np.eye(4)), "the labels have shape (4, 4); give one label per image, such as labels.argmax(1)"),
    "lists of lists": ((GREY, [["a", ["b"]]] * 4), "image 0 of the array data has ['b'] in a list of labels; list"),
    "one-hot lists": ((GREY, [[0, 0, 1]] * 4), "the array data has one-hot labels, one 1 per image; give one label"),
    "rows of integers": ((GREY, np.full((4, 2), 7)), "the labels have shape (4, 2); give one label per image, such as"),
    "one number": ((GREY, [0.5] * 4), "every image has the value 0.5 in the column value; there is nothing to learn"),
    "infinity": ((GREY, np.full((4, 2), np.inf)), "image 0 of the array data has inf in its labels; write a finite"),
    "unlabelled array": (GREY, "the array data without labels cannot be used here; pass a tuple of images and labels"),
    "unlabelled list": ([ONE, ONE + 1], "the list without labels cannot be used here; pass pairs of an image"),
    "floats": ((GREY - 1.0, [0, 1] * 2), "the array of images has values from -1 to -1; an image has integers 0…255"),
    "not a number": ((GREY + np.nan, [0, 1] * 2), "the array of images has values from nan to nan"),
    "channels first": ((np.zeros((4, 3, 8, 8)), [0, 1] * 2), "an array of images should be (images, height, width, ch"),
    "channels last": ((torch.zeros(4, 8, 8, 3), [0, 1] * 2), "a tensor of images should be (images, channels, height"),
    "rows of pixels": ((np.zeros((4, 64)), [0, 1] * 2), "the images have shape (4, 64); expected (images, height"),
    "one image": ((np.zeros((8, 8, 3)), [0] * 8), "the images have shape (8, 8, 3); expected"),
    "one path": (("a.png", "b.png"), "a tuple of two should be (images, labels), but the first is of type str"),
    "no file": ([("no.png", 0), ("nor.png", 1)], "no.png, item 0 of the list, does not exist, nor do 1 more; correct"),
    "no file in a frame": (pd.DataFrame({"path": ["x.png"], "label": [0]}), "x.png, row 0 of the DataFrame, does not"),
    "a URL": ([("https://a.b/c.png", 0)], "item 0 of the list is a URL, which is not downloaded"),
    "not an image": ([(3, 0)], "item 0 of the list is of type int, not an image; use a path"),
    "text labels": ((GREY, "abcd"), "the labels are of type str; give one label per image"),
    "no image column": (pd.DataFrame({"x": [1]}), "the DataFrame has no image column; rename one of its columns ('x')"),
    "no labels": (pd.DataFrame({"image": [ONE]}), "the DataFrame without labels cannot be used here; add a column"),
    "NA of pandas": (
        pd.DataFrame({"image": [ONE, ONE + 1], "label": pd.array([1, None], dtype="Int64")}),
        "row 1 has no label; add one, or remove the image",
    ),
    "odd split": (pd.DataFrame({"image": [ONE], "label": [0], "split": ["dev"]}), "row 0 of the DataFrame has the spl"),
    "mapping": ({"path": ["a.png"], "label": ["x"]}, "a mapping with the keys 'path', 'label'; name its splits train"),
    "paths of splits": ({"train": "photos"}, "the train split is of type str; give its images with labels"),
    "normalised": (Normalised(), "has values from -1 to"),
    "augmented": (Augmented(), "item 0 of the dataset is another image when it is read again; leave out random"),
    "sometimes augmented": (Flipped(), "of the dataset is another image when it is read again; leave out random"),
    "broken": (Broken(), "item 0 of the dataset cannot be read: KeyError: 'label_7'"),
    "numbers": (Numbers(), "item 0 of the dataset is of type int, not an image"),
    "loader": (DataLoader(Digits()), "the data is a DataLoader; pass its dataset, loader.dataset"),
    "iterable": (Endless(), "the data is a Endless without random access"),
    "nothing": (None, "the data is of type NoneType, which is not supported; give a path (a folder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, sentence = WRONG[name]
    with pytest.raises((DataError, InputError), match=re.escape(sentence)):
        vitrail.train(data, quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_path_twice_in_a_list(folder: Path) -> None:
    path = str(next(folder.rglob("*.png")))
    with pytest.raises(DataError, match=r"is twice in the list, as items 0 and 1; list it once"):
        open_source([(path, 0), (path, 1)])


def test_two_images_are_columns_or_pairs() -> None:
    images = [ONE, ONE + 1]
    assert lists_images((images, ["a", "b"]))
    for two in ((images, ["a", "b"]), (np.stack(images), ("a", "b")), ((images[0], "a"), (images[1], "b"))):
        assert open_source(two).classes == ("a", "b")


def test_a_project_with_its_own_module_datasets() -> None:
    own = type("Photos", (Digits,), {"__module__": "datasets"})()
    np.testing.assert_array_equal(open_source(own).labels, open_source(Digits()).labels)
