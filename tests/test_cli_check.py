"""`vitrail check`, end to end."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support import forked_commands
from tests.support.commands import CommandOutput, RunCommand, run_command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run the command in this process, because imports would take most of the time."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))

    def command(*words: object) -> CommandOutput:
        return run_command(monkeypatch, capsys, "check", *words)

    return command


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for label in ("cat", "dog"):
        folder = tmp_path / "data" / label
        folder.mkdir(parents=True)
        for number in range(10):
            noise = np.random.default_rng([number, ord(label[0])]).integers(0, 256, (6, 8, 3), np.uint8)
            Image.fromarray(noise).resize((80, 60)).save(folder / f"{number}.jpg")
    return tmp_path / "data"


def test_good_data(run: RunCommand, data: Path) -> None:
    done = run(data, "--workers", 0)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "20 images in 2 classes; no problems found."
    assert "Findings" not in done.out
    assert "cat        7    1     2" in lines
    assert any(line.startswith("    32–63  ██████") and line.endswith(" 20") for line in lines)
    assert "all JPEG; all colour" in done.out
    assert "Not checked: near-duplicates: the same image cropped, resized or re-encoded.\n" in done.out
    assert "images/s per worker" in done.out
    assert [line.split()[0] for line in lines if line.strip().startswith(("100 ", "1,000 ", "5,000 "))] == [
        "100",
        "1,000",
        "5,000",
    ]


def test_findings_are_listed_and_unreadable_images_fail(run: RunCommand, data: Path) -> None:
    (data / "cat" / "text.jpg").write_text("no image")
    for number in range(7):
        (data / "cat" / f"empty{number}.jpg").write_bytes(b"")
    shutil.copy(data / "cat" / "0.jpg", data / "dog" / "copy.jpg")
    done = run(data, "--workers", 2, "--images-per-second", 1e9)
    assert (done.code, done.err) == (2, "")
    assert done.out.startswith("29 images in 2 classes; 8 cannot be read, 1 duplicate with different labels")
    assert "! 8 images cannot be read. Fix or remove them" in done.out
    assert "    … and 3 more" in done.out
    assert "copy.jpg" in done.out
    assert "Where the device waits for images, this helps: more cores, or " in done.out


def test_json_output(run: RunCommand, data: Path, tmp_path: Path) -> None:
    (data / "cat" / "text.jpg").write_text("no image")
    sheet = tmp_path / "sheet.png"
    done = run(data, "--json", "--workers", 0, "--images-per-second", 10, "--sheet", sheet, "--size", 64)
    assert (done.code, done.err) == (2, "")
    result = json.loads(done.out)
    assert result["summary"].startswith("21 images in 2 classes; 1 cannot be read")
    assert result["unreadable"][0]["label"] == "cat"
    assert result["sheet"] == str(sheet)
    assert result["speed"]["images_per_second"] > 0
    assert [bound["images_per_second"] for bound in result["bounds"]] == [10]
    assert result["bounds"][0]["by"] == "compute"
    with Image.open(sheet) as image:
        assert image.format == "PNG"


def test_skipped_files_are_listed(run: RunCommand, data: Path) -> None:
    for number in range(7):
        (data / "cat" / f"notes{number}.txt").write_text("no image")
    shutil.copy(data / "cat" / "0.jpg", data / "dog" / "0.php")
    done = run(data, "--workers", 0)
    assert done.code == 0
    assert "· 7 files were skipped: no image suffix. " in done.out
    assert f"    {data}/cat/notes4.txt\n    … and 2 more\n" in done.out
    assert f"    {data}/dog/0.php: a JPEG; rename it to 0.jpg\n" in done.out


def test_one_pass_lists_all_errors(run: RunCommand, data: Path) -> None:
    (data / "cat" / "gone.jpg").symlink_to("nowhere.jpg")
    (data / "cat" / "round.jpg").symlink_to("round.jpg")
    (data / "dog" / "up").symlink_to(data)
    (data / "emu").mkdir()
    (data / "fox").mkdir()
    shutil.copy(data / "dog" / "0.jpg", data / "fox")
    (data / "gnu").mkdir()
    (data / "cat" / "text.jpg").write_text("no image")
    Image.new("RGB", (80, 60)).save(data / "cat" / "black.png")
    done = run(data, "--workers", 0)
    assert (done.code, done.err) == (2, "")
    assert "! 6 faults in the layout of the data; training would stop. Fix the listed faults.\n" in done.out
    for text in (
        f"{data}/cat/gone.jpg is a link to nowhere.jpg, which does not exist; correct or remove the link",
        f"{data}/cat/round.jpg is a circular link; correct or remove the link",
        f"{data}/dog/up is a link to a folder that contains it; remove the link",
        f"the class folder {data}/emu has no images; add some, or remove the folder",
        "class 'fox' has 1 image, too few for 3 splits",
        "! 1 image cannot be read.",
        "1 duplicate with different labels",
        "· 1 image has only a single colour.",
    ):
        assert text in done.out
    result = json.loads(run(data, "--json", "--workers", 0).out)
    assert len(result["faults"]) == 6


def test_the_contact_sheet_path_is_printed(run: RunCommand, data: Path, tmp_path: Path) -> None:
    done = run(data, "--workers", 0, "--sheet", tmp_path / "sheet.png")
    assert done.out.endswith(f"The contact sheet is {tmp_path / 'sheet.png'}.\n")
    assert (tmp_path / "sheet.png").exists()


def test_digits(run: RunCommand) -> None:
    done = run("digits", "--size", 32)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("1,797 images in 10 classes; all tiny.")
    assert "all array; all grey" in done.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sheet", "sheet.jpg"), "'sheet.jpg' does not end with .png"),
        (("--sheet", "nowhere/sheet.png"), "is in a folder that does not exist"),
        (("--workers", "-1"), "--workers"),
        (("--images-per-second", "0"), "--images-per-second"),
        (("--images-per-second", "nan"), "--images-per-second"),
        (("--images-per-second", "inf"), "--images-per-second"),
        (("--size", "0"), "--size"),
    ],
)
def test_wrong_options(run: RunCommand, data: Path, options: tuple[str, ...], message: str) -> None:
    done = run(data, *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_sources_that_cannot_be_opened(run: RunCommand, data: Path, tmp_path: Path) -> None:
    done = run(tmp_path / "nowhere")
    assert (done.code, done.out) == (2, "")
    assert "does not exist; give " in done.err
    for label in ("cat", "dog"):
        for number in range(1, 10):
            (data / label / f"{number}.jpg").unlink()
    done = run(data)
    assert (done.code, done.err) == (2, "")
    for label in ("cat", "dog"):
        assert f"class {label!r} has 1 image, too few for 3 splits" in done.out


def test_unusable_data_lists_all_errors(run: RunCommand, data: Path) -> None:
    rows = [f"cat/{number}.jpg,{number},x" for number in range(10)] + [f"{number}.jpg,1,x" for number in range(20)]
    (data / "list.csv").write_text("\n".join(["path,label,label_name", *rows]))
    done = run(data / "list.csv")
    assert (done.code, done.out) == (2, "")
    assert f"{data}/list.csv has 21 faults: (1) 0.jpg, listed in {data}/list.csv, does not exist" in done.err
    assert "(20) 19.jpg, listed in" in done.err
    assert f"(21) {data}/list.csv has two classes named 'x'; use unique names" in done.err


def test_several_labels_or_numbers(run: RunCommand, data: Path) -> None:
    files = [f"{label}/{number}.jpg" for label in ("cat", "dog") for number in range(10)]
    rows = [f"{file};{'ab'[: number % 3]};{number / 4}" for number, file in enumerate(files)]
    (data / "list.csv").write_text("\n".join(["path;letters;age", *rows]))
    done = run(data / "list.csv")
    assert f"{data}/list.csv has no label column; rename one of its columns ('path', 'letters', 'age')" in done.err
    bits = [f"{file},{number % 2},{number % 3 // 2}" for number, file in enumerate(files)]
    (data / "bits.csv").write_text("\n".join(["path,cat,dog", *bits]))
    done = run(data / "bits.csv")
    assert done.code == 0
    assert "20 images with 2 labels" in done.out
    assert "Detected: 2 columns of 0 and 1." in done.out
    ages = [f"{file},{number / 4}" for number, file in enumerate(files)]
    (data / "ages.csv").write_text("\n".join(["path,age", *ages]))
    done = run(data / "ages.csv", "--json")
    assert json.loads(done.out)["targets"]["columns"] == [
        {"name": "age", "minimum": 0.0, "mean": 2.375, "maximum": 4.75, "missing": 0}
    ]


def test_the_task_and_the_columns_can_be_named(run: RunCommand, data: Path) -> None:
    rows = [f"{label}/{number}.jpg,{number % 3}" for label in ("cat", "dog") for number in range(10)]
    (data / "list.csv").write_text("\n".join(["path,stars", *rows]))
    done = run(data / "list.csv")
    assert "list.csv has no label column; rename one of its columns ('path', 'stars') to label or class" in done.err
    assert "--labels COLUMN in vitrail check" in done.err
    done = run(data / "list.csv", "--labels", "stars", "--json")
    assert json.loads(done.out)["classes"] == ["0", "1", "2"]
    done = run(data / "list.csv", "--labels", "stars", "--task", "regression", "--json")
    assert [column["mean"] for column in json.loads(done.out)["targets"]["columns"]] == [0.9]
    done = run(data / "list.csv", "--task", "regresion")
    assert (done.code, done.out) == (2, "")
    assert "no task is called 'regresion'; did you mean 'regression'" in done.err


@pytest.mark.parametrize("option", ["--json", "--workers=0"])
def test_no_readable_image(run: RunCommand, data: Path, option: str) -> None:
    for path in data.rglob("*.jpg"):
        path.write_text("no image")
    done = run(data, option)
    assert (done.code, done.out) == (2, "")
    assert "none of the 20 images can be read; the first, " in done.err
    assert len(done.err.splitlines()) == 1


SLOW = """
import os, time
import vitrail.data.checking.survey as survey
def slow(*args):
    os.write(2, b"looking\\n")
    time.sleep(60)
survey._inspect_chunk = slow
survey.CHUNK = 1
from vitrail.__main__ import main
main()
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_ctrl_c_leaves_no_traceback_and_no_process(data: Path, tmp_path: Path, workers: str) -> None:
    environment = {**os.environ, "VITRAIL_CACHE": str(tmp_path / "cache")}
    words = ("check", data, "--workers", workers)
    process = forked_commands.start(*words, code=SLOW, environment=environment, new_session=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "looking\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert err.replace("looking\n", "") == ""
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_all_errors_are_listed_without_a_readable_image(run: RunCommand, data: Path) -> None:
    (data / "empty").mkdir()
    os.symlink("nowhere", data / "cat" / "link.jpg")
    for path in data.glob("*/[0-9].jpg"):
        path.write_text(f"not an image {path}")
    done = run(data, "--workers", 0)
    assert done.code == 2
    assert "is a link to nowhere, which does not exist" in done.err
    assert "empty has no images" in done.err
    assert "none of the 20 images can be read" in done.err
