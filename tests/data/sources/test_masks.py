"""Images whose labels are masks: where masks are found, what their values mean, and what can be wrong with them."""

import json
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.support.mask_data import SHAPES, write_shapes

from vitrail.data.checking.check import check_data, open_to_check
from vitrail.data.decode import open_image
from vitrail.data.sources import index_files
from vitrail.data.sources.masks import IGNORED_PIXEL, has_masks, mask_at, mask_values, match_masks
from vitrail.data.sources.opening import open_data, open_source, open_unlabelled
from vitrail.data.sources.selection import choose_images
from vitrail.data.sources.source import Source, digits
from vitrail.data.sources.targets import Labelling, Targets, label_rows, label_texts, targets_of
from vitrail.errors import ConfigError, DataError
from vitrail.training.recipe_files import read_recipe

MASKS = Labelling("masks")


def of(source: Source) -> Targets:
    targets = targets_of(source)
    assert targets is not None
    return targets


def save(path: Path, array: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(array)).save(path, **options)
    return path


def pair(folder: Path, name: str, mask: Any, image: str = "images", masks: str = "masks") -> None:
    """Write a grey image and its mask."""
    mask = np.asarray(mask)
    save(folder / image / f"{name}.png", np.full((*mask.shape, 3), 90, np.uint8))
    save(folder / masks / f"{name}.png", mask)


def halves(left: int, right: int, dtype: Any = np.uint8) -> NDArray[Any]:
    """Return a mask 4×6 of two values."""
    mask = np.full((4, 6), left, dtype)
    mask[:, 3:] = right
    return mask


def stored(source: Source, index: int) -> NDArray[np.uint8]:
    """Return the mask in the file of an image's mask."""
    return np.asarray(Image.open(source.name(index).replace("/images/", "/masks/")))


# ── layouts ──


def test_a_folder_with_images_and_masks(tmp_path: Path) -> None:
    splits = open_data(write_shapes(tmp_path, 30, (20, 24)))
    assert [len(split) for split in splits[:3] if split is not None] == [21, 3, 6]
    for source in (splits.train, splits.val, splits.test):
        assert source is not None
        targets = of(source)
        assert (targets.kind, targets.names, targets.reason) == ("masks", SHAPES, "every image has a mask")
        assert has_masks(source)
        for index in range(len(source)):
            mask = mask_at(source, index)
            assert mask.dtype == np.uint8
            assert (mask == stored(source, index)).all()
            assert targets.values[index].tolist() == np.bincount(mask.ravel(), minlength=3).tolist()
    assert splits.record["names"]["test"][0].endswith(".png")
    assert (label_rows(splits.train) == of(splits.train).values).all()


def as_parts(folder: Path, layout: str) -> Path:
    for seed, split in enumerate(("train", "val")):
        made = write_shapes(folder / "made" / split, 6, 20, seed)
        for name in ("images", "masks"):
            target = folder / "data" / (f"{split}/{name}" if layout == "outside" else f"{name}/{split}")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(made / name, target)
    shutil.copy(folder / "made" / "train" / "classes.txt", folder / "data")
    return folder / "data"


@pytest.mark.parametrize("layout", ["outside", "inside"])
def test_masks_of_splits(tmp_path: Path, layout: str) -> None:
    place = as_parts(tmp_path, layout)
    splits = open_data(place, test=0)
    assert splits.val is not None
    assert (len(splits.train), len(splits.val), splits.test) == (6, 6, None)
    for source in (splits.train, splits.val):
        assert of(source).names == SHAPES
        assert all((mask_at(source, i) == stored(source, i)).all() for i in range(6))
    chosen = choose_images(place)
    assert (chosen.split, len(chosen.source)) == ("val", 6)
    everything = choose_images(place, "all").source
    assert len(everything) == 12
    assert all((mask_at(everything, i) == stored(everything, i)).all() for i in range(12))
    assert len(of(everything)) == 12
    unlabelled = open_unlabelled(place)
    assert len(unlabelled.train) + len(unlabelled.val or ()) == 6
    assert (unlabelled.train.classes, has_masks(unlabelled.train)) == (("image",), False)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_manifest_with_a_column_of_masks(tmp_path: Path, suffix: str) -> None:
    write_shapes(tmp_path, 20, 16)
    rows = [
        {"path": f"images/{n:04}.png", "Mask": f"masks/{n:04}.png", "split": "test" if n < 5 else "train"}
        for n in range(20)
    ]
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)] if suffix == "csv" else map(json.dumps, rows)
    place = tmp_path / f"list.{suffix}"
    place.write_text("\n".join(lines))
    splits = open_data(place, val=0.2)
    assert splits.test is not None
    assert (len(splits.train), len(splits.test)) == (12, 5)
    assert (of(splits.train).names, of(splits.train).reason) == (SHAPES, "every image has a mask")
    assert (mask_at(splits.test, 3) == stored(splits.test, 3)).all()
    assert (choose_images(place).split, len(choose_images(place, "all").source)) == ("test", 20)
    assert not has_masks(open_unlabelled(place).train)


