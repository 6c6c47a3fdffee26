"""The output folder of a bulk job: a chunk is complete or absent, and the listing holds everything about an image."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.prediction_jobs import tiny_images, tiny_pixels

from vitrail.data.inputs import Item
from vitrail.data.sources.selection import choose_images
from vitrail.errors import ConfigError, DataError
from vitrail.inference.chunk_folder import (
    ATTEMPTS,
    CHUNKS,
    MANIFEST,
    ChunkFolder,
    ChunkJob,
    ChunkRecord,
    part_name,
    write_chunk,
)
from vitrail.inference.chunk_listing import read_listing, write_listing
from vitrail.inference.listing import list_items
from vitrail.inference.ray_jobs import _digest_source

JOB = ChunkJob("predict", "model", {"size": [8, 8]}, "listing", 25, 10, ("number", "path"), {"top": 3})


def write(folder: Path, number: int, text: str = "rows") -> ChunkRecord:
    def rows(target: Path) -> tuple[int, int, tuple[tuple[str, str], ...]]:
        target.write_text(text)
        return len(JOB.range_of(number)), 0, ()

    return write_chunk(folder, number, JOB.digest, rows)


def start(
    folder: Path, *, job: ChunkJob = JOB, resume: bool = False, overwrite: bool = False
) -> dict[int, ChunkRecord]:
    with ChunkFolder(folder, resume=resume, overwrite=overwrite) as output:
        return output.start(job)


def finish(folder: Path) -> None:
    with ChunkFolder(folder, resume=True, overwrite=False) as output:
        output.start(JOB)
        output.finish(JOB, {number: write(folder, number) for number in range(JOB.chunks)})


def test_what_another_job_has_written_meanwhile_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    late, resuming = (ChunkFolder(folder, resume=resume, overwrite=False) for resume in (False, True))
    start(folder)
    finish(folder)
    for _ in range(2):  # the lock is free again after the first error
        with pytest.raises(DataError, match=r"another job has written .*; resume it with --resume"), late:
            pass
    with resuming:
        assert len(resuming.start(JOB)) == JOB.chunks
    assert sorted(file.name for file in folder.iterdir()) == [MANIFEST, *map(part_name, range(JOB.chunks))]


def test_chunks_cover_every_image_once() -> None:
    assert [number for chunk in range(JOB.chunks) for number in JOB.range_of(chunk)] == list(range(25))


def test_a_job_resumes_with_the_chunks_that_are_complete(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    start(folder)
    records = {number: write(folder, number) for number in range(3)}
    assert start(folder, resume=True) == records
    (folder / part_name(0)).write_text("other size")
    (folder / CHUNKS / "000001.json").write_text("{")
    (folder / ".part-000002.parquet.x.part").write_text("of a killed worker")
    assert start(folder, resume=True) == {2: records[2]}
    assert not list(folder.glob(".*"))


def test_a_finished_job_has_a_manifest_and_only_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    start(folder)
    finish(folder)
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, *(part_name(number) for number in range(3))]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["rows"] == 25
    assert [file["file"] for file in manifest["files"]] == [part_name(number) for number in range(3)]
    assert set(start(folder, resume=True)) == {0, 1, 2}
    (folder / part_name(1)).unlink()
    assert set(start(folder, resume=True)) == {0, 2}


def test_existing_outputs_are_not_replaced_by_accident(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    start(folder)
    with pytest.raises(DataError, match=r"belongs to an interrupted job; resume it with --resume"):
        start(folder)
    finish(folder)
    with pytest.raises(DataError, match="already exists"):
        start(folder)
    with pytest.raises(ConfigError, match="give only one"):
        start(folder, resume=True, overwrite=True)
    with pytest.raises(DataError, match="started with other images and other options"):
        start(folder, job=replace(JOB, listing="other", settings={"top": 1}), resume=True)
    assert start(folder, overwrite=True) == {}
    assert [path.name for path in folder.glob("part-*")] == []


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(DataError, match="no bulk job wrote; choose another folder"):
        start(tmp_path, overwrite=True)
    with pytest.raises(DataError, match="is a file"):
        start(tmp_path / "photo.jpg")
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(DataError, match="cannot be read, so the job cannot be resumed"):
        start(tmp_path, resume=True)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(DataError, match="not that of a bulk job"):
        start(tmp_path, resume=True)


def test_one_process_writes_a_folder_at_a_time(tmp_path: Path) -> None:
    first = ChunkFolder(tmp_path / "out", resume=False, overwrite=False)
    second = ChunkFolder(tmp_path / "out", resume=False, overwrite=False)
    with first, pytest.raises(DataError, match="being written by another process"), second:
        pass


def test_a_chunk_that_kills_its_workers_is_given_up(tmp_path: Path) -> None:
    start(tmp_path / "out")
    attempts = tmp_path / "out" / CHUNKS / "000001.attempt"
    attempts.write_bytes(b"." * ATTEMPTS)  # as workers leave it that are killed
    with pytest.raises(DataError, match=r"4 workers died while they computed part-000001\.parquet"):
        write(tmp_path / "out", 1)
    write(tmp_path / "out", 1)
    assert not attempts.exists()


# ── the listing ──


def test_the_listing_holds_every_field_of_an_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Item._fields == ("name", "file", "start", "size", "content", "error"), "add the new field to the listing"
    monkeypatch.chdir(tmp_path)
    items = [
        Item(b"a.png", b"a.png"),
        Item(b"x.tar/b\xff.png", b"/x.tar", 512, 100),
        Item(b"c", error="it cannot be read"),
        Item(b"s3://bucket/d.png", b"s3://bucket/d.png"),
    ]
    images, digest = write_listing(iter(items), tmp_path / "listing.parquet", 3)
    read = [item for chunk in range(2) for item in read_listing(tmp_path / "listing.parquet", chunk)]
    assert images == 4
    assert read == [items[0]._replace(file=bytes(tmp_path / "a.png")), *items[1:]]
    assert write_listing(iter(items), tmp_path / "again.parquet", 2)[1] == digest
    assert write_listing(iter(items[1:]), tmp_path / "fewer.parquet", 2)[1] != digest


def test_contents_are_read_where_they_are(tmp_path: Path) -> None:
    files = tiny_images(tmp_path / "images", 5)
    table = pa.table({"image": [file.read_bytes() for file in files]})
    pq.write_table(table, tmp_path / "images.parquet", row_group_size=2)
    listed = list(list_items([str(tmp_path / "images.parquet"), "digits"]))
    write_listing(iter(listed), tmp_path / "listing.parquet", 1000)
    read = [item for chunk in range(2) for item in read_listing(tmp_path / "listing.parquet", chunk)]
    assert [item.name for item in read] == [item.name for item in listed]
    assert all(np.array_equal(a.read(), b.read()) for a, b in zip(read, listed, strict=True))
    assert (tmp_path / "listing.parquet").stat().st_size < tiny_pixels(0).nbytes * len(listed) / 8
    with pytest.raises(DataError, match="cannot be read by a worker"):
        list(read_listing(tmp_path / "nothing.parquet", 0))


def test_a_digest_tells_data_in_memory_apart() -> None:
    images, labels = np.zeros((4, 8, 8), np.uint8), ["a", "b", "a", "b"]
    val = images + 9, labels
    different = [
        (images, labels),
        (images + 1, labels),
        (images, ["a", "b", "b", "a"]),
        (images, ["a", "c", "a", "c"]),
        {"train": (images, labels), "val": val},
        {"train": (images + 1, labels), "val": val},
    ]
    digests = [_digest_source(choose_images(data, "all").source) for data in different]
    assert len(set(digests)) == len(different)
    assert digests[0] == _digest_source(choose_images(different[0], "all").source)
