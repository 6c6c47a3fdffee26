"""Which images a model is evaluated on, and how their classes are matched."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.sources.opening import open_data
from vitrail.data.sources.selection import Joined, SeenInTraining, choose_images, match_classes, seen_in_training
from vitrail.data.sources.source import Arrays, Source
from vitrail.errors import ConfigError, DataError


def fill(folder: Path, count: int, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    for label in classes:
        (folder / label).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (4, 4), number).save(folder / label / f"{number}.png")
    return folder


def names(source: Source, count: int) -> list[str]:
    return [Path(source.name(index)).parts[-3] for index in range(count)]


def test_a_plain_folder_is_evaluated_as_a_whole(tmp_path: Path) -> None:
    result = choose_images(fill(tmp_path / "data", 1, ("cat",)))
    assert (len(result.source), result.split, result.held_out) == (1, "all", False)
    assert len(choose_images(fill(tmp_path / "more", 4), "all").source) == 8


@pytest.mark.parametrize(("splits", "chosen"), [(("train", "val", "test"), "test"), (("train", "valid"), "val")])
def test_the_test_split_comes_first(tmp_path: Path, splits: tuple[str, ...], chosen: str) -> None:
    for count, split in enumerate(splits, 2):
        fill(tmp_path / split, count)
    result = choose_images(tmp_path)
    assert (result.split, result.held_out, len(result.source)) == (chosen, True, 2 * (len(splits) + 1))
    train = choose_images(tmp_path, "train")
    assert (train.held_out, len(train.source)) == (False, 4)


def test_all_splits_together(tmp_path: Path) -> None:
    for count, split in enumerate(("train", "val", "test"), 2):
        fill(tmp_path / split, count)
    result = choose_images(tmp_path, "all").source
    assert isinstance(result, Joined)
    assert names(result, 18) == ["train"] * 4 + ["val"] * 6 + ["test"] * 8
    assert result.labels.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert result.classes == ("cat", "dog")
    last = tmp_path / "test" / "dog" / "3.png"
    assert result.read(17) == last.read_bytes()
    assert result.stamp(17) == result.sources[2].stamp(7)
    with pytest.raises(IndexError):
        result.name(18)


def test_splits_of_a_manifest(tmp_path: Path) -> None:
    fill(tmp_path / "p", 3)
    rows = [f"p/{label}/{n}.png,{label},{split}" for label in ("cat", "dog") for n, split in enumerate(("test", "val"))]
    (tmp_path / "list.csv").write_text("path,label,split\n" + "\n".join(rows) + "\n")
    result = choose_images(tmp_path / "list.csv")
    assert (result.split, len(result.source)) == ("test", 2)
    assert len(choose_images(tmp_path / "list.csv", "all").source) == 4
    with pytest.raises(DataError, match="has no train split; it has val, test"):
        choose_images(tmp_path / "list.csv", "train")


def test_a_train_folder_alone_defines_no_splits(tmp_path: Path) -> None:
    fill(tmp_path / "train", 3)
    assert len(choose_images(tmp_path).source) == 6
    result = choose_images(tmp_path, "test")
    assert (len(result.source), result.held_out) == (2, False)


def test_the_splits_of_the_run_are_used(tmp_path: Path) -> None:
    splits = open_data(fill(tmp_path / "data", 10), seed=7, val=0.2, test=0.3)
    for requested, split, own in (
        (None, "test", splits.test),
        ("val", "val", splits.val),
        ("train", "train", splits.train),
    ):
        result = choose_images(tmp_path / "data", requested, record=splits.record)
        assert (result.split, result.held_out) == (split, split != "train")
        assert [result.source.name(i) for i in range(len(result.source))] == [own.name(i) for i in range(len(own))]
    assert len(choose_images(tmp_path / "data", "all", record=splits.record).source) == 20
    only_val = open_data(tmp_path / "data", val=0.2, test=0).record
    assert choose_images(tmp_path / "data", record=only_val).split == "val"
    with pytest.raises(DataError, match="without a test split"):
        choose_images(tmp_path / "data", "test", record=only_val)


def test_the_training_images_of_a_run_on_a_subset(tmp_path: Path) -> None:
    data = fill(tmp_path / "data", 10)
    splits = open_data(data, seed=7, val=0.2, test=0.3, fraction=0.4)
    selected = {split: choose_images(data, split, record=splits.record).source for split in ("train", "val", "test")}
    for split, own in zip(("train", "val", "test"), splits[:3], strict=True):
        assert [selected[split].name(i) for i in range(len(selected[split]))] == [own.name(i) for i in range(len(own))]
    seen = {split: seen_in_training(source, splits.record) for split, source in selected.items()}
    assert seen["train"] == SeenInTraining(0, 4, "name")
    assert seen["val"] == SeenInTraining(4, 0, "name")
    assert seen["test"] == SeenInTraining(0, 0, "name")
    everything = choose_images(data, "all", record=splits.record).source
    assert seen_in_training(everything, splits.record) == SeenInTraining(4, 4, "name")


def test_other_data_than_the_runs(tmp_path: Path) -> None:
    record = open_data(fill(tmp_path / "data", 10)).record
    result = choose_images(fill(tmp_path / "other", 3), record=record)
    assert (result.split, result.held_out, len(result.source)) == ("all", False, 6)
    with pytest.raises(DataError, match=r"of the recorded (val|test) split, is missing|when the split was recorded"):
        choose_images(tmp_path / "other", "test", record=record)


def test_a_validation_split_drawn_from_a_train_folder(tmp_path: Path) -> None:
    fill(tmp_path / "train", 10)
    fill(tmp_path / "test", 2)
    record = open_data(tmp_path).record
    assert len(choose_images(tmp_path, "train").source) == 20
    assert len(choose_images(tmp_path, "train", record=record).source) == 18
    assert len(choose_images(tmp_path, "val", record=record).source) == 2
    with pytest.raises(DataError, match="has no val split; it has train, test"):
        choose_images(tmp_path, "val")


def test_invalid_selections(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown split 'tset'; choose test, val, train, all"):
        choose_images("digits", "tset")
    with pytest.raises(DataError, match="does not exist"):
        choose_images(tmp_path / "nowhere")


def source(classes: tuple[str, ...], labels: tuple[int, ...]) -> Arrays:
    return Arrays(np.zeros((len(labels), 2, 2), np.uint8), np.array(labels), classes)


def test_classes_are_matched_by_name() -> None:
    data = source(("b", "empty", "a"), (0, 2, 2))
    result = match_classes(data, ("a", "x", "b"), 3)
    assert (result.labels.tolist(), result.classes) == ([2, 0, 0], ("a", "x", "b"))
    assert match_classes(data, data.classes, 3) is data
    assert match_classes(data, None, 3) is data
    assert match_classes(data, ("p", "q", "r"), 3, by_number=True).classes == ("p", "q", "r")


@pytest.mark.parametrize(
    ("model", "outputs", "labels", "message"),
    [
        (("a", "kat", "b"), 3, (0,), r"class 'cat', which .* its 3 classes are 'a', 'kat', 'b'; did you mean 'kat'"),
        (("x", "y"), 2, (0, 1), r"class 'cat' \(and 1 more\)"),
        (("cat", "dog", "cat"), 3, (0, 1), "several classes named 'cat'"),
        (None, 3, (0,), "the data has 2 classes and the model 3"),
        (("cat", "dog"), 2, (-1, -1, 0), "image 0 and 1 more have no class"),
    ],
)
def test_classes_that_do_not_match(
    model: tuple[str, ...] | None, outputs: int, labels: tuple[int, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        match_classes(source(("cat", "dog"), labels), model, outputs)
