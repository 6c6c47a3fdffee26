"""Models on a hub: a small hub on loopback, used through huggingface_hub."""

import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support import forked_commands
from tests.support.peers import import_peer, scramble

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.locate import HubName, parse
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    module = import_peer("transformers")
    options = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 96}
    config = module.ViTConfig(**options, image_size=32, patch_size=8, id2label={0: "cat", 1: "dog"})
    scramble(module.ViTForImageClassification(config)).save_pretrained(root / "org" / "vit")
    model = ViT(ViTConfig(image_size=(32, 32), patch_size=(8, 8), width=64, depth=1, heads=1, classes=2))
    Bundle(model, Preprocess(size=(32, 32)), ("left", "right")).save(root / "timm" / "vit_micro.tag")
    (root / "org" / "empty").mkdir()
    (root / "org" / "empty" / "config.json").write_text("{}")
    return root


@pytest.fixture(scope="module")
def endpoint(repositories: Path) -> Iterator[str]:
    class Hub(BaseHTTPRequestHandler):
        def respond(self, body: bool) -> None:
            parts = self.path.strip("/").split("/")
            folder = repositories / "/".join(parts[:2])
            if not folder.is_dir():
                return self.fail("RepoNotFound")
            if parts[3] not in ("main", COMMIT):
                return self.fail("RevisionNotFound")
            file = folder / "/".join(parts[4:])
            if not file.is_file():
                return self.fail("EntryNotFound")
            content = file.read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)
            return None

        def fail(self, code: str) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self) -> None:
            self.respond(body=False)

        def do_GET(self) -> None:
            self.respond(body=True)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def inspect(source: str, endpoint: str, cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run in a separate process, because huggingface_hub reads its settings on import; forks have not imported it."""
    environment = {
        **os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "NO_COLOR": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more,
    }  # fmt: skip
    return forked_commands.run("inspect", source, environment=environment)


@pytest.mark.slow
def test_fetch_then_offline_then_unreachable(endpoint: str, tmp_path: Path) -> None:
    done = inspect("hf:org/vit", endpoint, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "hf:org/vit, transformers" in done.stdout
    assert "cat, dog" in done.stdout
    offline = inspect("hf:org/vit", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    missing = inspect("hf:org/other", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert missing.returncode == 2
    assert "could not be reached for org/other" in missing.stderr
    assert "the cache has org/vit" in missing.stderr
    assert "Traceback" not in missing.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "train"])
def test_without_a_connection_there_is_one_error_line(command: str, tmp_path: Path) -> None:
    """Nothing listens on that port; the client's log of retries is silenced."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    name = "timm:vit_tiny_patch16_224.augreg_in21k"
    words = ("inspect", name) if command == "inspect" else ("train", "--from", name)
    done = forked_commands.run(*words, environment=environment, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert (
        "the hub could not be reached for timm/vit_tiny_patch16_224.augreg_in21k, and the cache is empty" in done.stderr
    )
    assert "download config.json and model.safetensors from http://127.0.0.1:9/timm/vit_tiny" in done.stderr
    assert "pass the folder instead of the name" in done.stderr


@pytest.mark.slow
def test_a_revision_and_timms_names(endpoint: str, tmp_path: Path) -> None:
    assert inspect(f"hf:org/vit@{COMMIT}", endpoint, tmp_path).returncode == 0
    timm = inspect("timm:vit_micro.tag", endpoint, tmp_path)
    assert timm.returncode == 0, timm.stderr
    assert "left, right" in timm.stdout


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf:org/nothing", "the hub has no model org/nothing, or it is private"),
        ("hf:org/vit@v9", "but not its revision 'v9'"),
        ("hf:org/empty", "org/empty has no supported weights"),
        ("hf:just-a-name", "is not the name of a model on a hub; write hf:organisation/name"),
        ("hf:org/../../etc", "is not the name of a model on a hub"),
    ],
)
def test_unknown_hub_names(source: str, words: str, endpoint: str, tmp_path: Path) -> None:
    done = inspect(source, endpoint, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_names() -> None:
    assert parse("hf:a/b") == HubName("a/b", None)
    assert parse("hf:a/b@main") == HubName("a/b", "main")
    assert parse("timm:vit_base_patch16_224.augreg_in21k") == HubName("timm/vit_base_patch16_224.augreg_in21k", None)
    assert parse("runs/pets/best") is None
    assert parse("C:/models/vit.npz") is None
    with pytest.raises(CheckpointError, match="is not the name of a model"):
        parse("hf:a/b/c")
