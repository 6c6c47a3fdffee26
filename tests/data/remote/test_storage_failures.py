"""Storage that fails or refuses access, on real servers on loopback: one sentence, exit code 2, and no lost rows."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import forked_commands
from tests.support.checkpoints import tiny_bundle
from tests.support.remote_servers import FileServer, only_known_keys, png, s3_server

import vitrail
from vitrail.data.remote import filesystems
from vitrail.data.sources.source import digits
from vitrail.errors import StorageError
from vitrail.inference.bulk_prediction import Summary
from vitrail.runtime import OnProgress

IMAGES = 10
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(filesystems, "FIRST_DELAY", 0.001)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "bundle"
    tiny_bundle().save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, source = tmp_path_factory.mktemp("images"), digits()
    for number in range(IMAGES):
        (folder / f"{number}.png").write_bytes(png(source.images[number]))
    (folder / "1.png").write_bytes(b"not an image")
    return folder


@pytest.fixture
def server(images: Path) -> Iterator[FileServer]:
    with FileServer(images).running() as server:
        yield server


@pytest.fixture(scope="module")
def bucket(images: Path) -> Iterator[dict[str, str]]:
    with s3_server("photos", images) as environment:
        yield environment


@pytest.fixture
def listed(server: FileServer, tmp_path: Path) -> str:
    """Images at URLs: one is broken, one does not exist."""
    urls = [f"{server.url}/{number}.png" for number in range(IMAGES)]
    urls[9] = f"{server.url}/gone.png"
    (tmp_path / "list.csv").write_text("\n".join(["path", *urls]))
    return str(tmp_path / "list.csv")


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return forked_commands.run(*words, environment={**kept, **environment}, timeout=120)


def assert_one_sentence(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("vitrail: ")]
    assert words in line
    assert "Traceback" not in done.stderr


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("workers", "status"), [(None, 403), pytest.param(0, 503, marks=SLOW), pytest.param(2, 503, marks=SLOW)]
)
def test_predict_stops_keeps_its_rows_and_resumes(
    bundle: str, listed: str, server: FileServer, tmp_path: Path, workers: int | None, status: int
) -> None:
    output = tmp_path / "rows.jsonl"

    def break_it(*_: object) -> None:
        server.status = status

    def predict(*, resume: bool, on_progress: OnProgress | None = None) -> Summary:
        return vitrail.predict(
            bundle,
            listed,
            output=output,
            device="cpu",
            workers=workers,
            batch=1,
            resume=resume,
            on_progress=on_progress,
        )

    with pytest.raises(StorageError, match=rf"\d\.png .*HTTP status {status}.*; add --resume to keep the rows in .*l$"):
        predict(resume=False, on_progress=break_it)
    kept = rows(output)
    assert 1 <= len(kept) < IMAGES
    server.status = 0
    summary = predict(resume=True)
    assert (summary.images, summary.bad, summary.earlier) == (IMAGES, 2, len(kept))
    assert rows(output)[: len(kept)] == kept
    errors = {number: row["error"] for number, row in enumerate(rows(output)) if row.get("error")}
    assert sorted(errors) == [1, 9]
    assert "gone.png does not exist; correct the URL" in str(errors[9])


def test_embed_stops_and_leaves_no_file(bundle: str, listed: str, server: FileServer, tmp_path: Path) -> None:
    result = vitrail.embed(bundle, listed, tmp_path / "all.npy", device="cpu", workers=0, batch=4)
    assert (result.shape[0], len(result.bad)) == (IMAGES - 2, 2)
    server.status = 403
    done = command("embed", bundle, listed, "--output", str(tmp_path / "rows.npy"), VITRAIL_CACHE=str(tmp_path / "new"))
    assert_one_sentence(done, "is denied: HTTP status 403; check the credentials and permissions")
    assert not (tmp_path / "rows.npy").exists()


def test_a_shard_that_cannot_be_reached_is_not_a_bad_image(bundle: str, server: FileServer) -> None:
    server.status = 403
    done = command("predict", bundle, f"{server.url}/x.tar", "--device", "cpu")
    assert_one_sentence(done, "x.tar is denied: HTTP status 403; check the credentials and permissions")


def test_a_bucket_that_does_not_exist(bundle: str, bucket: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path\ns3://photos/0.png\ns3://my-bucket/0.png\n")
    stopped = command("predict", bundle, str(tmp_path / "list.csv"), "--device", "cpu", **bucket)
    assert_one_sentence(stopped, "s3://my-bucket/0.png does not exist (The specified bucket does not exist); correct")
    (tmp_path / "list.csv").write_text("path\ns3://photos/0.png\ns3://photos/no-bucket.png\n")
    output = tmp_path / "rows.jsonl"
    command("predict", bundle, str(tmp_path / "list.csv"), "--device", "cpu", "--output", str(output), **bucket)
    first, second = rows(output)
    assert first.get("error") is None
    assert second["error"] == "s3://photos/no-bucket.png does not exist; correct the URL"


# ── credentials ──


@pytest.mark.parametrize(
    "words", [pytest.param(("check", "s3://photos/*.tar"), marks=SLOW), ("predict", "s3://photos/0.png")]
)
def test_refused_keys(words: tuple[str, str], bundle: str, bucket: dict[str, str]) -> None:
    model = [bundle] if words[0] == "predict" else []
    with only_known_keys(bucket["AWS_ENDPOINT_URL"]):
        done = command(words[0], *model, words[1], **bucket)
    reason = "The AWS Access Key Id you provided does not exist in our records"
    assert_one_sentence(done, f"access to {words[1]} is denied: {reason}; check the credentials and permissions")


def test_no_credentials(bundle: str, bucket: dict[str, str], tmp_path: Path) -> None:
    without = {name: value for name, value in bucket.items() if "KEY" not in name} | {"HOME": str(tmp_path)}
    done = command("predict", bundle, "s3://photos/0.png", **without)
    assert_one_sentence(
        done, "access to s3://photos/0.png is denied: Unable to locate credentials; check the credentials"
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ExpiredToken", "The provided token has expired"),
        pytest.param("InvalidToken", "The provided token is malformed or otherwise invalid", marks=SLOW),
    ],
)
def test_a_token_that_is_not_valid(
    code: str, message: str, bundle: str, bucket: dict[str, str], server: FileServer
) -> None:
    server.status, server.reason = 400, (code, f"{message}.")
    environment = {**bucket, "AWS_ENDPOINT_URL": server.url, "AWS_SESSION_TOKEN": "old"}
    done = command("predict", bundle, "s3://photos/0.png", **environment)
    assert_one_sentence(
        done, f"access to s3://photos/0.png is denied: {message}; check the credentials and permissions"
    )
    assert len(server.requests) < 6  # not retried
