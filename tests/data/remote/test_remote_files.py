"""Remote files against real servers on loopback: ranges, retries, stalls, changes, and the cache."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.support.remote_servers import FileServer

from vitrail.data.remote import block_cache, filesystems, stored_files
from vitrail.data.remote.block_cache import BlockCache
from vitrail.data.remote.filesystems import MissingFileError, Status, fetch, is_remote, path_in, public_url, status
from vitrail.data.remote.stored_files import RemoteFile, forget_versions, open_stored, read_remote
from vitrail.errors import ConfigError, DataError, StorageError
from vitrail.io import atomic_write

CONTENT = bytes(range(256)) * 400


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    for module in (block_cache, stored_files):
        monkeypatch.setattr(module, "BLOCK", 10_000)
    monkeypatch.setattr(filesystems, "FIRST_DELAY", 0.001)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.bin").write_bytes(CONTENT)
    with FileServer(tmp_path / "files").running() as server:
        yield server


def blocks(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache" / "remote").glob("*/*") if path.parent.name != "locks"]


def test_what_a_url_is() -> None:
    assert all(map(is_remote, ("s3://b/x.tar", b"gs://b/x", "HTTPS://h/x", "http://h", "hf://datasets/a/b")))
    assert not any(map(is_remote, ("/s3://x", "photos", "ftp://h/x", b"file:///x", "data:image/png;base64,")))
    assert path_in("https://h/x.tar?token=1") == "https://h/x.tar"
    assert path_in("s3://b/x?.tar") == "s3://b/x?.tar"
    assert public_url("https://me:secret@h/x.tar?token=1") == "https://h/x.tar"
    assert public_url("https://h/@me/x.tar") == "https://h/@me/x.tar"
    hashed = [public_url(f"https://h/x?id={number}", hashed=True) for number in (1, 2, 2)]
    assert len(set(hashed)) == 2
    assert hashed[0].startswith("https://h/x?")


def test_ranges_are_read_once_and_kept_in_blocks(server: FileServer, tmp_path: Path) -> None:
    with RemoteFile(f"{server.url}/a.bin") as file:
        assert file.status.size == len(CONTENT)
        for start, size in ((0, 10), (9_990, 30), (5_000, 40_000), (len(CONTENT) - 5, 100), (len(CONTENT), 10)):
            assert file.read_at(size, start) == CONTENT[start : start + size]
        requests = len(server.requests)
        assert file.read_at(45_000, 3) == CONTENT[3:45_003]
        assert len(server.requests) == requests
    assert sorted(path.stat().st_size for path in blocks(tmp_path)) == [2_400, *[10_000] * 5]
    ranges = [text for method, _, text in server.requests if method == "GET"]
    assert len(ranges) == len(set(ranges)) == 6


def test_a_remote_file_is_a_file_object(server: FileServer) -> None:
    with open_stored(f"{server.url}/a.bin", sequential=True) as file:
        assert (file.read(5), file.tell()) == (CONTENT[:5], 5)
        file.seek(-7, os.SEEK_END)
        assert file.read() == CONTENT[-7:]
        file.seek(0)
        assert file.readall() == CONTENT


def test_every_tenth_request_fails(server: FileServer) -> None:
    server.fail_every = 10
    for start in range(0, 100_000, 1_000):
        assert fetch(f"{server.url}/a.bin", start, 500) == CONTENT[start : start + 500]
    assert sum(not number % 10 for number in range(1, len(server.requests) + 1)) > 9


def test_a_stalled_request_is_repeated(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_REMOTE_TIMEOUT", "0.2")
    server.stall_every = 3
    for start in range(0, 5_000, 1_000):
        assert fetch(f"{server.url}/a.bin", start, 1_000) == CONTENT[start : start + 1_000]
    assert len(server.requests) >= 7


def test_a_server_that_only_stalls_is_an_error(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_REMOTE_TIMEOUT", "0.1")
    monkeypatch.setattr(filesystems, "ATTEMPTS", 3)
    server.stall_every = 1
    with pytest.raises(StorageError, match=r"a\.bin cannot be read: no data arrived in time \(3 attempts\); check"):
        fetch(f"{server.url}/a.bin", 0, 1_000)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (403, r"^access to http://\S+/a\.bin is denied: HTTP status 403; check the credentials and permissions$"),
        (400, r"^http://\S+/a\.bin cannot be read: HTTP status 400; correct the URL$"),
        (503, r"^http://\S+/a\.bin cannot be read: HTTP status 503 \(7 attempts\); check the server and the network, "),
    ],
)
def test_refusals(server: FileServer, code: int, message: str) -> None:
    server.status = code
    with pytest.raises(StorageError, match=message):
        fetch(f"{server.url}/a.bin", 0, 10)
    with pytest.raises(StorageError, match=message):
        status(f"{server.url}/a.bin")


def test_missing_files_and_servers(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingFileError, match=r"^http://\S+/b\.bin does not exist; correct the URL$"):
        read_remote(f"{server.url}/b.bin")
    monkeypatch.setattr(filesystems, "ATTEMPTS", 2)
    with pytest.raises(StorageError, match=r"^http://127\.0\.0\.1:9/x cannot be read: .* \(2 attempts\); check the"):
        status("http://127.0.0.1:9/x")
    monkeypatch.setitem(filesystems.PACKAGES, "gs", "no_such_package")
    filesystems._opened.cache_clear()
    with pytest.raises(DataError, match=r"^gs:// URLs need no_such_package: pip install 'vitrail\[remote\]'$"):
        status("gs://bucket/x.tar")


def test_a_server_without_ranges(server: FileServer) -> None:
    server.ranges = False
    with pytest.raises(DataError, match="ignores range requests; download the file, or use another server"):
        fetch(f"{server.url}/a.bin", 0, 10)
    assert fetch(f"{server.url}/a.bin", 0, len(CONTENT)) == CONTENT  # a file of one block


def test_a_large_file_of_a_server_without_ranges_is_not_downloaded(server: FileServer, tmp_path: Path) -> None:
    """It would have to fit into memory."""
    size, server.ranges = 2**28, False
    with (tmp_path / "files" / "large.bin").open("wb") as file:
        file.truncate(size)
    for start in (0, size // 2):
        with pytest.raises(DataError, match="ignores range requests"):
            fetch(f"{server.url}/large.bin", start, 1000)
    assert server.sent < size // 4  # what fits the buffers of the connections
    assert [request[0] for request in server.requests] == ["GET"] * 2


@pytest.mark.parametrize("gigabytes", ["1", "0"])
def test_a_file_that_changes_is_named(
    server: FileServer, gigabytes: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VITRAIL_REMOTE_CACHE_GB", gigabytes)
    monkeypatch.setattr(stored_files, "CHECK_EVERY", 0.0)
    url = f"{server.url}/a.bin"
    with RemoteFile(url) as file:
        assert file.read_at(10, 0) == CONTENT[:10]
        (server.folder / "a.bin").write_bytes(CONTENT[::-1])
        with pytest.raises(StorageError, match=r"a\.bin has changed while it was read; restore it, or rerun"):
            file.read_at(10, 50_000)
        assert len(blocks(tmp_path)) == (1 if gigabytes == "1" else 0)
        (server.folder / "a.bin").write_bytes(CONTENT[:100])  # the range is now outside the file
        with pytest.raises(StorageError, match="has changed while it was read"):
            file.read_at(10, 60_000)
        (server.folder / "a.bin").unlink()
        with pytest.raises(StorageError, match="was removed while it was read; restore it"):
            file.read_at(10, 60_000)


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache" / "remote", 100_000)
    for number in range(40):
        content = bytes([number]) * 10_000
        assert cache.read("key", number, 10_000, 5, 10, lambda content=content: content) == content[5:15]
        assert sum(path.stat().st_size for path in blocks(tmp_path)) <= 100_000
        for path in blocks(tmp_path):  # times in the order of use, on any file system
            os.utime(path, (time.time() - 1_000 + int(path.name),) * 2)
    kept = sorted(int(path.name) for path in blocks(tmp_path))
    assert kept == list(range(40 - len(kept), 40))
    assert len(kept) >= 8


def test_a_truncated_block_is_downloaded_again(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache" / "remote", 10**6)
    assert cache.read("key", 0, 4, 0, 4, lambda: b"good") == b"good"
    blocks(tmp_path)[0].write_bytes(b"go")
    assert cache.read("key", 0, 4, 0, 4, lambda: b"good") == b"good"
    assert blocks(tmp_path)[0].read_bytes() == b"good"


def test_a_full_disk_disables_the_cache_and_is_said_once(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block_cache._first_to_say.cache_clear()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
    try:
        with RemoteFile(f"{server.url}/a.bin") as file:
            for start in (0, 30_000, 60_000):
                assert file.read_at(20, start) == CONTENT[start : start + 20]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the cache of remote files" in said
    assert "could not be written: File too large; reading continues without it" in said
    assert blocks(tmp_path) == []
    ranges = [text for method, _, text in server.requests if method == "GET"]
    assert ranges[-1] == "bytes=60000-60019"  # single ranges from now on


def test_settings_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_REMOTE_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match=r"^VITRAIL_REMOTE_TIMEOUT is 'soon'; set a number, 0 or more$"):
        status("http://127.0.0.1:9/x")
    assert Status(1, 2) == (1, 2)


def test_a_file_without_a_version_is_not_cached(server: FileServer, tmp_path: Path) -> None:
    server.versions = False
    for content in (CONTENT, CONTENT[::-1]):  # of equal size, so that only the content differs
        (server.folder / "a.bin").write_bytes(content)
        with open_stored(f"{server.url}/a.bin") as file:
            assert file.readall() == content
        forget_versions()
        assert read_remote(f"{server.url}/a.bin", 100, 5) == content[5:105]
    assert blocks(tmp_path) == []


def test_a_new_version_is_read_once_data_is_opened_again(server: FileServer) -> None:
    forget_versions()
    assert read_remote(f"{server.url}/a.bin", 100) == CONTENT[:100]
    (server.folder / "a.bin").write_bytes(CONTENT[::-1])
    assert read_remote(f"{server.url}/a.bin", 100) == CONTENT[:100]  # a run reads one version
    forget_versions()
    assert read_remote(f"{server.url}/a.bin", 100) == CONTENT[::-1][:100]


def test_a_folder_that_another_process_removes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BlockCache(tmp_path, 10**6)
    removed: list[Path] = []

    def write_after_removal(path: Path) -> AbstractContextManager[Path]:
        if not removed:
            path.parent.rmdir()
            removed.append(path.parent)
        return atomic_write(path)

    monkeypatch.setattr(block_cache, "atomic_write", write_after_removal)
    assert cache.read("key", 0, 4, 0, 4, lambda: b"abcd") == b"abcd"
    assert removed
    assert cache.usable
    assert (tmp_path / "key" / "0").read_bytes() == b"abcd"


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 10**6)
    (tmp_path / "key").mkdir()
    old, new = tmp_path / "key" / ".1.abc.part", tmp_path / "key" / ".2.abc.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    cache.read("key", 0, 4, 0, 4, lambda: b"abcd")
    assert (old.exists(), new.exists()) == (False, True)


def test_a_url_that_is_signed_for_get_requests_only(server: FileServer) -> None:
    server.head = False
    with open_stored(f"{server.url}/a.bin?signature=1") as file:
        assert file.readall() == CONTENT
