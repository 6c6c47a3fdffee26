"""Datasets at URLs, on real servers on loopback: the same images, labels, batches and weights as local files."""

import csv
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from tests.support import forked_commands
from tests.support.remote_servers import FileServer, hub_server, png, s3_server, write_shards
from tests.support.tiny_runs import TINY, tiny_run

from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.batches import Training, training_batches
from vitrail.data.cache import CacheSize, cached
from vitrail.data.checking.check import check_data
from vitrail.data.preprocess import Preprocess
from vitrail.data.remote import filesystems
from vitrail.data.sources.contents import digests_of
from vitrail.data.sources.opening import open_data, open_source
from vitrail.data.sources.selection import choose_images
from vitrail.data.sources.source import Source, digits
from vitrail.data.stream import Stream
from vitrail.errors import DataError, StorageError
from vitrail.inference.listing import list_items
from vitrail.training.plan import describe_data
from vitrail.training.stamps import check_stamps

PATTERN = "train-{0000..0003}.tar"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one dataset in several forms."""
    root = tmp_path_factory.mktemp("data")
    write_shards(root)
    source = digits()
    images = [png(source.images[number]) for number in range(60)]
    labels = [f"class {source.labels[number]}" for number in range(60)]
    table = pa.table({"image": [{"bytes": content, "path": None} for content in images], "label": labels})
    pq.write_table(table, root / "digits.parquet", row_group_size=16)
    (root / "images").mkdir()
    for number, content in enumerate(images):
        (root / "images" / f"{number}.png").write_bytes(content)
    with (root / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *((f"images/{n}.png", labels[n]) for n in range(60))])
    return root


@pytest.fixture
def server(written: Path, tmp_path: Path) -> Iterator[FileServer]:
    shutil.copytree(written, tmp_path / "served")
    with FileServer(tmp_path / "served").running() as server:
        yield server


@pytest.fixture(scope="module")
def bucket(written: Path) -> Iterator[dict[str, str]]:
    with s3_server("photos", written) as environment:
        yield environment


def same(one: Source, other: Source) -> bool:
    images = all(one.read(index) == other.read(index) for index in range(len(one)))
    return images and one.classes == other.classes and one.labels.tolist() == other.labels.tolist()


def gets(server: FileServer) -> int:
    return sum(method == "GET" for method, _, _ in server.requests)


def _blocks_of(requests: list[tuple[str, str, str]]) -> list[str]:
    return [path for method, path, _ in requests if method == "GET" and path.endswith(".tar")]


@pytest.mark.parametrize("place", [PATTERN, "train-0001.tar", "digits.parquet", "list.csv", "list.csv?token=1"])
def test_http(server: FileServer, written: Path, place: str) -> None:
    remote, local = open_source(f"{server.url}/{place}"), open_source(f"{written}/{place.partition('?')[0]}")
    assert same(remote, local)
    assert remote.name(1).startswith(server.url)
    assert remote.stamp(1) == open_source(f"{server.url}/{place}").stamp(1)


@pytest.mark.slow
@pytest.mark.parametrize("place", [PATTERN, "train-*.tar", "digits.parquet", "list.csv"])
def test_s3(bucket: dict[str, str], written: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    assert same(open_source(f"s3://photos/{place}"), open_source(f"{written}/{place}"))


@pytest.mark.slow
def test_s3_errors(bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    for place, message in {
        "s3://nobody/train.tar": r"^s3://nobody/train\.tar does not exist \(The specified bucket does not exist\); ",
        "s3://photos/none.tar": r"^s3://photos/none\.tar does not exist; correct the URL$",
        "s3://photos/x-{00..01}.tar": r"^s3://photos/x-00\.tar does not exist; correct the URL$",
        "s3://photos/x-*.tar": r"^a file that matches s3://photos/x-\*\.tar does not exist; correct the pattern$",
        "s3://photos": r"^s3://photos is not a file of a known type; give a manifest",
        "s3://photos/x.tar.gz": "is compressed, which prevents random access",
    }.items():
        with pytest.raises(DataError, match=message):
            open_source(place)


def test_the_index_is_made_once(server: FileServer) -> None:
    first = open_source(f"{server.url}/{PATTERN}")
    assert len(_blocks_of(server.requests)) == 4  # shards of one block each
    before = len(server.requests)
    again = open_source(f"{server.url}/{PATTERN}")
    assert same(first, again)
    assert _blocks_of(server.requests[before:]) == []
    (server.folder / "train-0002.tar").write_bytes((server.folder / "train-0001.tar").read_bytes())
    assert open_source(f"{server.url}/{PATTERN}").read(100) == first.read(50)


def test_keys_are_those_of_local_shards(server: FileServer, written: Path) -> None:
    remote, local = (open_data(f"{root}/{PATTERN}", seed=1) for root in (server.url, written))
    assert remote.record == local.record
    assert open_data(f"{server.url}/{PATTERN}", record=local.record).record == local.record


def test_a_manifest_of_urls(server: FileServer, tmp_path: Path) -> None:
    rows = [f"{server.url}/images/{number}.png,{number % 3}" for number in range(9)]
    (tmp_path / "urls.csv").write_text("\n".join(["path,label", *rows, f"{server.url}/images/gone.png,1"]))
    source = open_source(tmp_path / "urls.csv")
    assert [source.read(number) for number in range(9)] == [
        (server.folder / "images" / f"{number}.png").read_bytes() for number in range(9)
    ]
    before = len(server.requests)
    assert source.read(3) == (server.folder / "images" / "3.png").read_bytes()
    assert len(server.requests) == before
    with pytest.raises(DataError, match=r"images/gone\.png does not exist; correct the URL") as raised:
        source.read(9)
    assert not isinstance(raised.value, StorageError)  # one missing image is skipped like any other


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_make_the_same_batches(
    server: FileServer, written: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAIL_REMOTE_CACHE_GB", "0")  # so that every worker downloads

    def batches(root: object, workers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        source = open_data(f"{root}/{PATTERN}").train
        data = Training(source, Stream(len(source), 16, seed=3), Preprocess(size=(16, 16)), Augmentation())
        made = training_batches(data, 0, 12, workers=workers, method=method if workers else None)
        return [(batch.pixels.clone(), batch.labels.clone()) for batch in made]

    server.fail_every = 10
    remote, local = batches(server.url, 2), batches(written, 0)
    for one, other in zip(remote, local, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_without_a_cache_single_images_are_downloaded(
    server: FileServer, written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VITRAIL_REMOTE_CACHE_GB", "0")
    remote = open_source(f"{server.url}/{PATTERN}")
    before = gets(server)
    assert same(remote, open_source(f"{written}/{PATTERN}"))
    assert gets(server) - before == len(remote)
    assert not (tmp_path / "cache" / "remote").exists()


def test_a_shard_that_changes_during_a_run_stops_it(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_REMOTE_CACHE_GB", "0")
    source = open_data(f"{server.url}/{PATTERN}").train
    data = Training(source, Stream(len(source), 16), Preprocess(size=(16, 16)), Augmentation(), bad_files="skip")
    made = training_batches(data, 0, 1000, workers=0)
    next(made)
    for path in server.folder.glob("*.tar"):
        path.write_bytes(path.read_bytes() + bytes(10_240))
    monkeypatch.setattr("vitrail.data.remote.stored_files.CHECK_EVERY", 0.0)
    with pytest.raises(StorageError, match=r"train-000\d\.tar has changed while it was read"):
        list(made)


def test_listing_for_predict(server: FileServer) -> None:
    (server.folder / "urls.csv").write_text(f"path\nimages/3.png\n{server.url}/images/4.png\nftp://x.org/5.png\n")
    contents = {
        "train-0000.tar": 50, PATTERN: 200, "digits.parquet": 60, "list.csv": 60, "images/7.png": 1, "urls.csv": 3,
    }  # fmt: skip
    for place, count in contents.items():
        items = list(list_items([f"{server.url}/{place}"]))
        assert len(items) == count
        assert items[0].read()
    assert items[1].read() == (server.folder / "images" / "4.png").read_bytes()
    assert items[2].error is not None


def saved_steps(folder: Path) -> int:
    return max((int(path.name) for path in (folder / "state").glob("[0-9]*")), default=0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "last" / "model.safetensors")


def equal(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_a_run_on_remote_shards_is_bit_identical(server: FileServer, written: Path, tmp_path: Path) -> None:
    tiny_run(f"{written}/{PATTERN}", tmp_path / "local")
    server.fail_every = 10
    tiny_run(f"{server.url}/{PATTERN}", tmp_path / "remote")
    assert equal(tmp_path / "local", tmp_path / "remote")


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["http", "s3"])
def test_a_killed_run_resumes_bit_identically(
    storage: str, server: FileServer, bucket: dict[str, str], written: Path, tmp_path: Path
) -> None:
    straight = tiny_run(f"{written}/{PATTERN}", tmp_path / "local").folder
    place = f"s3://photos/{PATTERN}" if storage == "s3" else f"{server.url}/{PATTERN}"
    settings = [word for change in (*TINY, "save_minutes=0") for word in ("--set", change)]
    words = ["train", place, "--run", str(tmp_path / "run"), "--device", "cpu", "--workers", "2", *settings]
    environment = {**os.environ, **bucket}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = forked_commands.start(*words, environment=environment, **quiet)
    while saved_steps(tmp_path / "run") < 3:
        time.sleep(0.005)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = forked_commands.run(*words, environment=environment, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from step" in resumed.stderr
    assert equal(tmp_path / "run", straight)


@pytest.mark.slow
def test_the_command_line(server: FileServer, tmp_path: Path) -> None:
    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **more}
        return forked_commands.run(*words, environment=environment, timeout=300)

    settings = [word for change in TINY for word in ("--set", change)]
    folder = str(tmp_path / "run")
    trained = run("train", f"{server.url}/{PATTERN}", "--run", folder, "--device", "cpu", "--workers", "0", *settings)
    assert trained.returncode == 0, trained.stderr
    best = f"{folder}/best"
    for words in (
        ("predict", best, f"{server.url}/digits.parquet", "--device", "cpu"),
        ("eval", best, f"{server.url}/train-0000.tar", "--device", "cpu"),
        ("embed", best, f"{server.url}/train-0000.tar", "--device", "cpu", "--output", str(tmp_path / "f.npy")),
        ("check", f"{server.url}/{PATTERN}"),
    ):
        done = run(*words)
        assert done.returncode == 0, (words, done.stderr)
    server.status = 403
    refused = run("train", f"{server.url}/{PATTERN}", "--run", folder, "--device", "cpu", *settings)
    assert refused.returncode == 2
    assert "is denied: HTTP status 403; check the credentials and permissions" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_a_dataset_of_a_hub(written: Path, tmp_path: Path) -> None:
    """In a separate process: huggingface_hub reads its settings on import."""
    with hub_server(written, "org/digits") as endpoint:
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        for place, images in {"train-*.tar": 200, PATTERN: 200, "digits.parquet": 60}.items():
            done = forked_commands.run("check", f"hf://datasets/org/digits/{place}", environment=environment)
            assert done.returncode == 0, done.stderr
            assert f"{images} images" in done.stdout
        gone = forked_commands.run("check", "hf://datasets/org/digits/none.tar", environment=environment)
        assert gone.returncode == 2
        assert "hf://datasets/org/digits/none.tar does not exist; correct the URL" in gone.stderr


SECRET = "token=SECRET"


@pytest.mark.parametrize("place", [PATTERN, "digits.parquet", "list.csv"])
def test_secrets_stay_out_of_names_and_keys(server: FileServer, written: Path, place: str) -> None:
    login = server.url.replace("//", "//me:SECRET@")
    plain, local = open_data(f"{server.url}/{place}"), open_data(written / place)
    signed, new_signature = (open_data(f"{login}/{place}?{token}") for token in (SECRET, "token=SECRET2"))
    assert "SECRET" not in str(signed.record)
    assert signed.record == new_signature.record == plain.record == local.record  # so a run can be resumed
    names = [signed.train.name(index) for index in range(len(signed.train))]
    assert len(set(names)) == len(names)
    assert "SECRET" not in str(names)


def test_signed_urls_in_a_manifest(server: FileServer, tmp_path: Path) -> None:
    for name, url in {"signed": "images/{}.png?" + SECRET, "by-query": "images/1.png?number={}&" + SECRET}.items():
        rows = [f"{server.url}/{url.format(number)},{number % 3}" for number in range(30)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["path,label", *rows]))
    signed, by_query = (open_data(tmp_path / f"{name}.csv", per_class=3) for name in ("signed", "by-query"))
    assert all(key.endswith(".png") for key in signed.record["names"]["train"])
    keys = by_query.record["names"]["train"]
    assert len(set(keys)) == len(keys) == 9
    assert "SECRET" not in str([signed.record, by_query.record])


def test_names_of_predictions_have_no_signature(server: FileServer) -> None:
    places = [f"{server.url}/{name}?{SECRET}" for name in ("train-0001.tar", "digits.parquet")]
    names = [item.name for item in list_items(places)]
    assert len(set(names)) == len(names) == 110
    assert b"SECRET" not in b"".join(names)


def test_an_index_of_shards_without_a_version_is_not_kept(server: FileServer) -> None:
    server.versions = False
    place, shard = f"{server.url}/train-0001.tar", server.folder / "train-0001.tar"
    first = open_source(place).read(0)
    shard.write_bytes((server.folder / "train-0002.tar").read_bytes())
    assert open_source(place).read(0) != first


def test_a_run_on_a_manifest_of_urls_asks_for_no_stamps(server: FileServer, tmp_path: Path) -> None:
    splits = open_data(f"{server.url}/list.csv")
    before = len(server.requests)
    assert check_stamps(tmp_path, splits) is None
    assert check_stamps(tmp_path, splits) is None
    assert len(server.requests) == before


def test_a_new_version_of_an_image_is_cached_anew(server: FileServer, tmp_path: Path) -> None:
    place, size = f"{server.url}/list.csv", CacheSize(8, 1)
    before = cached(open_source(place), size, folder=tmp_path / "pixels")
    (server.folder / "images" / "0.png").write_bytes((server.folder / "images" / "1.png").read_bytes())
    after = cached(open_source(place), size, folder=tmp_path / "pixels")
    assert (before.read(0) != after.read(0)).any()
    assert (after.read(0) == after.read(1)).all()


def test_images_are_not_bad_because_storage_fails(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystems, "ATTEMPTS", 1)
    splits = open_data(f"{server.url}/list.csv")
    server.status = 503
    for reads in (
        lambda: cached(splits.train, CacheSize(8, 1), folder=tmp_path / "pixels"),
        lambda: check_data(splits, size=8),
        lambda: describe_data(splits.train),
        lambda: digests_of(splits.train),
        lambda: choose_images(f"{server.url}/list.csv", record=splits.record),
    ):
        with pytest.raises(StorageError, match=r"HTTP status 503 \(1 attempts\); check the server"):
            reads()


def test_a_remote_manifest_cannot_name_local_files(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "own.png").write_bytes((server.folder / "images" / "0.png").read_bytes())
    (server.folder / "evil.csv").write_text(f"path,label\nimages/1.png,a\n{tmp_path}/own.png,b\n")
    message = r"own\.png is a path on this machine, in a remote manifest; list a URL"
    with pytest.raises(DataError, match=message):
        open_source(f"{server.url}/evil.csv")
    _, refused = list_items([f"{server.url}/evil.csv"])
    with pytest.raises(DataError, match=message):
        refused.read()
