"""`vitrail eval`, end to end."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.commands import CommandOutput, RunCommand, run_command
from tests.support.metrics import classified

import vitrail
from vitrail.checkpoints.bundle import Bundle
from vitrail.cli.eval import _compact_json
from vitrail.data.checking.check import quick_check
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.contents import Contents, carry_contents, recorded_contents
from vitrail.data.sources.index_files import VERSION
from vitrail.data.sources.opening import open_data
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

PRE = Preprocess(size=(8, 8), channels=1, mean=(0.5,), std=(0.5,))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run the command in this process, because imports would take most of the time."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))

    def command(*words: object) -> CommandOutput:
        return run_command(monkeypatch, capsys, "eval", *words, "--workers", "0")

    return command


def saved(folder: Path, classes: tuple[str, ...] | int) -> Path:
    count = classes if isinstance(classes, int) else len(classes)
    model = ViT(ViTConfig(image_size=8, patch_size=4, channels=1, width=16, depth=1, heads=2, classes=count))
    torch.nn.init.normal_(model.head.weight)
    return Bundle(model, PRE, None if isinstance(classes, int) else classes).save(folder)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return saved(tmp_path / "run" / "best", ("cat", "dog"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for label in ("cat", "dog"):
        folder = tmp_path / "data" / label
        folder.mkdir(parents=True)
        for number in range(10):
            noise = np.random.default_rng([number, ord(label[0])]).integers(0, 256, (8, 8), np.uint8)
            Image.fromarray(noise).save(folder / f"{number}.png")
    return tmp_path / "data"


def test_a_plain_folder(run: RunCommand, bundle: Path, data: Path) -> None:
    done = run(bundle, data)
    assert done.code == 0
    lines = done.out.splitlines()
    assert "% on 20 images, 95% interval " in lines[0]
    assert "; always 'cat' gives 50.0%, chance 50.0%; " in lines[0]
    assert lines[0].endswith("; evaluated on all images; it is unknown whether the model was trained on them.")
    assert done.after_plan.startswith("WARNING: no better than guessing: "), "noise cannot be classified"
    assert "; weakest class " in lines[0]
    for words in (
        "accuracy",
        "macro-F1",
        "calibration error",
        "The mean confidence is",
        "Confusions",
        "Classes, the weakest",
    ):
        assert words in done.out
    assert "top-5" not in done.out
    assert str(data) in done.out.split("The most confident mistakes")[1]


def test_json_output(run: RunCommand, bundle: Path, data: Path) -> None:
    (data / "cat" / "text.png").write_text("no image")
    done = run(bundle, data, "--json", "--batch", 3)
    assert done.code == 0
    result = json.loads(done.out)
    assert (result["split"], result["images"], result["top5"]) == ("all", 20, None)
    assert np.array(result["confusion"]).sum() == 20
    assert result["bad"][0]["name"].endswith("text.png")
    assert "; 1 more could not be read; evaluated on all images; it is unknown whether" in result["summary"]
    assert result["warnings"] == [line.removeprefix("WARNING: ") for line in done.after_plan.splitlines()]
    assert result["warnings"]
    text = run(bundle, data).out
    assert text.startswith(result["summary"] + ".\n")
    assert "Images that could not be read" in text


def test_the_splits_of_the_run_are_used(run: RunCommand, bundle: Path, data: Path) -> None:
    splits = open_data(data, seed=3, val=0.2, test=0.3)
    (bundle.parent / "split.json").write_text(json.dumps(splits.record))
    by = "; compared with the images of its run by name only."
    expected = {
        "test": ("% on 6 held-out images, ", f"; evaluated on the test split{by}"),
        "val": ("% on 4 held-out images, ", f"; evaluated on the validation split; selected on these images{by}"),
        "train": ("% on 10 training images, ", f"; evaluated on the training split{by}"),
        "all": (
            "% on 20 images, ",
            f"; evaluated on all images; selected on 4 of these images; trained on 10 of these images{by}",
        ),
    }
    for split, (images, end) in expected.items():
        line = run(bundle, data, "--split", split).out.splitlines()[0]
        assert images in line
        assert line.endswith(end)
    assert run(bundle, data).out == run(bundle, data, "--split", "test").out
    actual = json.loads(run(bundle, data, "--split", "val", "--json").out)
    assert (actual["split"], actual["selected_on"], actual["trained_on"]) == ("val", 4, 0)
    (bundle.parent / "split.json").write_text("[1]")
    assert "% on 20 images, " in run(bundle, data).out


def test_without_a_test_split_the_summary_names_the_validation_split(run: RunCommand, bundle: Path, data: Path) -> None:
    splits = open_data(data, seed=3, val=0.2, test=0.0)
    (bundle.parent / "split.json").write_text(json.dumps(splits.record))
    by = "; compared with the images of its run by name only"
    caveat = f"; evaluated on the validation split; selected on these images{by}."
    assert run(bundle, data).out.splitlines()[0].endswith(caveat)
    # Renamed images are unknown to the run.
    for path in (data / "cat").iterdir():
        path.rename(path.with_name(f"other-{path.name}"))
    for path in (data / "dog").iterdir():
        path.rename(path.with_name(f"other-{path.name}"))
    caveat = f"; evaluated on all images{by}; it is unknown whether the model was trained on them."
    assert run(bundle, data).out.splitlines()[0].endswith(caveat)


def recorded(bundle: Path, data: Path, fraction: float = 1.0) -> Contents:
    """Write the files that training leaves in the run folder."""
    splits = open_data(data, seed=3, val=0.2, test=0.3, fraction=fraction)
    (bundle.parent / "split.json").write_text(json.dumps(splits.record))
    contents = quick_check(splits).contents
    assert contents is not None
    contents.save(bundle.parent)
    return contents


def test_renamed_moved_and_copied_images_are_recognised_by_content(run: RunCommand, bundle: Path, data: Path) -> None:
    recorded(bundle, data)
    line = run(bundle, data).out.splitlines()[0]
    assert line.endswith("; evaluated on the test split; by content, its run trained on none of these images.")
    line = run(bundle, data, "--split", "train").out.splitlines()[0]
    assert line.endswith("; evaluated on the training split; trained on these images.")
    for path in [*data.glob("*/*.png")]:
        path.rename(path.with_name(f"other-{path.name}"))
    moved = data.rename(data.with_name("elsewhere"))
    line = run(bundle, moved).out.splitlines()[0]
    assert line.endswith("; evaluated on all images; selected on 4 of these images; trained on 10 of these images.")
    copy = next((moved / "cat").iterdir())
    (moved / "cat" / "copy.png").write_bytes(copy.read_bytes())
    result = json.loads(run(bundle, moved, "--json").out)
    assert (result["selected_on"] + result["trained_on"] - 14 in (0, 1), result["compared_by"]) == (True, "content")
    for path in [*moved.glob("*/*.png")]:
        Image.open(path).save(path, compress_level=0)  # another file, which cannot be recognised
    line = run(bundle, moved).out.splitlines()[0]
    assert line.endswith("; evaluated on all images; by content, its run trained on none of these images.")


def test_images_that_a_fraction_left_out_were_not_trained_on(run: RunCommand, bundle: Path, data: Path) -> None:
    recorded(bundle, data, fraction=0.4)
    line = run(bundle, data, "--split", "train").out.splitlines()[0]
    assert "% on 4 training images, " in line
    assert line.endswith("; evaluated on the training split; trained on these images.")
    ending = "; evaluated on all images; selected on 4 of these images; trained on 4 of these images"
    assert run(bundle, data, "--split", "all").out.splitlines()[0].endswith(f"{ending}.")
    (bundle.parent / "contents.index").unlink()
    by_name = run(bundle, data, "--split", "all").out.splitlines()[0]
    assert by_name.endswith(f"{ending}; compared with the images of its run by name only.")
    # Only those that were left out, under other names.
    contents, names = recorded(bundle, data, fraction=0.4), json.loads((bundle.parent / "split.json").read_text())
    used = {name for split in ("train", "val", "test") for name in names["names"][split]}
    for path in [*data.glob("*/*.png")]:
        place = data.with_name("left-out") / path.parent.name / f"other-{path.name}"
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.relative_to(data).as_posix() not in used:
            path.rename(place)
    assert len(contents.train) == 4
    line = run(bundle, data.with_name("left-out")).out.splitlines()[0]
    assert "% on 6 images, " in line
    assert line.endswith("; evaluated on all images; by content, its run trained on none of these images.")


def test_another_image_under_the_same_name_was_not_trained_on(run: RunCommand, bundle: Path, data: Path) -> None:
    recorded(bundle, data)
    for number, path in enumerate(sorted(data.glob("*/*.png"))):
        Image.fromarray(np.random.default_rng([7, number]).integers(0, 256, (8, 8), np.uint8)).save(path)
    result = json.loads(run(bundle, data, "--split", "all", "--json").out)
    assert (result["selected_on"], result["trained_on"]) == (0, 0)


def test_digests_that_are_compressed_are_not_read(bundle: Path) -> None:
    """A bundle may come from anywhere, and a few kilobytes of zeros would become gigabytes."""
    digests = np.zeros(100_000, np.uint64)
    np.savez_compressed(bundle / "packed.npz", version=VERSION, train=digests, val=digests, images=np.array([9, 9]))
    (bundle / "packed.npz").rename(bundle / "contents.index")
    assert recorded_contents(bundle) is None


def test_a_bundle_copied_out_of_its_run_recognises_its_images(run: RunCommand, bundle: Path, data: Path) -> None:
    recorded(bundle, data)
    carry_contents(bundle.parent, bundle)
    alone = Path(shutil.copytree(bundle, bundle.parent.parent / "copied" / "model"))
    for place in (alone, alone / "model.safetensors"):
        seen = recorded_contents(place)
        assert seen is not None
        assert (len(seen.train), len(seen.val), seen.complete) == (10, 4, True)
    line = run(alone, data).out.splitlines()[0]
    assert line.endswith("; evaluated on all images; selected on 4 of these images; trained on 10 of these images.")
    (alone / "contents.index").write_bytes((alone / "contents.index").read_bytes()[:100])  # corrupt
    line = run(alone, data).out.splitlines()[0]
    assert line.endswith("; evaluated on all images; it is unknown whether the model was trained on them.")


def test_partial_digests_are_reported(run: RunCommand, bundle: Path, data: Path) -> None:
    contents = recorded(bundle, data)
    contents._replace(train=contents.train[:3]).save(bundle.parent)
    line = run(bundle, data, "--split", "all").out.splitlines()[0]
    by = "; compared with the images of its run by name and the content of 7 of 14 only."
    assert line.endswith(f"; selected on 4 of these images; trained on 10 of these images{by}")
    (bundle.parent / "split.json").unlink()
    line = run(bundle, data).out.splitlines()[0]
    by = "; compared with the images of its run by the content of 7 of 14 only."
    assert line.endswith(f"; selected on 4 of these images; trained on 3 of these images{by}")


def test_a_new_image_is_not_reported_as_trained_on(run: RunCommand, bundle: Path, data: Path) -> None:
    (bundle.parent / "split.json").write_text(json.dumps(open_data(data, seed=3, val=0.2, test=0.3).record))
    old = next((data / "cat").iterdir())
    (data / "cat" / f"new{old.suffix}").write_bytes(old.read_bytes())
    result = json.loads(run(bundle, data, "--split", "all", "--json").out)
    assert (result["selected_on"], result["trained_on"]) == (4, 10)


def test_without_its_split_file_evaluation_fails(run: RunCommand, bundle: Path, data: Path) -> None:
    split = json.dumps(open_data(data, seed=3, val=0.2, test=0.3).record)
    (bundle.parent / "split.json").write_text(split[: len(split) // 2])
    done = run(bundle, data)
    assert (done.code, done.out) == (2, "")
    assert re.search(
        r"split\.json is not JSON .*, so the training images of the model are unknown; restore the file", done.err
    )


def test_digits_and_many_classes(run: RunCommand, tmp_path: Path) -> None:
    names = (*(str(digit) for digit in range(10)), *(f"other {number}" for number in range(15)))
    done = run(saved(tmp_path / "b", names), "digits", "--split", "test", "--precision", "bf16", "--device", "cpu")
    assert done.code == 0
    assert "% on 359 images, " in done.out
    assert "top-5" in done.out
    assert "The model has 15 more classes without images here." in done.out


def test_the_weakest_twenty_classes_by_default(run: RunCommand, tmp_path: Path) -> None:
    names = tuple(f"class {number:02d}" for number in range(22))
    for name in names:
        (tmp_path / "many" / name).mkdir(parents=True)
        Image.new("L", (8, 8), 30).save(tmp_path / "many" / name / "1.png")
    model = saved(tmp_path / "b", names)
    done = run(model, tmp_path / "many")
    assert "… and 2 more; --all lists them" in done.out
    assert "more; --all" not in run(model, tmp_path / "many", "--all").out


def test_unknown_classes(run: RunCommand, tmp_path: Path, data: Path) -> None:
    done = run(saved(tmp_path / "named", ("cat", "cow")), data)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "vitrail: the data has the class 'dog', which the model does not have; its 2 classes are 'cat', 'cow'\n"
    )
    assert run(tmp_path / "named", data, "--by-number").code == 0
    done = run(saved(tmp_path / "unnamed", 5), data)
    assert (done.code, done.out) == (2, "")
    assert "the data has 2 classes and the model 5" in done.err
    assert run(saved(tmp_path / "numbered", 2), data).code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--split", "tset"), "unknown split 'tset'; choose test, val, train, all"),
        (("--precision", "int3"), "no precision is called 'int3'"),
        (("--device", "abacus"), "no device is called 'abacus'"),
        (("--batch", "0"), "--batch"),
    ],
)
def test_wrong_options(run: RunCommand, bundle: Path, data: Path, options: tuple[str, ...], message: str) -> None:
    done = run(bundle, data, *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_sources_that_cannot_be_opened(run: RunCommand, bundle: Path, data: Path, tmp_path: Path) -> None:
    for words in ((tmp_path / "nowhere", data), (bundle, tmp_path / "nowhere")):
        done = run(*words)
        assert (done.code, done.out) == (2, "")
        assert "nowhere does not exist; " in done.err
        assert len(done.err.splitlines()) == 1


def test_compact_json_is_equivalent() -> None:
    result = {"matrix": [[1, -2.5e-7], [3, 4]], "names": ["[\n1, 2\n]", "3"], "empty": [], "interval": [0.5, 1]}
    text = _compact_json(result)
    assert json.loads(text) == result
    assert "[1, -2.5e-07]" in text


def test_python_and_command_agree(run: RunCommand, bundle: Path, data: Path) -> None:
    for split in (None, "val", "all"):
        result = vitrail.evaluate(bundle, data, split=split, workers=0)
        done = run(bundle, data, "--json", *(() if split is None else ("--split", split)))
        assert json.loads(done.out) == json.loads(json.dumps(result.as_dict()))
        assert result.split == (split or "all")
        printed = run(bundle, data, *(() if split is None else ("--split", split))).out
        assert printed.startswith(f"{result.summary}.\n")
    opened = vitrail.evaluate(vitrail.load(bundle), str(data), workers=0)
    assert opened.as_dict() == vitrail.evaluate(bundle, data, workers=0).as_dict()
    metrics = classified(opened)
    assert metrics.top1_interval.low <= metrics.top1 <= metrics.top1_interval.high


def test_python_uses_the_split_of_the_run(bundle: Path, data: Path) -> None:
    splits = open_data(data, seed=0, val=0.2, test=0.2)
    (bundle.parent / "split.json").write_text(json.dumps(splits.record))
    held_out = vitrail.evaluate(bundle, data, workers=0)
    assert (held_out.split, held_out.kind, held_out.images) == ("test", "held-out images", 4)
    assert held_out.summary.endswith("; evaluated on the test split; compared with the images of its run by name only")
    selecting = vitrail.evaluate(bundle, data, split="val", workers=0)
    assert (selecting.seen.selected_on, selecting.images) == (4, 4)
    assert "; evaluated on the validation split; selected on these images" in selecting.summary


def test_python_errors(bundle: Path, data: Path) -> None:
    with pytest.raises(vitrail.ConfigError, match="unknown split 'tset'"):
        vitrail.evaluate(bundle, data, split="tset")
    with pytest.raises(vitrail.CheckpointError, match=r"wrap your own model with vitrail\.Bundle"):
        vitrail.evaluate(vitrail.load(bundle).model, data)
    with pytest.raises(vitrail.DataError, match="nowhere does not exist; give a folder"):
        vitrail.evaluate(bundle, data / "nowhere")
    with pytest.raises(vitrail.ConfigError, match="no device is called 'gpu'"):
        vitrail.evaluate(bundle, data, device="gpu")
