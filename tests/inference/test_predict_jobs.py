"""Interrupted jobs: every row exactly once, and never rows of two jobs in one file."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from tests.support.prediction_jobs import read_rows, tiny_bundle, tiny_images

from vitrail.errors import ConfigError, DataError
from vitrail.inference import jobs
from vitrail.inference.bulk_prediction import Summary, predict_files
from vitrail.inference.writing import PredictionRow
from vitrail.tasks.classification import ClassPrediction
from vitrail.tasks.lookup import CLASSIFICATION

ROOT = Path(__file__).parents[2]
BUNDLE = tiny_bundle()


def run(output: Path, places: list[Path] | list[str], **options: Any) -> Summary:
    settings: dict[str, Any] = {"batch": 4, "workers": 0, "device": "cpu", **options}
    return predict_files(settings.pop("bundle", BUNDLE), list(map(str, places)), output=output, **settings)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    paths = tiny_images(folder, 20)
    (folder / "bad.png").write_text("no image")
    odd = folder / os.fsdecode(b'caf\xe9 "new\nline", \r.png')
    shutil.copy(paths[0], odd)
    return [*paths[:9], folder / "bad.png", odd, *paths[9:]]


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_a_file_truncated_anywhere_is_resumed(
    format: str, images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, target = tmp_path / f"straight.{format}", tmp_path / f"cut.{format}"
    assert run(straight, images)[:3] == (22, 1, 0)
    assert {path.name for path in tmp_path.iterdir()} == {straight.name}
    expected = read_rows(straight)
    monkeypatch.setattr(jobs.Output, "finish", lambda self: None)
    run(target, images)  # as if it had stopped after the last row
    monkeypatch.undo()
    lines = target.with_name(target.name + ".rows.jsonl") if format == "parquet" else target
    whole, job = lines.read_bytes(), target.with_name(target.name + ".job.json").read_bytes()
    for length in [0, 1, *range(7, len(whole), 97), len(whole) - 1, len(whole)]:
        lines.write_bytes(whole[:length])
        target.with_name(target.name + ".job.json").write_bytes(job)
        done = run(target, images, resume=True)
        assert done.images == 22
        assert done.bad == 1
        actual = read_rows(target)
        assert [row["number"] for row in actual] == list(range(1, 23))
        for row, same in zip(actual, expected, strict=True):
            # Batch boundaries differ now, which changes the last digits.
            assert row["probabilities"] == pytest.approx(same["probabilities"], abs=1e-5)
            assert {**row, "probabilities": 0} == {**same, "probabilities": 0}
        assert {path.name for path in tmp_path.iterdir()} == {straight.name, target.name}


def test_names_with_any_bytes(images: list[Path], tmp_path: Path) -> None:
    odd = images[10]
    for format in ("jsonl", "csv"):
        run(tmp_path / f"rows.{format}", images)
        path = read_rows(tmp_path / f"rows.{format}")[10]["path"]
        assert os.fsencode(path) == os.fsencode(odd)
        assert Path(path).is_file()
    assert b"caf\\udce9" in (tmp_path / "rows.jsonl").read_bytes()
    run(tmp_path / "rows.parquet", images)
    assert read_rows(tmp_path / "rows.parquet")[10]["path"] == os.fsencode(odd).decode("utf-8", "backslashreplace")
    # The rows are a manifest: another model can predict the same images.
    run(tmp_path / "again.jsonl", [tmp_path / "rows.jsonl"])
    assert [row["path"] for row in read_rows(tmp_path / "again.jsonl")] == list(map(str, images))


@pytest.fixture
def interrupted(images: list[Path], tmp_path: Path) -> Path:
    """A job that stopped after some rows."""
    target = tmp_path / "rows.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.Output, "finish", lambda self: None)
        run(target, images)
    target.write_bytes(b"".join(target.read_bytes().splitlines(keepends=True)[:6]))
    return target


def test_another_job_raises(interrupted: Path, images: list[Path], tmp_path: Path) -> None:
    before = interrupted.read_bytes()
    for options, words in (
        ({"top": 1}, r"another number of classes \(--top\)"),
        ({"bundle": tiny_bundle(seed=1)}, "another model"),
        ({"bundle": tiny_bundle(("a", "b", "c"))}, "another model"),
        ({"precision": "bf16"}, "another precision"),
        ({"format": "csv"}, "another format"),
        ({"top": 2, "precision": "bf16"}, r"another number of classes \(--top\) and another precision"),
    ):
        with pytest.raises(DataError, match=f"was started with {words}; use the same settings, or restart with"):
            run(interrupted, images, resume=True, **options)
    with pytest.raises(DataError, match="was started with other images"):
        run(interrupted, images[:-1], resume=True)
    assert interrupted.read_bytes() == before
    assert run(interrupted, images, resume=True, batch=9, workers=2).earlier == 6


def test_added_or_removed_images_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    images = tiny_images(folder, 12)
    target = tmp_path / "rows.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.Output, "finish", lambda self: None)
        run(target, [folder])
    target.write_bytes(b"".join(target.read_bytes().splitlines(keepends=True)[:7]))
    shutil.copy(images[0], folder / "00002a.png")
    with pytest.raises(DataError, match=r"row 4 of .*00003\.png, but would now be .*00002a\.png: the images"):
        run(target, [folder], resume=True)
    (folder / "00002a.png").unlink()
    shutil.copy(images[0], folder / "99999.png")  # after the finished rows: nothing is lost or repeated
    assert run(target, [folder], resume=True).images == 13
    assert [Path(row["path"]).name for row in read_rows(target)] == [*(p.name for p in images), "99999.png"]


def test_existing_files_are_not_overwritten(interrupted: Path, images: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="belongs to an interrupted job; resume it with --resume, or restart"):
        run(interrupted, images)
    assert run(interrupted, images, overwrite=True).earlier == 0
    with pytest.raises(DataError, match="already exists; choose another name, or replace it with --overwrite"):
        run(interrupted, images)
    with pytest.raises(ConfigError, match="give only one of them"):
        run(interrupted, images, resume=True, overwrite=True)
    with pytest.raises(ConfigError, match="a table cannot be resumed"):
        run(tmp_path / "rows.txt", images, resume=True)
    (tmp_path / "list.csv").write_text(f"path\n{images[0]}\n")
    with pytest.raises(DataError, match=r"list\.csv is one of the inputs; write to another file"):
        run(tmp_path / "list.csv", [tmp_path / "list.csv"], overwrite=True)
    assert (tmp_path / "list.csv").read_text() == f"path\n{images[0]}\n"
    interrupted.with_name(interrupted.name + ".job.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read, so the job cannot be resumed"):
        run(interrupted, images, resume=True)


def test_an_overwritten_parquet_stays_until_the_new_one_is_complete(images: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "rows.parquet"
    run(target, images[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.Output, "finish", lambda self: None)
        run(target, images, overwrite=True)
    assert len(read_rows(target)) == 3
    assert run(target, images, resume=True).earlier == 22
    assert len(read_rows(target)) == 22


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_resuming_a_finished_file_leaves_it_unchanged(format: str, images: list[Path], tmp_path: Path) -> None:
    target = tmp_path / f"rows.{format}"
    run(target, images)
    before = target.read_bytes()
    assert run(target, images, resume=True)[:3] == (22, 1, 22)
    for others, row, there, now in (
        (images[:-1], 22, "00019.png", "nothing"),
        ([*images, images[0]], 23, "nothing", "00000.png"),
        ([images[1], images[0], *images[2:]], 1, "00000.png", "00001.png"),
    ):
        words = rf" is finished, but its row {row} is .*{there} and would now be .*{now}: the images"
        with pytest.raises(DataError, match=words):
            run(target, others, resume=True)
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_foreign_file_does_not_count_as_finished(images: list[Path], tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", b"[1]\n"),
        ("b.csv", b"path\n1\n"),
        ("c.parquet", b"PAR1"),
        ("d.jsonl", b"no line end"),
        ("e.csv", b"number,path,error\n1"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="already exists and was not written by predict; choose another name, "):
            run(tmp_path / name, images, resume=True)
        assert (tmp_path / name).read_bytes() == content
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "f.parquet")
    with pytest.raises(DataError, match="already exists and was not written by predict"):
        run(tmp_path / "f.parquet", images, resume=True)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_file_finished_by_another_process_is_kept(format: str, tmp_path: Path) -> None:
    target = tmp_path / f"rows.{format}"
    job = jobs.PredictJob("", "", 1, "torch", "float32", format, "float32")

    def opened(resume: bool = False, overwrite: bool = False) -> jobs.Output:
        return jobs.Output(target, job, CLASSIFICATION.rows, resume=resume, overwrite=overwrite)

    first, second, third = opened(), opened(), opened(overwrite=True)
    with first:
        first.write([PredictionRow(1, b"a.png", ClassPrediction(("cat",), (1.0,)))])
        resumed = opened(resume=True)
        first.finish()
    for late in (second, resumed):
        with pytest.raises(DataError, match="was written by another process in the meantime; rerun the command"), late:
            pass
        assert [row["path"] for row in read_rows(target)] == ["a.png"]
        assert [path.name for path in tmp_path.iterdir()] == [target.name]
    with third:
        third.finish()
    assert read_rows(target) == []


def test_two_processes_do_not_write_one_file(images: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl"
    code = (
        "import sys; from vitrail.io import try_lock; f = open(sys.argv[1], 'ab', 0); assert try_lock(f);"
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(DataError, match="is being written by another process; wait for it"):
            run(target, images)
        other.communicate()
    assert run(target, images, resume=True).images == 22


def test_a_full_disk(images: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # limits the size of files
    try:
        with pytest.raises(DataError, match=r"rows\.jsonl cannot be written: File too large"):
            run(target, images)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert target.stat().st_size == 2000
    done = run(target, images, resume=True)
    assert 0 < done.earlier < done.images == 22
    assert [row["number"] for row in read_rows(target)] == list(range(1, 23))


def killed(tmp_path: Path, rows: int, kills: int, suffix: str) -> list[dict[str, Any]]:
    BUNDLE.save(tmp_path / "bundle")
    some = list(map(str, tiny_images(tmp_path / "images", 25)))
    places = [some[number % 25] for number in range(rows)]
    target = tmp_path / f"rows{suffix}"
    command = [
        sys.executable,
        "-m",
        "tests.support.kill_and_resume",
        str(tmp_path / "bundle"),
        str(target),
        str(kills),
        "5",
    ]
    # To a file: workers of a killed parent live some seconds longer, and would hold a pipe open.
    with open(tmp_path / "output", "w+") as output:
        code = subprocess.run([*command, *places], cwd=ROOT, stdout=output, stderr=output, timeout=600, check=False)
        output.seek(0)
        assert (code.returncode, output.read()) == (0, f"{kills}\n")
    (tmp_path / "output").unlink()
    result = read_rows(target)
    assert [(row["number"], row["path"]) for row in result] == list(enumerate(places, start=1))
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "images", target.name}
    return result


@pytest.mark.slow
def test_killed_three_times(tmp_path: Path) -> None:
    result = killed(tmp_path, 300, 3, ".jsonl")
    for row in result[25:]:
        same = result[(row["number"] - 1) % 25]
        assert row["classes"] == same["classes"]
        assert row["probabilities"] == pytest.approx(same["probabilities"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_killed_ten_times(tmp_path: Path, suffix: str) -> None:
    killed(tmp_path, 5_000, 10, suffix)
