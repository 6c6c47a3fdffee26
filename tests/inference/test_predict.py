"""`vitrail predict`, run in this process."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.commands import PLAN, CommandOutput, RunCommand, run_command
from tests.support.prediction_jobs import read_rows, tiny_bundle, tiny_images

from vitrail.data.augmentation.vectorised import can_resize
from vitrail.data.inputs import Item
from vitrail.data.item_batches import checked
from vitrail.errors import ConfigError
from vitrail.inference.classifier import Classifier, Predictor
from vitrail.inference.jobs import Output
from vitrail.inference.listing import list_items
from vitrail.inference.row_batches import ahead, decoding_for, predict_items
from vitrail.runtime import Precision

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run the command in this process, in a folder with a bundle and images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    tiny_bundle().save("bundle")
    tiny_images(Path("p"), 9)

    def command(*words: object, stdin: bytes = b"") -> CommandOutput:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return run_command(monkeypatch, capsys, "predict", *words)

    return command


def test_a_folder_as_jsonl(run: RunCommand) -> None:
    done = run("bundle", "p", "--precision", "float32")
    assert done.code == 0
    assert done.after_plan.startswith("9 images; ")
    assert done.after_plan.endswith(" images/s, float32\n")
    assert len(done.rows) == 9
    first = done.rows[0]
    assert list(first) == ["number", "path", "error", "classes", "probabilities"]
    assert (first["number"], first["path"], first["error"]) == (1, "p/00000.png", None)
    assert set(first["classes"]) == {"cat", "dog", "fox"}
    assert sum(first["probabilities"]) == pytest.approx(1, abs=1e-5)
    assert run("bundle", "p", "--quiet") == (0, done.out, "")


def test_skipped_files_are_reported(run: RunCommand) -> None:
    shutil.copy("p/00000.png", "p/upload.php")
    Path("p/notes.txt").write_text("no image")
    done = run("bundle", "p", "--output", "rows.jsonl", "--device", "cpu")
    assert done.code == 0
    assert len(read_rows(Path("rows.jsonl"))) == 9
    assert "vitrail: 1 file is an image by content but not by name; skipped (p/upload.php: a PNG; rename" in done.err
    assert "vitrail: 1 file was skipped: no image suffix (p/notes.txt)" in done.err
    assert not run("bundle", "p", "--output", "other.jsonl", "--quiet").err
    again = run("bundle", "p", "--output", "rows.jsonl", "--resume")
    assert "nothing left to do" in again.err
    assert "p/notes.txt" in again.err
    for image in Path("p").glob("*.png"):
        image.unlink()
    nothing = run("bundle", "p")
    assert nothing.code == 2
    assert nothing.err.startswith("vitrail: no images found; image files end in avif, ")
    assert "rename it to upload.png); 1 file was skipped" in nothing.err


def test_a_table(run: RunCommand) -> None:
    Path("p/00004.png").write_bytes(b"")
    done = run("bundle", "p/0000[345].png", "--format", "table", "--top", 2, "-q")
    lines = done.out.splitlines()
    assert lines[0].split() == ["image", "class", "confidence", "then"]
    assert lines[1].startswith("p/00003.png  ")
    assert lines[1].count("%") == 2
    assert lines[2].split("  ")[0] == "p/00004.png"
    assert lines[2].endswith("the file is empty")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_every_format_has_the_same_rows(run: RunCommand, suffix: str) -> None:
    Path("p/00004.png").write_bytes(b"no image")
    expected = run("bundle", "p", "--batch", 2, "--workers", 0).rows
    done = run("bundle", "p", "--output", f"out{suffix}", "--batch", 2, "--workers", 0)
    assert (done.code, done.out) == (0, "")
    assert done.after_plan.startswith("9 images; 1 could not be read; ")
    assert done.err.endswith(f"; written to out{suffix}\n")
    assert read_rows(Path(f"out{suffix}")) == expected
    assert [row["number"] for row in expected if row["error"]] == [5]
    run("bundle", "p", "-o", "other", "--format", suffix[1:], "--batch", 2, "--workers", 0)
    assert Path("other").read_bytes() == Path(f"out{suffix}").read_bytes()


def test_lists_from_stdin_have_one_row_per_line(run: RunCommand) -> None:
    lines = b"p/00003.png\np\np/gone.png\np/00003.png\nftp://x.org/1.jpg\np/00001.png\n"
    rows = run("bundle", "-", stdin=lines).rows
    assert [row["path"] for row in rows] == lines.decode().splitlines()
    assert [row["error"] for row in rows] == [
        None,
        "a folder; pass it on the command line to read the images in it",
        "it cannot be read: No such file or directory",
        None,
        "a URL, which is not downloaded; download it first",
        None,
    ]
    assert rows[0]["classes"] == rows[3]["classes"]
    Path("p/new\nline.png").write_bytes(Path("p/00000.png").read_bytes())
    (row,) = run("bundle", "-", "-0", stdin=b"p/new\nline.png\0").rows
    assert (row["path"], row["error"]) == ("p/new\nline.png", None)


def test_the_digits_and_a_model_without_names(run: RunCommand) -> None:
    tiny_bundle(None, channels=1).save("grey")
    done = run("grey", "digits", "--top", 1, "--batch", 500, "--workers", 0)
    assert len(done.rows) == 1797
    assert {name for row in done.rows for name in row["classes"]} <= {"0", "1", "2"}


def test_ctrl_c_tells_how_to_resume(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Output, "write", interrupt)
    message = "vitrail: stopped; rerun the same command with --resume to resume o.csv"
    done = run("bundle", "p", "-o", "o.csv")
    assert done.code != 0
    assert message in done.err
    assert "--resume" not in run("bundle", "p", "-o", "o.txt").err  # a table cannot be resumed


def test_resume_without_and_with_an_earlier_job(run: RunCommand) -> None:
    assert run("bundle", "p", "-o", "o.csv", "--resume").code == 0
    assert run("bundle", "p", "-o", "o.csv", "--overwrite").code == 0
    done = run("bundle", "p", "-o", "o.csv", "--resume")
    assert done.code == 0
    assert "all predicted earlier; nothing left to do (use --overwrite to predict them again)" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere", "p"), "nowhere does not exist"),
        (("headless", "p"), "the model has no head"),
        (("bundle", "gone.png"), "gone.png does not exist; give files, folders"),
        (("bundle", "ftp://example.org/cat.jpg"), "is a URL, which is not downloaded; download it first"),
        (("bundle", "empty"), "no images found; image files end in avif, bmp, gif, "),
        (("bundle", "-"), "there are no paths on stdin; pipe them in, one per line, or give"),
        (("bundle", "p", "-o", "there.csv"), "there.csv already exists; choose another name, or replace it with --ov"),
        (("bundle", "p", "-o", "p"), "p has no known suffix"),
        (("bundle", "p", "-o", "p", "--format", "csv"), "p is a folder; give the name of a file to write"),
        (("bundle", "p", "-o", "no/o.csv"), "no/o.csv is in a folder that does not exist"),
        (("bundle", "p", "-o", "o.xml"), "o.xml has no known suffix; use .jsonl, .csv or"),
        (("bundle", "p", "-o", "/dev/null", "--format", "csv"), "/dev/null is not a regular file"),
        (("bundle", "p", "--format", "cvs"), "unknown format 'cvs'; did you mean 'csv'?"),
        (("bundle", "p", "--format", "parquet"), "Parquet needs a file; give one with --output"),
        (("bundle", "p", "--resume"), "--resume and --overwrite need a file; give one with --output"),
        (("bundle", "p", "--precision", "int3"), "unknown precision 'int3'"),
        (("bundle", "p", "--engine", "abacus"), "'abacus'"),
        (("bundle", "p", "--device", "abacus"), "'abacus'"),
        (("bundle", "p", "--top", "0"), "--top"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(run: RunCommand, words: tuple[str, ...], message: str) -> None:
    tiny_bundle(None, classes=0).save("headless")
    os.mkdir("empty")
    Path("there.csv").write_text("mine")
    done = run(*words)
    assert done.code == 2
    assert message in done.err
    assert done.err.startswith("vitrail: ")
    assert len(done.err.splitlines()) == 1
    assert Path("there.csv").read_text() == "mine"
    assert not Path("o.csv").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that not even root can write to")
def test_an_output_without_write_permission(run: RunCommand) -> None:
    done = run("bundle", "p", "-o", "/sys/o.csv")
    assert done.code == 2
    assert done.err.startswith("vitrail: /sys/o.csv cannot be written: ")


def test_only_bad_images_are_rows_and_an_error(run: RunCommand) -> None:
    Path("bad").mkdir()
    for name in ("a.jpg", "b.png"):
        Path("bad", name).write_text("no image")
    done = run("bundle", "bad")
    assert (done.code, len(done.rows)) == (2, 2)
    assert done.after_plan.startswith(
        "vitrail: none of the 2 images can be read; the first, bad/a.jpg: it is not an image: "
    )
    done = run("bundle", "bad/a.jpg")
    assert done.code == 2
    assert done.after_plan.startswith("vitrail: the only image, bad/a.jpg, cannot be read: it is not an image: ")
    assert len(done.after_plan.splitlines()) == 1


@pytest.mark.parametrize("precision", ["float32", "bf16", "auto"])
def test_the_plan_is_one_line_before_the_work_and_not_in_the_rows(run: RunCommand, precision: str) -> None:
    done = run("bundle", "p", "--precision", precision, "--device", "cpu")
    assert len(done.err.splitlines()) == 2
    plan = PLAN.fullmatch(done.err.splitlines()[0])
    assert plan is not None
    assert precision in (plan[2], "auto")
    assert len(done.rows) == 9
    quiet = run("bundle", "p", "--precision", precision, "--device", "cpu", "--quiet")
    assert (quiet.err, quiet.out) == ("", done.out)


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    tiny_bundle().save(tmp_path / "bundle")
    (image,) = tiny_images(tmp_path / "p", 1)
    program = f"'{sys.executable}' -m vitrail predict -q '{tmp_path / 'bundle'}' - | head -n 1"
    done = subprocess.run(
        program, shell=True, input=f"{image}\n" * 3000, capture_output=True, text=True, check=False, timeout=120
    )
    assert json.loads(done.stdout)["number"] == 1
    assert done.stderr == ""


# ── the pipeline ──


def test_workers_keep_the_order(tmp_path: Path) -> None:
    paths = tiny_images(tmp_path, 12)
    Image.new("RGB", (4000, 3000)).save(tmp_path / "slow.png")
    (tmp_path / "bad.png").write_text("no image")
    places = [str(path) for path in (tmp_path / "slow.png", *paths[:5], tmp_path / "bad.png", *paths[5:])]
    classifier = Classifier(tiny_bundle(), device="cpu")
    alone = list(chain(*predict_items(classifier, list_items(places), batch=2, workers=0)))
    assert [os.fsdecode(row.path) for row in alone] == places
    assert [row.number for row in alone] == list(range(1, 15))
    for workers in (1, 2):
        assert list(chain(*predict_items(classifier, list_items(places), batch=2, workers=workers))) == alone


def test_a_gpu_computes_one_batch_ahead() -> None:
    """`predict_items` calls this for GPUs, whose batches take a thread of their own."""
    done: list[int] = []

    def compute(item: int) -> int:
        if item == 5:
            raise ConfigError("five")
        done.append(item)
        return 10 * item

    computed = ahead(compute, iter(range(9)))
    assert next(computed) == (0, 0)
    assert set(done) <= {0, 1}
    assert list(islice(computed, 4)) == [(item, 10 * item) for item in range(1, 5)]
    with pytest.raises(ConfigError, match="five"):
        next(computed)
    assert list(ahead(compute, iter(()))) == []


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_only_float32_has_the_pixels_of_other_libraries(tmp_path: Path, precision: Precision) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8))
    image.save(tmp_path / "noise.png")
    predictor: Predictor[Any] = Predictor(tiny_bundle(), precision=precision, device="cpu")
    predictor.preprocess = predictor.preprocess.replace(size=(48, 48))
    items = list(list_items([str(tmp_path)]))
    (decoded,) = checked(decoding_for(predictor)[items]).pixels.permute(0, 2, 3, 1).numpy()
    exact, quick = (predictor.preprocess.fit(np.asarray(image), quick=quick) for quick in (False, True))
    assert np.array_equal(decoded, exact if precision == "float32" else quick)
    assert not np.array_equal(exact, quick) or not can_resize(exact, Image.Resampling.BILINEAR)


@pytest.fixture
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize("batch", [2, 5, 64])
def test_cpu_threads_keep_the_order(tmp_path: Path, batch: int) -> None:
    """Each thread decodes and computes; the predictions are those of a single thread, within rounding."""
    paths = tiny_images(tmp_path, 40)
    Image.new("RGB", (4000, 3000)).save(tmp_path / "slow.png")
    (tmp_path / "bad.png").write_text("no image")
    places = [str(path) for path in (tmp_path / "slow.png", *paths[:5], tmp_path / "bad.png", *paths[5:])]
    classifier = Classifier(tiny_bundle(), device="cpu")
    alone = list(chain(*predict_items(classifier, list_items(places), workers=0)))
    made = list(predict_items(classifier, list_items(places), batch=batch, first=11))
    assert [len(rows) for rows in made[:-1]] == [batch] * (len(made) - 1)
    rows = list(chain(*made))
    assert [row.number for row in rows] == list(range(11, 53))
    assert [row.path for row in rows] == [row.path for row in alone]
    for actual, expected in zip(rows, alone, strict=True):
        got, wanted = actual.prediction.fields(), expected.prediction.fields()
        assert (actual.prediction.error, got["classes"]) == (expected.prediction.error, wanted["classes"])
        assert got["probabilities"] == pytest.approx(wanted["probabilities"], abs=1e-5)


MEMORY = """
import os, sys
from itertools import chain
import torch
from tests.support.prediction_jobs import tiny_bundle
from vitrail.inference.classifier import Classifier
from vitrail.inference.listing import list_items
from vitrail.inference.row_batches import predict_items

