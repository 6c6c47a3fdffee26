"""`vitrail predict --masks` and `--window`: the masks of a segmentation model as files."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.support.commands import RunCommand, run_command
from tests.support.prediction_jobs import tiny_bundle
from tests.support.segmentation_models import COLOURS, SIDE, colour_bundle, colour_image

import vitrail
from vitrail.data.inputs import Item
from vitrail.data.mask_images import overlay, palette
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError, InputError, StorageError
from vitrail.inference.bulk_prediction import Summary, predict_files
from vitrail.inference.classifier import Predictor
from vitrail.inference.jobs import Output
from vitrail.inference.mask_files import full_pixels
from vitrail.inference.mirrored_names import MirroredNames
from vitrail.inference.windows import windows_for
from vitrail.tasks.segmentation import MaskPrediction, candidates, largest_class, upsampled

BUNDLE = colour_bundle()
SIZES = {"a/wide.png": (40, 96), "a/b/tall.png": (72, 32), "square.png": (32, 32)}


def write_images(folder: Path) -> dict[str, np.ndarray]:
    masks = {}
    for number, (name, size) in enumerate(SIZES.items()):
        pixels, masks[name] = colour_image(*size, seed=number)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name)
    return masks


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    BUNDLE.save("bundle")
    tiny_bundle().save("classifier")
    return lambda *words: run_command(monkeypatch, capsys, "predict", *words, "--device", "cpu")


def predict(places: Any, **options: Any) -> Summary:
    known: dict[str, Any] = {"device": "cpu", "workers": 0, "batch": 2, **options}
    places = [os.fspath(place) for place in ([places] if isinstance(places, str | Path) else places)]
    return predict_files(known.pop("bundle", BUNDLE), places, **known)


def files_in(folder: str | Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


def mask_in(path: str | Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def read_jsonl(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# ── files ──


def test_masks_mirror_the_images(run: RunCommand) -> None:
    masks = write_images(Path("images"))
    done = run("bundle", "images", "-o", "rows.jsonl", "--masks", "out/new")
    assert done.code == 0, done.err
    assert done.err.endswith("; written to rows.jsonl; masks in out/new\n")
    stems = [name.removesuffix(".png") for name in SIZES]
    assert files_in("out/new") == {f"masks/{stem}.png" for stem in stems} | {f"overlays/{stem}.jpg" for stem in stems}
    for row in read_jsonl("rows.jsonl"):
        name = row["path"].removeprefix("images/")
        expected = masks[name]
        assert row["mask"] == f"out/new/masks/{name}"
        mask = mask_in(row["mask"])
        assert mask.shape == expected.shape
        # Only next to the border of two stripes can bilinear upsampling differ.
        differs = np.flatnonzero((mask != expected).any(axis=0))
        borders = np.flatnonzero(np.diff(expected[0].astype(int)))
        assert all(np.abs(borders - column).min() <= expected.shape[1] / 8 for column in differs)
        prediction = Predictor(BUNDLE, device="cpu").predict(row["path"])
        assert np.array_equal(mask, prediction.mask(*expected.shape))
        assert row["classes"] == list(prediction.classes)
        assert sum(row["fractions"]) == pytest.approx(1, abs=1e-5)
        colours = np.asarray(Image.open(row["mask"]).convert("RGB"))
        assert np.array_equal(colours, palette(3)[mask])
        pixels = np.asarray(Image.open(row["path"]))
        shown = np.asarray(Image.open(row["mask"].replace("masks", "overlays").replace(".png", ".jpg")))
        assert np.abs(shown.astype(int) - overlay(pixels, mask, 3)).mean() < 12  # JPEG blurs the borders


@pytest.mark.parametrize("suffix", ["csv", "parquet", "txt"])
def test_rows_of_every_format(suffix: str, run: RunCommand) -> None:
    write_images(Path("images"))
    assert run("bundle", "images", "-o", f"rows.{suffix}", "--masks", "out", "--top", 2).code == 0
    text = Path(f"rows.{suffix}").read_bytes()
    if suffix == "csv":
        header, *rows = text.decode().splitlines()
        assert header == "number,path,error,class_1,fraction_1,class_2,fraction_2,mask"
        assert [row.rsplit(",", 1)[1] for row in rows] == [f"out/masks/{name}" for name in sorted(SIZES, reverse=True)]
    elif suffix == "parquet":
        rows = pyarrow.parquet.read_table("rows.parquet").to_pylist()
        assert {row["mask"] for row in rows} == {f"out/masks/{name}" for name in SIZES}
        assert all(len(row["classes"]) == len(row["fractions"]) == 2 for row in rows)
    else:
        assert text.startswith(b"image")
        assert b"largest class" in text.splitlines()[0]


def test_the_mask_of_a_turned_image_fits_as_it_is_displayed() -> None:
    pixels, _ = colour_image(48, 80)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side
    Image.fromarray(pixels).save("turned.png", exif=exif)
    Image.fromarray(pixels).transpose(Image.Transpose.ROTATE_270).save("upright.png")
    predict(["turned.png", "upright.png"], output=Path("rows.jsonl"), masks="out")
    assert np.array_equal(mask_in("out/masks/turned.png"), mask_in("out/masks/upright.png"))
    assert mask_in("out/masks/turned.png").shape == (80, 48)
    assert np.asarray(Image.open("out/overlays/turned.jpg")).shape == (80, 48, 3)


def test_shards_manifests_patterns_and_files() -> None:
    write_images(Path("images"))
    with tarfile.open("shard.tar", "w") as tar:
        for name in SIZES:
            tar.add(f"images/{name}", name)
    Path("images/list.csv").write_text("path\n" + "\n".join(SIZES) + "\n")
    wanted = {f"masks/{name}" for name in SIZES}
    for number, place in enumerate(["images", "shard.tar", "images/list.csv", "images/**/*.png", "./images/../images"]):
        predict(place, masks=f"out{number}", output=Path(f"rows{number}.jsonl"))
        assert {name for name in files_in(f"out{number}") if name.startswith("masks")} == wanted, place
    predict("images/a/wide.png", masks="one", output=Path("one.jsonl"))
    assert files_in("one") == {"masks/wide.png", "overlays/wide.jpg"}
    predict(["images/a", "images/square.png", "shard.tar"], masks="many", output=Path("many.jsonl"))
    names = {"images/a/wide", "images/a/b/tall", "images/square", *(f"shard.tar/{name[:-4]}" for name in SIZES)}
    assert {name for name in files_in("many") if name.startswith("masks")} == {f"masks/{name}.png" for name in names}


def test_equal_names_and_unreadable_images() -> None:
    folder = Path("images")
    folder.mkdir()
    pixels = [Image.fromarray(colour_image(32, 40, seed=number)[0]) for number in range(2)]
    pixels[0].save(folder / "x.png")
    pixels[1].save(folder / "x.bmp")
    (folder / "bad.png").write_text("no image")
    odd = folder / os.fsdecode(b'caf\xe9 "new\nline".png')
    shutil.copy(folder / "x.png", odd)
    for suffix in ("jsonl", "parquet"):
        done = predict(["images", "images/x.png"], output=Path(f"rows.{suffix}"), masks=f"out-{suffix}")
        assert (done.images, done.bad) == (5, 1)
    rows = read_jsonl("rows.jsonl")
    files = {Path(row["path"]).name: row["mask"] for row in rows[:4]}
    assert files["bad.png"] is None
    assert files["x.bmp"] == "out-jsonl/masks/x.png"
    assert files["x.png"] == "out-jsonl/masks/x.png.png"
    assert files[odd.name] == 'out-jsonl/masks/caf\\xe9 "new\nline".png'
    assert rows[4]["mask"] == "out-jsonl/masks/x.png-2.png"
    named = [row["mask"] for row in rows if row["mask"]]
    assert len(set(named)) == 4
    assert all(Path(name).is_file() for name in named)
    from_parquet = pyarrow.parquet.read_table("rows.parquet").to_pylist()
    assert [row["mask"] for row in from_parquet] == [
        row["mask"] and row["mask"].replace("jsonl", "parquet") for row in rows
    ]


paths = st.lists(
    st.lists(st.sampled_from(["a", "A", "b.png", "b.jpg", "..", "é", "b.jpg-2"]), min_size=1, max_size=3).map("/".join),
    max_size=30,
)


@given(paths)
@settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_names_are_unique_inside_the_folder_and_follow_from_the_order(images: list[str]) -> None:
    first, second = (MirroredNames(["/nowhere/*"]) for _ in range(2))
    names = [first.of(f"/nowhere/{image}".encode()) for image in images]
    assert [second.of(f"/nowhere/{image}".encode()) for image in images] == names
    assert len({name.casefold() for name in names}) == len(names)
    for name in names:
        assert os.path.normpath(name) == name
        assert not name.startswith(("/", ".."))


# ── in Python ──


def test_names_are_short_enough_for_files() -> None:
    long, odd = b"a" * 251, b"\xff" * 100
    names = MirroredNames(["images"])
    given = [b"images/x/" + name for name in (long + b".jpg", long + b".png", long + b"bmp", odd + b".jpg")]
    made = [names.of(name) for name in given]
    assert made[0] == f"x/{'a' * 251}"
    assert len(set(made)) == 4
    assert all(name.startswith("x/") and len(f"{name[2:]}.png".encode()) <= 255 for name in made)
    assert [MirroredNames(["images"]).of(given[3])] == made[3:]


def test_predictions_in_memory_have_masks() -> None:
    masks = write_images(Path("images"))
    rows = vitrail.predict(BUNDLE, "images", masks="out", device="cpu")
    assert len(rows) == len(SIZES)
    for row in rows:
        assert isinstance(row, MaskPrediction)
        assert row.image is not None
        assert row.file == row.image.replace("images", "out/masks")
        expected = masks[row.image.removeprefix("images/")]
        assert np.array_equal(row.mask(*expected.shape), mask_in(row.file))
    pixels, _ = colour_image(40, 60)
    (one,) = vitrail.predict(BUNDLE, pixels, device="cpu")
    assert isinstance(one, MaskPrediction)
    assert one.file is None
    assert one.mask(*pixels.shape[:2]).shape == (40, 60)
    with pytest.raises(ConfigError, match=r"images in memory have no names; .* use \.mask\(\)"):
        vitrail.predict(BUNDLE, pixels, masks="out", device="cpu")


@pytest.mark.parametrize("spread", [0.1, 1, 30])
def test_classes_that_are_largest_nowhere_are_left_out(spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 5, 6, generator=generator)
    logits[::7] += spread
    logits[14] = logits[7]  # ties: the first class counts
    assert (len(candidates(logits)) < 40) == (spread == 30)
    for size in ((33, 41), (3, 2), (5, 6)):
        assert torch.equal(largest_class(logits, size).long(), upsampled(logits[None], size)[0].argmax(dim=0))


# ── resuming ──


class Stop(Exception):  # noqa: N818
    """Stands for Ctrl-C in the middle of a job."""


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_interrupted_job_has_no_row_without_its_mask(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("images")
    folder.mkdir()
    for number in range(9):
        Image.fromarray(colour_image(24, 40, seed=number)[0]).save(folder / f"{number}.png")
    (folder / "5.png").write_text("no image")
    target = Path(f"rows.{suffix}")
    predict("images", output=Path(f"whole.{suffix}"), masks="whole")
    write, written = Output.write, 0

    def stop_later(self: Output, rows: Any) -> None:
        nonlocal written
        assert all(row.prediction.error or Path(row.prediction.file).is_file() for row in rows)
        write(self, rows)
        written += 1
        if written == 2:
            raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(Output, "write", stop_later)
        with pytest.raises(Stop):
            predict("images", output=target, masks="out")
    assert 4 <= len(files_in("out/masks")) < 8
    (Path("out") / ".123-4.part").write_text("left by a process that was killed")
    with pytest.raises(DataError, match="another folder of masks"):
        predict("images", output=target, masks="other", resume=True)
    done = predict("images", output=target, masks="out", resume=True)
    assert (done.images, done.earlier, done.bad) == (9, 4, 1)
    assert files_in("out") == files_in("whole")
    for name in files_in("whole"):
        assert Path("out", name).read_bytes() == Path("whole", name).read_bytes()
    again = predict("images", output=target, masks="out", resume=True)
    assert again.earlier == again.images == 9
    Path("out/masks/7.png").unlink()
    with pytest.raises(DataError, match=r"out lacks 1 mask of the 9 rows written so far; restart with --overwrite"):
        predict("images", output=target, masks="out", resume=True)
    predict("images", output=target, masks="out", overwrite=True)
    assert files_in("out") == files_in("whole")


@pytest.mark.slow
def test_a_killed_command_resumes() -> None:
    BUNDLE.save("bundle")
    folder = Path("images")
    folder.mkdir()
    for number in range(300):
        Image.fromarray(colour_image(64, 96, seed=number)[0]).save(folder / f"{number:03d}.png")
    options = ["--batch", "8", "--device", "cpu", "--precision", "float32", "-o", "rows.jsonl", "--masks", "out"]
    command = [sys.executable, "-m", "vitrail", "predict", "bundle", "images", *options, "--resume"]
    rows = Path("rows.jsonl")
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    while process.poll() is None and not (rows.exists() and rows.stat().st_size > 2000):
        pass
    process.kill()
    process.communicate()
    complete = [json.loads(line) for line in rows.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert 0 < len(complete) < 300
    assert all(mask_in(row["mask"]).shape == (64, 96) for row in complete)
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    assert len(read_jsonl("rows.jsonl")) == len(files_in("out/masks")) == len(files_in("out/overlays")) == 300


# ── refusals ──


def test_refusals(run: RunCommand) -> None:
    write_images(Path("images"))
    Path("taken/masks").mkdir(parents=True)
    Path("taken/masks/x.png").write_text("x")
    Path("file").write_text("x")
    cases = [
        (("classifier", "images", "--masks", "out"), "--masks is for segmentation, but the task of this model is "),
        (("classifier", "images", "--window", 1), "--window is for segmentation, but the task of this model is "),
        (("bundle", "images", "--masks", "taken"), "taken/masks already has files; choose another folder, or replace "),
        (("bundle", "images", "--masks", "file"), "file is a file; give a folder for the masks"),
        (("bundle", "images", "--masks", "images/new"), "images/new would put masks among the images of images; give "),
        (("bundle", ".", "--masks", "out"), "out would put masks among the images of .; give a folder outside of it"),
        (("bundle", "images", "--window", 0), "the window is 0.0; it should be the scale of the image, a number "),
        (("bundle", "images", "--window", 1, "--decode", "gpu"), "windows are cut from images that a CPU decodes"),
        (("bundle", "images", "--masks", "out", "--ray", "local", "-o", "rows"), "Ray workers do not write masks"),
        (("bundle", "images", "--masks", "out", "--resume"), "--resume and --overwrite need a file"),
    ]
    for words, message in cases:
        done = run(*words)
        assert (done.code, done.out) == (2, ""), words
        assert message in done.err, (words, done.err)
        assert not Path("out/masks").exists()
    assert run("bundle", "images", "--masks", "taken", "--overwrite").code == 0
    assert Path("taken/masks/a/wide.png").is_file()


def test_the_masks_of_a_dataset_are_not_replaced(run: RunCommand) -> None:
    write_images(Path("data/images"))
    Path("data/masks").mkdir()
    Path("data/masks/x.png").write_text("a label")
    done = run("bundle", "data/images", "--masks", "data", "--overwrite")
    assert (done.code, done.out) == (2, "")
    assert "data/masks has the masks of a dataset, which predict did not write; choose another folder" in done.err
    assert Path("data/masks/x.png").read_text() == "a label"
    Path("data/masks/x.png").unlink()
    # Predicted masks make images a dataset, and may be replaced.
    assert run("bundle", "data/images", "--masks", "data").code == 0
    assert run("bundle", "data/images", "--masks", "data", "--overwrite").code == 0


def test_models_whose_masks_would_not_fit() -> None:
    write_images(Path("images"))
    with pytest.raises(InputError, match=r"at most 255 classes, but the model has 300; leave out the masks"):
        predict("images", bundle=colour_bundle(None, classes=300), masks="out")
    many = vitrail.predict(colour_bundle(None, classes=300), "images", device="cpu")[0]
    assert isinstance(many, MaskPrediction)
    with pytest.raises(InputError, match="at most 255 classes"):
        many.mask(10, 10)
    crops = colour_bundle(preprocess=Preprocess(size=SIDE, resize="cover"))
    with pytest.raises(ConfigError, match="crops or pads images, so a mask would not fit"):
        predict("images", bundle=crops, masks="out")
    predict("images", bundle=crops, masks="out", window=1.0, output=Path("rows.jsonl"))


def test_a_failing_storage_is_no_change_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: str, *__: int | None) -> bytes:
        raise StorageError("the server does not respond")

    Path("gone.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"gone.png has changed while it was predicted: it is not an image"):
        full_pixels(Item(b"gone.png", b"gone.png"), 3)
    monkeypatch.setattr("vitrail.data.inputs.read_remote", failing)
    with pytest.raises(StorageError, match=r"^the server does not respond$"):
        full_pixels(Item(b"s3://bucket/a.png", b"s3://bucket/a.png"), 3)


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(Path("images"))
    Path("out").mkdir()
    Path("out/masks").write_text("in the way")
    with pytest.raises(DataError, match="out/masks cannot be read: Not a directory"):
        predict("images", masks="out", output=Path("rows.jsonl"))
    with pytest.raises(DataError, match="masks cannot be written to out: "):
        predict("images", masks="out", output=Path("rows.jsonl"), overwrite=True)


# ── windows ──


@given(
    st.integers(1, 300), st.integers(1, 300), st.sampled_from([0.3, 0.5, 1.0, 1.7]), st.sampled_from([(8, 8), (4, 16)])
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_windows_cover_the_canvas(height: int, width: int, scale: float, patch: tuple[int, int]) -> None:
    windows = windows_for(BUNDLE, scale)
    windows = type(windows)(scale, windows.preprocess, patch)
    tall, wide = windows.canvas_size(height, width)
    covered = np.zeros((tall, wide), int)
    for top, left in windows.corners(tall, wide):
        assert top % patch[0] == left % patch[1] == 0
        covered[top : top + SIDE, left : left + SIDE] += 1
        assert covered[top : top + SIDE, left : left + SIDE].shape == (SIDE, SIDE)
    assert covered.min() >= 1
    assert tall % patch[0] == wide % patch[1] == 0
    if min(height, width) * scale >= SIDE:
        assert abs(tall - height * scale) <= patch[0] / 2
        assert abs(wide - width * scale) <= patch[1] / 2


@pytest.mark.slow
def test_windows_see_details_that_the_resized_image_loses() -> None:
    pixels, mask = colour_image(96, 640, seed=3)
    mask[40:48, 320:328] = (mask[40, 320] + 1) % 3  # smaller than a patch of the resized image, which has 80 columns
    pixels = np.eye(3, dtype=np.uint8)[mask] * 220
    Image.fromarray(pixels).save("wide.png")
    predict("wide.png", masks="squashed", output=Path("a.jsonl"))
    predict("wide.png", masks="windows", output=Path("b.jsonl"), window=1.0)
    assert not np.array_equal(mask_in("squashed/masks/wide.png")[40:48, 320:328], mask[40:48, 320:328])
    differs = mask_in("windows/masks/wide.png") != mask
    assert differs.mean() < 0.01
    assert not differs[42:46, 322:326].any()


@pytest.mark.parametrize("workers", [0, 1])
def test_windows_in_memory_and_in_files_agree(workers: int) -> None:
    write_images(Path("images"))
    Path("images/bad.png").write_text("no image")
    predict("images", output=Path("rows.jsonl"), masks="out", window=0.7, workers=workers)
    rows = read_jsonl("rows.jsonl")
    assert [row["error"] is None for row in rows] == [False, True, True, True]
    for row in rows[1:]:
        image = Image.open(row["path"])
        (one,) = vitrail.predict(BUNDLE, [image], device="cpu", window=0.7)
        assert isinstance(one, MaskPrediction)
        assert list(one.classes) == row["classes"]
        assert np.array_equal(one.mask(image.height, image.width), mask_in(row["mask"]))


def test_the_logits_of_overlapping_windows_are_averaged() -> None:
    predictor: Predictor[MaskPrediction] = Predictor(colour_bundle(), device="cpu", window=1.0)
    assert predictor.windows is not None
    seen: list[torch.Tensor] = []

    def engine(pixels: torch.Tensor) -> torch.Tensor:
        seen.append(pixels)
        first = sum(map(len, seen)) - len(pixels)
        return torch.arange(first, first + len(pixels)).float()[:, None, None, None].expand(-1, 2, 8, 8)

    outputs = predictor.windows.outputs(engine, torch.zeros(3, 32, 64, dtype=torch.uint8), 2)
    # Windows 0, 1 and 2 start at patches 0, 4 and 8.
    assert outputs.shape == (1, 2, 8, 16)
    assert outputs[0, 0, 0].tolist() == [0] * 4 + [0.5] * 4 + [1.5] * 4 + [2] * 4
    assert [len(pixels) for pixels in seen] == [2, 1]


def test_a_window_scale_that_makes_an_image_too_large() -> None:
    pixels, _ = colour_image(64, 64)
    with pytest.raises(DataError, match=r"64×64 pixels becomes .* with windows of scale 1000, more than"):
        vitrail.predict(BUNDLE, [pixels], device="cpu", window=1000)


def test_names_of_the_classes_come_from_the_bundle(run: RunCommand) -> None:
    write_images(Path("images"))
    done = run("bundle", "images", "--format", "table", "--top", 1)
    assert done.code == 0
    assert {line.split()[1] for line in done.out.splitlines()[1:]} <= set(COLOURS)