def test_another_column_may_hold_masks(tmp_path: Path) -> None:
    write_shapes(tmp_path, 20, 16)
    rows = [f"images/{n:04}.png,masks/{n:04}.png,{'ab'[n % 2]}" for n in range(20)]
    (tmp_path / "list.csv").write_text("\n".join(["path,outline,label", *rows]))
    assert open_data(tmp_path / "list.csv").train.classes == ("a", "b")
    source = open_data(tmp_path / "list.csv", labelling=Labelling("masks", ("outline",))).train
    assert (mask_at(source, 0) == stored(source, 0)).all()
    assert of(source).reason == ""
    with pytest.raises(DataError, match=r"has no column mask; its columns are 'path', 'outline', 'label': rename"):
        open_data(tmp_path / "list.csv", labelling=MASKS)
    with pytest.raises(ConfigError, match=r"2 columns were named \(outline, label\), but an image has one mask"):
        open_data(tmp_path / "list.csv", labelling=Labelling("masks", ("outline", "label")))
    with pytest.raises(DataError, match=r"has no column 'outlines'; its columns are"):
        open_data(tmp_path / "list.csv", labelling=Labelling("masks", ("outlines",)))


def test_a_label_goes_first_and_a_column_mask_of_numbers_holds_none(tmp_path: Path) -> None:
    write_shapes(tmp_path, 30, 16)
    place = tmp_path / "list.csv"
    rows = [f"images/{n:04}.png,masks/{n:04}.png,{'ab'[n % 2]}" for n in range(30)]
    place.write_text("\n".join(["path,mask,label", *rows]))
    assert open_data(place).train.classes == ("a", "b")
    assert has_masks(open_data(place, labelling=MASKS).train)
    place.write_text("\n".join(["path,mask", *(f"images/{n:04}.png,{n / 7}" for n in range(30))]))
    assert of(open_data(place).train).kind == "values"


def test_masks_may_have_an_ending_and_be_at_any_depth(tmp_path: Path) -> None:
    for name, of_mask in (("a/1", "a/1_mask"), ("a/2", "a/2"), ("b/1", "b/1_labelIds"), ("b/1_mask", "b/1_mask_mask")):
        pair(tmp_path, name, halves(0, 1))
        (tmp_path / "masks" / f"{name}.png").rename(tmp_path / "masks" / f"{of_mask}.tmp")
    for path in list((tmp_path / "masks").rglob("*.tmp")):
        path.rename(path.with_suffix(".png"))
    source = open_source(tmp_path)
    assert [source.name(i).split("images/")[1] for i in range(len(source))] == [
        "a/1.png", "a/2.png", "b/1.png", "b/1_mask.png"
    ]  # fmt: skip
    assert all((mask_at(source, i) == halves(0, 1)).all() for i in range(4))


def test_capital_letters_in_names_of_folders(tmp_path: Path) -> None:
    pair(tmp_path, "1", halves(0, 1), "Images", "Masks")
    assert has_masks(open_source(tmp_path))