def resident():
    # This process and its workers; shared memory is counted for each, and does not grow either.
    pids = [os.getpid(), *map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())]
    return sum(int(open(f"/proc/{pid}/statm").read().split()[1]) for pid in pids) * os.sysconf("SC_PAGE_SIZE")

torch.set_num_threads(1)
done, seen = 0, {}
classifier = Classifier(tiny_bundle(), device="cpu")
workers = None if sys.argv[2] == "lanes" else 2
if workers is None:
    torch.set_num_threads(2)
for rows in predict_items(classifier, list_items(["-"], stdin=sys.stdin.buffer), workers=workers):
    done += len(rows)
    for mark in (2_048, int(sys.argv[1])):
        if done >= mark:
            seen.setdefault(mark, resident())
first, last = seen.values()
print(done, last - first)
"""


def grown(tmp_path: Path, rows: int, how: str) -> int:
    """Return the growth of memory in bytes after the first 2,000 rows."""
    paths = tiny_images(tmp_path, 5)
    lines = "".join(f"{paths[number % 5]}\n" for number in range(rows))
    command = [sys.executable, "-c", MEMORY, str(rows), how]
    done = subprocess.run(command, input=lines, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    total, growth = map(int, done.stdout.split())
    assert total == rows
    return growth


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
@pytest.mark.parametrize("how", ["workers", "lanes"])
def test_memory_does_not_grow_with_the_list(tmp_path: Path, how: str) -> None:
    assert grown(tmp_path, 20_000, how) < 8e6


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize("workers", [2, None])
def test_a_list_is_read_lazily(workers: int | None) -> None:
    """Two batches per worker, the one being computed, and the first one, which sets the number of workers.

    Lanes take less: two parts of up to eight images each, and one more.
    """
    requested = 0

    def endless() -> Any:
        nonlocal requested
        for item in repeat(Item(b"bad", error="bad")):
            requested += 1
            yield item

    rows = predict_items(Classifier(tiny_bundle(), device="cpu"), endless(), batch=10, workers=workers)
    for step in range(20):
        assert len(next(rows)) == 10
        assert requested <= 10 * (step + 1 + 2 * 2 + 1) + (8 if workers is None else 0)
    rows.close()  # type: ignore[attr-defined]
