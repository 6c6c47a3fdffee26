"""Bulk jobs on a real Ray cluster: the rows of one process, each once, whoever is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.support.prediction_jobs import tiny_bundle, tiny_images

import vitrail
from vitrail import DataError, RayOptions
from vitrail.inference.chunk_folder import CHUNKS, MANIFEST, part_name

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # Ray's own warnings are not errors


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a cluster once; jobs use the connection that exists."""
    from vitrail.inference.ray_cluster import connected

    with connected("local") as ray:
        yield ray


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a manifest of many rows; one of its 20 images is corrupt, and one is missing."""
    monkeypatch.chdir(tmp_path)
    files = tiny_images(tmp_path / "images", 20)
    files[3].write_bytes(b"no image")
    files[7].unlink()
    rows = [f"images/{file.name}" for _ in range(30) for file in files]
    (tmp_path / "list.csv").write_text("path\n" + "\n".join(rows) + "\n")
    return Path("list.csv")


def same_rows(folder: Path, bundle: vitrail.Bundle, images: Path) -> None:
    """Compare a folder with the output of one process, bit for bit."""
    file = folder.with_name("one.parquet")
    vitrail.predict(bundle, images, output=file, top=3, batch=8, workers=0, device="cpu", overwrite=True)
    one, many = pq.read_table(file), pq.read_table(folder)
    assert many.schema.equals(one.schema)
    assert many.equals(one)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["rows"] == one.num_rows
    assert sum(file["rows"] for file in manifest["files"]) == one.num_rows
    assert manifest["bad"] == one.num_rows - one["error"].null_count


def processes_of(folder: Path, title: bytes = b"ray::MapWorker") -> list[int]:
    """Return the processes of Ray with a title, by default the workers, that run in a folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if (process / "cmdline").read_bytes().startswith(title) and (process / "cwd").readlink() == folder:
                found.append(int(process.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def test_predict_writes_the_rows_of_one_process(cluster: Any, images: Path, tmp_path: Path) -> None:
    bundle = tiny_bundle()
    plans: list[str] = []
    counts: list[tuple[int, int | None]] = []
    options = RayOptions(workers=2, chunk=64)
    done = vitrail.predict(
        bundle, images, output="out", top=3, batch=8, device="cpu", ray=options, on_plan=plans.append,
        on_progress=lambda _, count, total: counts.append((count, total)),
    )  # fmt: skip
    assert (done.images, done.bad, done.earlier) == (600, 60, 0)
    assert len(list((tmp_path / "out").glob("part-*.parquet"))) == 10
    same_rows(tmp_path / "out", bundle, images)
    assert plans[0].startswith("2 Ray workers: eager, float32")
    assert len(plans) == 1
    assert counts[-1] == (600, 600)
    again = vitrail.predict(bundle, images, output="out", top=3, device="cpu", ray="local", resume=True)
    assert (again.images, again.bad, again.earlier) == (600, 60, 600)
    with pytest.raises(DataError, match="was started with another model; use the same settings"):
        vitrail.predict(tiny_bundle(seed=1), images, output="out", top=3, device="cpu", ray="local", resume=True)


def test_embed_writes_the_rows_of_one_process(cluster: Any, images: Path, tmp_path: Path) -> None:
    (tmp_path / "images" / "00007.png").write_bytes(b"")
    bundle, options = tiny_bundle(), RayOptions(workers=2, chunk=8)
    one = vitrail.embed(bundle, "images", "one.parquet", batch=8, workers=0, device="cpu")
    many = vitrail.embed(bundle, "images", "out", batch=8, device="cpu", ray=options)
    assert many.shape == one.shape == (18, 16)
    assert many.bad == one.bad
    assert pq.read_table(tmp_path / "out").equals(pq.read_table(tmp_path / "one.parquet"))
    assert vitrail.embed(bundle, "images", "out", device="cpu", ray=options, resume=True) == many


def test_a_killed_worker_is_replaced(cluster: Any, images: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(stage: str, count: int, total: int | None) -> None:
        if len(killed) < 2 and (found := processes_of(tmp_path)):
            os.kill(found[0], signal.SIGKILL)
            killed.append(found[0])

    bundle = tiny_bundle()
    options = RayOptions(workers=2, chunk=8)
    vitrail.predict(bundle, images, output="out", top=3, batch=8, device="cpu", ray=options, on_progress=kill)
    assert len(killed) == 2
    same_rows(tmp_path / "out", bundle, images)


def test_a_killed_driver_is_resumed(cluster: Any, images: Path, tmp_path: Path) -> None:
    tiny_bundle().save(tmp_path / "bundle")
    words = "predict bundle list.csv --output out --ray local --ray-workers 2 --chunk 8 --batch 8 --top 3 --device cpu"
    driver = subprocess.Popen([sys.executable, "-m", "vitrail", *words.split()], stderr=subprocess.PIPE)
    records = tmp_path / "out" / CHUNKS
    while driver.poll() is None and len(list(records.glob("*.json"))) < 3:
        time.sleep(0.005)
    driver.kill()
    _, errors = driver.communicate()
    assert driver.returncode == -signal.SIGKILL, errors
    end = time.monotonic() + 120
    while processes_of(tmp_path):  # Ray ends them soon
        time.sleep(0.1)
        assert time.monotonic() < end
    for process in processes_of(tmp_path, b"ray::"):  # Ray leaves two agents of its own behind
        os.kill(process, signal.SIGKILL)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    finished = {part_name(int(path.stem)) for path in records.glob("*.json")}
    assert 3 <= len(finished) < 75
    with pytest.raises(DataError, match="belongs to an interrupted job; resume it with --resume"):
        vitrail.predict("bundle", images, output="out", top=3, device="cpu", ray="local")
    done = vitrail.predict("bundle", images, output="out", top=3, batch=8, device="cpu", ray="local", resume=True)
    assert (done.images, done.earlier) == (600, 8 * len(finished))
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in finished} == {
        name: before[name] for name in finished
    }
    same_rows(tmp_path / "out", vitrail.load(tmp_path / "bundle"), images)


def test_an_error_of_a_worker_is_raised_by_the_driver(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_images(tmp_path / "images", 4)
    bundle = tiny_bundle()
    bundle.model.head.weight.data.fill_(float("nan"))
    with pytest.raises(vitrail.Diverged, match=r"the logits for .*images/00000.png are not finite"):
        vitrail.predict(bundle, "images", output="out", device="cpu", ray="local")
    for file in (tmp_path / "images").iterdir():
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"none of the 4 images can be read; the first, images/00000\.png"):
        vitrail.predict(tiny_bundle(), "images", output="bad", device="cpu", ray="local")