def test_classes_are_not_masks_and_masks_are_not_classes(tmp_path: Path) -> None:
    write_shapes(tmp_path / "masked", 6, 16)
    with pytest.raises(DataError, match=r"has a mask per image, not one class; leave the task to the data, or choose"):
        open_data(tmp_path / "masked", labelling=Labelling("classes"))
    with pytest.raises(ConfigError, match=r"has no columns, so 'x' cannot be one"):
        open_data(tmp_path / "masked", labelling=Labelling("masks", ("x",)))
    for name in ("cat", "images"):  # images/ alone is a class
        for n in range(5):
            save(tmp_path / "classes" / name / f"{n}.png", np.full((8, 8), n, np.uint8))
    assert open_data(tmp_path / "classes").train.classes == ("cat", "images")
    for data in (str(tmp_path / "classes"), "digits"):
        with pytest.raises(
            DataError, match=r"has no masks; put images into a folder images and their masks into masks"
        ):
            open_data(data, labelling=MASKS)
    images = np.zeros((4, 8, 8), np.uint8)
    with pytest.raises(DataError, match=r"has no masks; put images into a folder images"):
        open_data((images, np.arange(4)), labelling=MASKS)
    with pytest.raises(DataError, match=r"list.parquet is a Parquet file, which cannot list masks; use a CSV or JSONL"):
        open_data(save(tmp_path / "list.png", images[0]).rename(tmp_path / "list.parquet"), labelling=MASKS)
    with pytest.raises(ConfigError, match=r"data.ignore is \[7\], values in masks, but digits has no masks"):
        open_data("digits", labelling=Labelling(ignore=(7,)))


# ── values and classes ──


@pytest.mark.parametrize("kind", ["grey", "palette", "sixteen", "bits", "bmp", "tiff", "npy"])
def test_the_value_of_a_pixel_is_its_class(tmp_path: Path, kind: str) -> None:
    mask = halves(0, 1) if kind == "bits" else halves(3, 300, np.uint16) if kind == "sixteen" else halves(3, 7)
    pair(tmp_path, "1", mask)
    path = tmp_path / "masks" / "1.png"
    if kind == "palette":
        image = Image.fromarray(mask).convert("P")
        image.putdata(mask.ravel().tolist())
        image.putpalette(np.random.default_rng(0).integers(0, 256, 768).tolist())
        image.save(path)
    elif kind == "bits":
        Image.fromarray(mask > 0).save(path)
        with Image.open(path) as image:
            assert image.mode == "1"
    elif kind == "npy":
        np.save(path.with_suffix(".npy"), mask)
    elif kind in ("bmp", "tiff"):
        Image.fromarray(mask).save(path.with_suffix(f".{kind}"))
    if kind in ("npy", "bmp", "tiff"):
        path.unlink()
    source = open_source(tmp_path)
    assert of(source).names == {"bits": ("0", "1"), "sixteen": ("3", "300")}.get(kind, ("3", "7"))
    assert (mask_at(source, 0) == halves(0, 1)).all()
    assert of(source).values.tolist() == [[12, 12]]


def test_classes_without_names_are_called_by_their_values(tmp_path: Path) -> None:
    for n in range(20):
        pair(tmp_path, str(n), halves(2 if n % 2 else 10, (5, 255)[n % 4 == 3]))
    source = open_data(tmp_path).train
    assert of(source).names == ("2", "5", "10")  # in numerical order
    assert set(label_texts(source, np.arange(len(source)))) == {"2 50%, 5 50%", "5 50%, 10 50%", "2 100%"}
    index = label_texts(source, np.arange(len(source))).index("2 100%")
    assert (mask_at(source, index) == halves(0, IGNORED_PIXEL)).all()


@pytest.mark.parametrize(
    "text",
    [
        "0 background\n3 a cat\n5 dog",
        "0: background\r\n3: a cat\r\n5: dog\r\n",
        "\ufeff5,dog\n0,background\n\n3,a cat\n",
    ],
)
def test_classes_txt_names_values(tmp_path: Path, text: str) -> None:
    pair(tmp_path, "1", halves(5, 3))
    (tmp_path / "classes.txt").write_bytes(text.encode())
    source = open_source(tmp_path)
    assert of(source).names == ("background", "a cat", "dog")
    assert of(source).values.tolist() == [[0, 12, 12]]
    assert (mask_at(source, 0) == halves(2, 1)).all()


