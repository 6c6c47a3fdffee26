"""Checks of images with several labels, or with numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.mask_data import write_shapes

import vitrail
from vitrail.cli.check import _print_report
from vitrail.data.checking.check import check_data, quick_check
from vitrail.data.checking.contact_sheet import contact_sheet
from vitrail.data.sources.opening import open_data, open_unlabelled

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(0, 256, (60, 32, 32), np.uint8)
LABELS = np.stack([np.arange(60) % 2 == 0, np.arange(60) % 3 == 0, np.arange(60) < 2], axis=1)
AGES = np.arange(60) / 2


def several() -> Any:
    return IMAGES, [[name for name, has in zip("abc", row, strict=True) if has] for row in LABELS]


def printed(report: Any, capsys: pytest.CaptureFixture[str]) -> str:
    _print_report(report)
    return capsys.readouterr().out


def test_labels_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    splits = open_data(several())
    report = check_data(splits, size=32, cache=False)
    assert report.classes == ("a", "b", "c")
    totals = {name: sum(counts[name] for counts in report.counts.values()) for name in "abc"}
    assert totals == {"a": 30, "b": 20, "c": 2}
    assert report.summary == "60 images with 3 labels; 1 label is missing from a split"
    assert [finding.kind for finding in report.findings] == ["missing"]
    assert report.targets is not None
    assert report.targets.labels is not None
    assert (report.targets.labels.without, report.targets.labels.per_image) == (19, 52 / 60)
    found = json.loads(json.dumps(report.as_dict()))["targets"]
    assert found["labels"]["most"] == {"name": "a", "images": 30}
    assert found["labels"]["fewest"] == {"name": "c", "images": 2}
    assert (found["kind"], found["columns"]) == ("labels", [])
    text = printed(report, capsys)
    assert "An image has 0.867 of 3 labels on average; 19 images have none." in text
    assert "Most frequent: 'a' with 30 images; rarest: 'c' with 2 images." in text
    assert "Detected: the array data holds several labels per image, such as" in text
    assert text.split("label  train")[1].split("Sizes")[0].split()[-4:] == ["all", "42", "6", "12"]


def test_numbers_are_summarised(capsys: pytest.CaptureFixture[str]) -> None:
    heights = np.where(np.arange(60) < 55, 170.0, 190.0)
    report = check_data(open_data((IMAGES, np.stack([AGES, heights], axis=1))), size=32, cache=False)
    assert report.summary == "60 images with 2 numbers each (value 0, value 1); no problems found"
    assert report.targets is not None
    age, height = report.targets.columns
    assert (age.minimum, age.mean, age.maximum, age.missing) == (0, AGES.mean(), 29.5, 0)
    assert (height.minimum, height.maximum) == (170, 190)
    assert sum(report.counts["train"].values()) == 42
    lines = printed(report, capsys).splitlines()
    assert "value 0     0.00  14.75    29.50        0" in lines
    ranges = [line.split("  ")[0] for line in lines[lines.index(next(x for x in lines if x.startswith("value 0 "))) :]]
    assert [name for name in ranges if " to " in name][:2] == ["0 to 4.5", "5 to 9.5"]


def test_the_same_image_with_other_targets_is_a_conflict() -> None:
    images, ages = np.concatenate([IMAGES, IMAGES[:2]]), np.append(AGES, [0, 9.0])
    report = quick_check(open_data((images, ages)), size=32)
    conflicts = [copies for copies in report.duplicates or () if copies.kind == "conflicting"]
    assert [[which.label for which in copies.images] for copies in conflicts] == [["value 0.500", "value 9.000"]]


def test_a_check_with_a_labelling(tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    asked = vitrail.check((IMAGES, AGES), size=32, workers=0, sheet=sheet, task="classification")
    assert asked.report.targets is None
    assert len(asked.report.classes) == 60
    assert "targets" not in asked.as_dict()
    numbers = vitrail.check((IMAGES, AGES), size=32, workers=0, task="regression")
    assert numbers.passed
    assert numbers.as_dict()["targets"]["reason"] == ""


def test_faults_do_not_stop_a_check() -> None:
    checked = vitrail.check((IMAGES, np.ones(60) / 2), size=32, workers=0)
    assert not checked.passed
    assert "every image has the value 0.5 in the column value" in checked.report.faults[0]


def test_sheets() -> None:
    labels, numbers, classes = (
        contact_sheet(open_data(data).train, title="x")
        for data in (several(), (IMAGES, AGES), (IMAGES, list("abc") * 20))
    )
    assert labels.height == classes.height  # a row for each of three labels
    assert numbers.height >= classes.height


def test_nothing_is_said_about_targets_of_images_to_pretrain_on() -> None:
    report = quick_check(open_unlabelled((IMAGES, AGES)), size=32, labels=False)
    assert (report.targets, report.classes) == (None, ("image",))
    assert report.summary.startswith("60 images (headers of 60 read")


def test_classes_of_pixels_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_shapes(tmp_path / "shapes", 30, (40, 50))
    (folder / "classes.txt").write_text("background\ndisc\nsquare\ncross\ndot")
    with Image.open(folder / "masks" / "0000.png") as stored:
        mask = np.array(stored)
    mask[0, :4] = 4
    Image.fromarray(mask).save(folder / "masks" / "0000.png")
    result = vitrail.check(folder, size=32, workers=0, sheet=tmp_path / "sheet.png")
    report = result.report
    assert result.passed
    assert report.summary == "30 images with masks of 5 classes; 2 classes are missing from a split, 1 class rare"
    missing, rare = report.findings
    assert {"cross: none in train", "cross: none in val", "cross: none in test"} < set(missing.details)
    assert missing.serious
    assert rare.text == "1 class has less than 0.1% of the labelled pixels"
    assert rare.details == ("dot: 0.0067%, in 1 image",)
    found = json.loads(json.dumps(report.as_dict()))["targets"]
    assert (found["kind"], found["reason"], found["labels"], found["columns"]) == (
        "masks", "every image has a mask", None, []
    )  # fmt: skip
    masks = []
    for path in sorted((folder / "masks").iterdir()):
        with Image.open(path) as stored:
            masks.append(np.array(stored))
    counts = np.bincount(np.concatenate([mask.ravel() for mask in masks]), minlength=5)
    assert [one["name"] for one in found["pixels"]] == ["background", "disc", "square", "cross", "dot"]
    assert np.allclose([one["fraction"] for one in found["pixels"]], counts / counts.sum())
    assert found["pixels"][2]["images"] == sum((mask == 2).any() for mask in masks)
    assert sum(report.counts[split]["square"] for split in report.counts) == found["pixels"][2]["images"]
    lines = printed(report, capsys).splitlines()
    assert lines[lines.index("Masks") + 1] == "Detected: every image has a mask."
    table = [line.split() for line in lines[lines.index("Masks") + 2 : lines.index("Masks") + 9]]
    assert table[0] == ["class", "pixels", "train", "val", "test"]
    assert [row[0] for row in table[1:]] == ["background", "square", "disc", "dot", "cross", "all"]
    assert table[-1] == ["all", "21", "3", "6"]
    assert table[1][1] == f"{100 * counts[0] / counts.sum():.2f}%"


def test_a_sheet_tints_the_pixels_of_a_class(tmp_path: Path) -> None:
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    mask = np.zeros((124, 124), np.uint8)
    mask[:, 62:] = 1
    for number in range(10):
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
        Image.fromarray(np.full((124, 124, 3), 100, np.uint8)).save(tmp_path / "images" / f"{number}.png")
    sheet = np.asarray(contact_sheet(open_data(tmp_path, val=0, test=0).train, title="halves"))
    tinted, plain = (sheet == (177, 80, 50)).all(axis=2), (sheet == 100).all(axis=2)
    assert tinted.sum() == plain.sum() == 2 * 7 * 124 * 62
    assert (np.flatnonzero(tinted.any(axis=1)) == np.flatnonzero(plain.any(axis=1))).all()


def test_values_can_be_ignored_in_a_check(tmp_path: Path) -> None:
    folder = write_shapes(tmp_path, 20, 16)
    assert vitrail.check(folder, ignore=[2], size=16, workers=0).report.classes == ("background", "disc")
