"""The contact sheet."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.checking import contact_sheet as sheets
from vitrail.data.checking.contact_sheet import GAP, IMAGES, LINE, MARGIN, TILE, contact_sheet, save_sheet
from vitrail.data.sources.folders import open_folder
from vitrail.data.sources.source import Arrays, digits
from vitrail.errors import DataError

TOP = MARGIN + 2 * LINE + LINE


def plain(classes: int, each: int, *shape: int) -> Arrays:
    """Return images of a single grey: ten times the class index."""
    labels = np.repeat(np.arange(classes), each)
    images = np.broadcast_to(10 * labels.reshape(-1, *(1 for _ in shape)), (len(labels), *shape)).astype(np.uint8)
    return Arrays(images, labels, tuple(f"class {number}" for number in range(classes)))


def test_every_class_has_a_row() -> None:
    sheet = contact_sheet(plain(3, 9, 200, 100), title="plain")
    block = LINE + TILE + 3 * GAP
    for label in range(3):
        for column in range(IMAGES):
            centre = (MARGIN + column * (TILE + GAP) + TILE // 2, TOP + label * block + TILE // 2)
            assert sheet.getpixel(centre) == (10 * label,) * 3
    # The tile is visible next to a tall image, and the background after the last image.
    assert sheet.getpixel((MARGIN + 2, TOP + TILE // 2)) == (0xEE, 0xEB, 0xE4)
    assert sheet.getpixel((sheet.width - 2, TOP)) == (0xFB, 0xFA, 0xF7)


def test_the_sheet_depends_only_on_the_seed() -> None:
    one, same, other = (contact_sheet(digits(), title="digits", seed=seed) for seed in (0, 0, 1))
    assert one.tobytes() == same.tobytes() != other.tobytes()
    assert one.width <= 2000


@pytest.mark.parametrize("classes", [1, 5, 6, 24, 25, 300])
def test_many_classes(classes: int) -> None:
    sheet = contact_sheet(plain(classes, 1, 8, 8), title="x" * 300)
    assert sheet.width <= 2000
    assert sheet.height <= 2400


def test_omitted_classes_are_counted() -> None:
    all_shown, one_not = (contact_sheet(plain(classes, 1, 8, 8), title="x") for classes in (24, 25))
    assert one_not.height == all_shown.height + LINE
    line = np.asarray(one_not)[-LINE - MARGIN // 2 :]
    assert (line != line[0, 0]).any()


@pytest.mark.parametrize("shape", [(8, 8), (300, 20, 3), (20, 300, 4), (30, 30, 2), (30, 30, 5), (1, 1), (124, 124, 1)])
def test_images_of_any_shape(shape: tuple[int, ...]) -> None:
    assert contact_sheet(plain(2, 2, *shape), title="shapes").width <= 2000


def test_names_in_characters_of_the_font() -> None:
    assert sheets.drawable("café crème, Straße") == "cafe creme, Stra?e"
    assert sheets.drawable("猫") == ""


def test_unreadable_images_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    for label in ("broken", "mixed"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "data" / label / f"bad{number}.jpg").write_text("no image")
    Image.new("RGB", (50, 50), (200, 0, 0)).save(tmp_path / "data" / "mixed" / "good.png")
    sheet = contact_sheet(open_folder(tmp_path / "data"), title="data")
    second = TOP + LINE + TILE + 3 * GAP
    assert sheet.getpixel((MARGIN + TILE // 2, second + TILE // 2)) == (200, 0, 0)


def test_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sheet = contact_sheet(plain(2, 2, 8, 8), title="plain")
    target = tmp_path / "sheet.png"
    save_sheet(sheet, target)
    with Image.open(target) as written:
        assert written.size == sheet.size
    before = target.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match=r"the sheet .* cannot be written: No space left on device"):
        save_sheet(sheet, target)
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(DataError, match="No such file or directory"):
        save_sheet(sheet, tmp_path / "nowhere" / "sheet.png")