def test_names_alone_count_from_0(tmp_path: Path) -> None:
    pair(tmp_path, "1", halves(1, 2))
    (tmp_path / "masks" / "classes.txt").write_text("void\n3d print\ncat\n")
    assert of(open_source(tmp_path)).names == ("void", "3d print", "cat")
    assert of(open_source(tmp_path, labelling=Labelling(ignore=(0,)))).names == ("3d print", "cat")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", r"classes.txt is empty; write a line such as 0 background for each value, or remove it"),
        ("0 a\n0 b", r"classes.txt names the value 0 twice; use each once"),
        ("0 a\n1 a", r"classes.txt has the name 'a' twice; use each once"),
        ("a\n\nb", r"classes.txt has an empty line 2; write the name of that value"),
        ("0 a\n99999 b", r"classes.txt names the value 99999; the values of masks are 0 to 65535"),
        (b"\xff\xfe", r"classes.txt is not UTF-8; save it as UTF-8"),
        (
            "0 a\n1 b",
            r"the mask .*masks/1.png has the value 7, which classes.txt does not name; name it there, or leave its "
            r"pixels out with --set data.ignore=\[7\]$",
        ),
    ],
)
def test_what_can_be_wrong_with_classes_txt(tmp_path: Path, text: str | bytes, error: str) -> None:
    pair(tmp_path, "1", halves(0, 7))
    (tmp_path / "classes.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=error):
        open_source(tmp_path)


def test_values_can_be_ignored_and_the_record_says_so(tmp_path: Path) -> None:
    for n in range(30):
        pair(tmp_path, str(n), halves(n % 3, 9))
    labelling = Labelling(ignore=(9, 200))
    splits = open_data(tmp_path, labelling=labelling)
    assert of(splits.train).names == ("0", "1", "2")
    assert set(np.unique(mask_at(splits.train, 0))) < {0, 1, 2, IGNORED_PIXEL}
    record = json.loads(json.dumps(splits.record))
    assert record["labelling"] == {"kind": "masks", "columns": [], "separator": None, "ignore": [9, 200]}
    again = open_data(tmp_path, seed=5, record=record)
    for one, other in zip(splits[:3], again[:3], strict=True):
        assert one is not None
        assert other is not None
        assert [one.name(i) for i in range(len(one))] == [other.name(i) for i in range(len(other))]
        assert of(one).names == of(other).names
        assert (of(one).values == of(other).values).all()
    assert choose_images(str(tmp_path), record=record).split == "test"
    with pytest.raises(ConfigError, match=r"data.ignore has -1; the values of masks are 0 to 65535"):
        open_data(tmp_path, labelling=Labelling(ignore=(-1,)))


def test_a_subset_keeps_its_masks(tmp_path: Path) -> None:
    write_shapes(tmp_path, 30, 16)
    whole, half = open_data(tmp_path), open_data(tmp_path, fraction=0.5)
    names = {whole.train.name(i): i for i in range(len(whole.train))}
    assert 5 < len(half.train) < 15
    for i in range(len(half.train)):
        assert (mask_at(half.train, i) == mask_at(whole.train, names[half.train.name(i)])).all()
    with pytest.raises(ConfigError, match=r"have no classes; use fraction"):
        open_data(tmp_path, per_class=3)


def test_splits_have_the_classes_of_train(tmp_path: Path) -> None:
    pair(tmp_path / "train", "1", halves(0, 4))
    pair(tmp_path / "train", "2", halves(7, 4))
    pair(tmp_path / "val", "1", halves(4, 7))
    splits = open_data(tmp_path)
    assert splits.val is not None
    assert of(splits.val).names == ("0", "4", "7")
    assert of(splits.val).values.tolist() == [[0, 12, 12]]
    assert (mask_at(splits.val, 0) == halves(1, 2)).all()
    pair(tmp_path / "val", "2", halves(4, 8))
    with pytest.raises(
        DataError, match=r"the masks of the val split of .* have the class '8', which those of the train"
    ):
        open_data(tmp_path)
    faults: list[str] = []
    val = open_data(tmp_path, faults=faults).val
    assert val is not None
    assert len(faults) == 1
    assert (mask_at(val, 1) == halves(1, IGNORED_PIXEL)).all()


def test_one_class_cannot_be_trained(tmp_path: Path) -> None:
    for n in range(4):
        pair(tmp_path, str(n), halves(0, 255))
    with pytest.raises(
        DataError, match=r"have only one class, '0'; training needs at least two, and pixels of value 255"
    ):
        open_data(tmp_path)


# ── faults ──


def as_array(folder: Path, mask: NDArray[Any]) -> None:
    (folder / "masks" / "3.png").unlink()
    np.save(folder / "masks" / "3.npy", mask)


def grey_png(mask: NDArray[np.uint8], bits: int) -> bytes:
    """Return a grey PNG with fewer than 8 bits per pixel, which Pillow does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    texts = ["".join(format(value, f"0{bits}b") for value in row) for row in mask.tolist()]
    rows = b"".join(
        b"\0" + int(text.ljust(-(-len(text) // 8) * 8, "0"), 2).to_bytes(-(-len(text) // 8)) for text in texts
    )
    header = struct.pack(">IIBBBBB", mask.shape[1], mask.shape[0], bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(kind, content) for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    )


CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no mask": (lambda f: (f / "masks" / "3.png").unlink(), r"images/3.png has no mask; add .*masks/3.png, or remove"),
    "no image": (
        lambda f: (f / "images" / "3.png").unlink(),
        r"masks/3.png has no image; add it to .*images, or remove",
    ),
    "two masks": (
        lambda f: shutil.copy(f / "masks" / "3.png", f / "masks" / "3.bmp"),
        r"images/3.png has two masks, 3.bmp and 3.png; keep one",
    ),
    "two images": (
        lambda f: shutil.copy(f / "images" / "3.png", f / "images" / "3.bmp"),
        r"images/3.png has the mask of 3.bmp; give each image its own name without the suffix",
    ),
    "not an image": (
        lambda f: (f / "masks" / "3.png").write_bytes(b"nothing"),
        r"the mask .*masks/3.png cannot be used: it is not an image: the file starts with b'nothing'",
    ),
    "truncated": (
        lambda f: (f / "masks" / "3.png").write_bytes((f / "masks" / "3.png").read_bytes()[:-30]),
        r"the mask .*masks/3.png cannot be used: ",
    ),
    "colour": (
        lambda f: save(f / "masks" / "3.png", np.zeros((4, 6, 3), np.uint8)),
        r"the mask .*masks/3.png cannot be used: it is an image of mode RGB, but the value of a pixel should be its "
        r"class; save it with one channel, or with a palette$",
    ),
    "jpeg": (
        lambda f: save(f / "masks" / "3.png", halves(0, 1), format="JPEG"),
        r"the mask .*masks/3.png cannot be used: it is a JPEG, which changes the values of pixels; save it as PNG",
    ),
    "size": (
        lambda f: save(f / "masks" / "3.png", halves(0, 1)[:3]),
        r"the mask .*masks/3.png has 6×3 pixels, its image 6×4; save the mask in the size of its image",
    ),
    "fractions": (
        lambda f: as_array(f, np.zeros((4, 6))),
        r"the mask .*masks/3.npy cannot be used: it has numbers of type float64, not integers",
    ),
    "few bits": (
        lambda f: (f / "masks" / "3.png").write_bytes(grey_png(halves(0, 3), 2)),
        r"the mask .*masks/3.png cannot be used: its grey values have 2 bits, which programs scale to 0…255 when they "
        r"read them; save it with 8 bits, or with a palette$",
    ),
    "four bits": (
        lambda f: (f / "masks" / "3.png").write_bytes(grey_png(halves(0, 3), 4)),
        r"its grey values have 4 bits",
    ),
    "negative": (
        lambda f: as_array(f, np.full((4, 6), -1)),
        r"the mask .*masks/3.npy cannot be used: its values range from -1 to -1; use 0 to 65535",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_one_sentence_and_can_be_skipped(tmp_path: Path, case: str) -> None:
    for n in range(8):
        pair(tmp_path, str(n), halves(0, 1))
    change, error = CASES[case]
    change(tmp_path)
    with pytest.raises(DataError, match=error):
        open_data(tmp_path)
    splits, faults = open_to_check(str(tmp_path))
    assert len(faults) == 1
    kept = sorted(source.name(i)[-5] for source in splits[:3] if source is not None for i in range(len(source)))
    assert kept == (["0", "1", "2", "3", "4", "5", "6", "7"] if case == "two images" else list("0124567"))
    assert check_data(splits, size=16, cache=False, faults=faults).findings[0].details == tuple(faults)


def test_faults_of_manifests(tmp_path: Path) -> None:
    write_shapes(tmp_path, 4, 16)
    place = tmp_path / "list.csv"
    rows = [f"images/{n:04}.png,masks/{n:04}.png" for n in range(4)]
    place.write_text("\n".join(["path,mask", *rows[:2], "images/0002.png,", "images/0003.png,masks/gone.png"]))
    faults: list[str] = []
    assert len(open_data(place, faults=faults, val=0, test=0).train) == 2
    assert len(faults) == 2
    assert faults[0].endswith("list.csv, line 4 has no mask (found ''); write its path, or remove the image")
    assert "masks/gone.png, listed in " in faults[1]
    with pytest.raises(DataError, match=r"line 4 has no mask \(found ''\); write its path, or remove the image"):
        open_data(place)
    place.write_text("\n".join(["path,mask", *rows[:2], "images/0003.png,masks/gone.png"]))
    with pytest.raises(DataError, match=r"the mask .*masks/gone.png, listed in .*list.csv, does not exist; correct"):
        open_data(place)


def test_nothing_that_can_be_used(tmp_path: Path) -> None:
    pair(tmp_path, "1", halves(0, 1))
    (tmp_path / "masks" / "1.png").rename(tmp_path / "masks" / "2.png")
    for opened in (open_data, open_to_check):
        with pytest.raises(DataError, match=r"has no image with a mask"):
            opened(str(tmp_path))
    (tmp_path / "masks" / "2.png").rename(tmp_path / "masks" / "1.png")
    save(tmp_path / "masks" / "1.png", np.zeros((4, 6, 3), np.uint8))
    with pytest.raises(DataError, match=r"mode RGB.*has no image with a mask|mode RGB"):
        open_to_check(str(tmp_path))


def test_splits_inside_need_masks(tmp_path: Path) -> None:
    for split in ("train", "val"):
        pair(tmp_path, f"{split}/1", halves(0, 1))
    shutil.rmtree(tmp_path / "masks" / "val")
    with pytest.raises(DataError, match=r"images/val has no masks; add .*masks/val"):
        open_data(tmp_path)


def test_numbers_of_objects_are_too_many_classes(tmp_path: Path) -> None:
    pair(tmp_path, "1", np.arange(400, dtype=np.uint16).reshape(20, 20))
    with pytest.raises(DataError, match=r"have 399 different values, more than 255 classes; write the class of each"):
        open_source(tmp_path)


def test_an_unreadable_image_is_no_fault_of_its_mask(tmp_path: Path) -> None:
    for n in range(8):
        pair(tmp_path, str(n), halves(0, 1))
    (tmp_path / "images" / "3.png").write_bytes(b"\x89PNG nothing")
    assert sum(len(split) for split in open_data(tmp_path)[:3] if split is not None) == 8


def test_a_mask_that_changed_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    pair(tmp_path, "1", halves(0, 1))
    source = open_source(tmp_path)
    save(tmp_path / "masks" / "1.png", halves(0, 2))
    with pytest.raises(DataError, match=r"the mask .*1.png has changed: it has a new value; open the data again"):
        mask_at(source, 0)


# ── orientation ──


@pytest.mark.parametrize("orientation", range(1, 9))
def test_masks_are_stored_as_images_are_displayed(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "images").mkdir()
    save(tmp_path / "images" / "1.jpg", np.zeros((4, 6, 3), np.uint8), exif=exif)
    shown = open_image((tmp_path / "images" / "1.jpg").read_bytes())
    upright = np.arange(24, dtype=np.uint8).reshape(shown.height, shown.width)
    save(tmp_path / "masks" / "1.png", upright)
    assert (mask_at(open_source(tmp_path), 0) == upright).all()
    if orientation < 5:
        return
    save(tmp_path / "masks" / "1.png", upright.T)
    with pytest.raises(
        DataError, match=r"its image 4×6; turn the mask like its image, which its EXIF orientation turns"
    ):
        open_source(tmp_path)
    # An orientation in the mask's own file counts, as in any image.
    save(tmp_path / "masks" / "1.png", upright.T, exif=exif)
    mask = mask_at(open_source(tmp_path), 0)
    save(tmp_path / "colour.png", np.repeat(upright.T[:, :, None], 3, axis=2), exif=exif)
    assert (mask == open_image((tmp_path / "colour.png").read_bytes()).pixels(3)[:, :, 0]).all()


# ── matching a model ──


def test_masks_are_matched_to_a_model_by_name(tmp_path: Path) -> None:
    write_shapes(tmp_path, 10, 16)
    source = open_source(tmp_path)
    assert match_masks(source, SHAPES, 3) is source
    model = ("square", "sky", "background", "disc")
    matched = match_masks(source, model, 4)
    assert (of(matched).names, has_masks(matched)) == (model, True)
    for i in range(10):
        own, theirs = mask_at(source, i), mask_at(matched, i)
        assert all(model[b] == SHAPES[a] for a, b in zip(own.ravel().tolist(), theirs.ravel().tolist(), strict=True))
    assert (of(matched).values == of(source).values[:, [2, 0, 0, 1]] * [1, 0, 1, 1]).all()
    part = open_data(tmp_path).train
    assert (mask_at(match_masks(part, model, 4), 2) == mask_at(matched, [source.name(i) for i in range(10)].index(
        part.name(2)
    ))).all()  # fmt: skip
    by_number = match_masks(source, ("a", "b", "c"), 3, by_number=True)
    assert of(by_number).names == ("a", "b", "c")
    assert (mask_at(by_number, 4) == mask_at(source, 4)).all()
    assert match_masks(source, None, 3) is source
    pickled = pickle.loads(pickle.dumps(matched))
    assert (mask_at(pickled, 1) == mask_at(matched, 1)).all()


def test_masks_that_a_model_does_not_fit(tmp_path: Path) -> None:
    source = open_source(write_shapes(tmp_path, 10, 16))
    with pytest.raises(
        DataError, match=r"the masks have the class 'disc', which the model lacks; its classes are 'backg"
    ):
        match_masks(source, ("background", "square"), 2)
    with pytest.raises(
        DataError, match=r"the masks have 3 classes and the model 2, so they cannot be matched by index"
    ):
        match_masks(source, None, 2)
    with pytest.raises(DataError, match=r"the model has 300 classes, but masks have at most 255; use a model with few"):
        match_masks(source, (*SHAPES, *map(str, range(297))), 300)
    with pytest.raises(DataError, match=r"the model predicts masks, but the data has none; put images into a folder"):
        match_masks(digits(), SHAPES, 3)


def test_a_class_without_pixels_need_not_be_in_the_model(tmp_path: Path) -> None:
    pair(tmp_path, "1", halves(0, 1))
    (tmp_path / "classes.txt").write_text("ground\nsky\nlava")
    matched = match_masks(open_source(tmp_path), ("sky", "ground"), 2)
    assert (mask_at(matched, 0) == halves(1, 0)).all()


# ── the counts on disk ──


def test_masks_are_counted_again_only_if_they_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_files, "YOUNG_NS", 0)
    read: list[str] = []

    def noted(path: bytes) -> NDArray[Any]:
        read.append(os.fsdecode(path)[-8:])
        return mask_values(path)

    monkeypatch.setattr("vitrail.data.sources.mask_scan.mask_values", noted)
    write_shapes(tmp_path, 12, 16)
    first = open_source(tmp_path)
    assert len(read) == 12
    read.clear()
    again = open_source(tmp_path)
    assert read == []
    assert (of(again).values == of(first).values).all()
    assert of(open_source(tmp_path, labelling=Labelling(ignore=(1,)))).names == ("background", "square")
    assert read == []
    save(tmp_path / "masks" / "0003.png", np.full((16, 16), 2, np.uint8))
    (tmp_path / "images" / "0005.png").unlink()
    (tmp_path / "masks" / "0005.png").unlink()
    changed = open_source(tmp_path)
    assert read == ["0003.png"]
    assert (len(changed), of(changed).values[3].tolist()) == (11, [0, 0, 256])
    kept = [0, 1, 2, 4, *range(6, 12)]
    assert (of(changed).values[[0, 1, 2, *range(4, 11)]] == of(first).values[kept]).all()


def test_progress_is_reported(tmp_path: Path) -> None:
    seen: list[int] = []
    open_data(write_shapes(tmp_path, 70, 8), on_progress=seen.append)
    assert seen[-2:] == [64, 70]


@pytest.mark.parametrize("names", [("images", "labels"), ("JPEGImages", "SegmentationClass")])
def test_folders_that_others_call_masks_are_not_two_classes(names: tuple[str, str], tmp_path: Path) -> None:
    write_shapes(tmp_path / "data", 12, 16)
    for old, new in zip(("images", "masks"), names, strict=True):
        (tmp_path / "data" / old).rename(tmp_path / "data" / new)
    (tmp_path / "data" / "classes.txt").unlink()
    with pytest.raises(DataError, match=f"if {names[1]} holds masks, rename .*{names[1]} to masks; if they are two"):
        open_data(tmp_path / "data")
    assert open_data(tmp_path / "data", labelling=Labelling("classes")).train.classes == tuple(sorted(names))


def test_one_value_to_ignore_needs_no_list() -> None:
    assert read_recipe("scratch-small", ["data.ignore=7"]).data.ignore == (7,)
    assert read_recipe("scratch-small", ["data.ignore=[7, 9]"]).data.ignore == (7, 9)
