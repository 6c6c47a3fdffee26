"""Real servers on the loopback interface: HTTP with range requests and faults on demand, and S3 by moto."""

import contextlib
import io
import json
import os
import re
import tarfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.sources.source import digits

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 2**20


@dataclass
class FileServer:
    """Files of a folder over HTTP/1.1, with keep-alive and range requests."""

    folder: Path
    fail_every: int = 0
    """Every n-th request fails with status 503."""
    stall_every: int = 0
    """Every n-th request gets half of its bytes, then nothing for a long time."""
    ranges: bool = True
    head: bool = True
    """Whether HEAD requests are allowed; a signed URL of S3 is for GET requests only."""
    versions: bool = True
    """Whether responses have an ETag and a time of the last change."""
    status: int = 0
    """If set, the status code of every response."""
    reason: tuple[str, str] | None = None
    """Code and message of an S3 error; as at S3, in the bodies of responses to GET requests only."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of every request."""
    sent: int = 0
    """Bytes of files that were written to connections."""
    hub: str = ""
    """If set, the name of a dataset: the files are served as by the Hugging Face Hub."""
    url: str = ""
    closing: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self) -> Iterator["FileServer"]:
        """Serve until the end of the block."""
        handler = type("Handler", (_Handler,), {"files": self})
        server = _Server(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            self.closing.set()
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: Any) -> None:
        """Clients that disconnect are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    files: FileServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._respond(body=False)

    def do_GET(self) -> None:
        self._respond(body=True)

    def _respond(self, *, body: bool) -> None:
        files = self.files
        files.requests.append((self.command, self.path, self.headers.get("Range", "")))
        number = len(files.requests)
        if files.hub and self.path.startswith("/api/datasets/"):
            self._describe()
            return
        path = files.folder / self.path.partition("?")[0].lstrip("/").removeprefix(
            f"datasets/{files.hub}/resolve/{COMMIT}/"
        ).removeprefix(f"datasets/{files.hub}/resolve/main/")
        if self.command == "HEAD" and not files.head:
            self._empty(403)
            return
        if files.status or (files.fail_every and not number % files.fail_every):
            self._refuse(files.status or 503)
            return
        if not path.is_file():
            self._empty(404)
            return
        size = path.stat().st_size
        start, stop = 0, size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match and files.ranges:
            start, stop = int(match[1]), min(int(match[2]) + 1, size)
            if start >= size:
                self._empty(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(stop - start))
        if files.versions:
            self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
            self.send_header("ETag", f'"{size}-{path.stat().st_mtime_ns}"')
        self.end_headers()
        if not body:
            return
        with path.open("rb") as file:
            if files.stall_every and not number % files.stall_every:
                file.seek(start)
                self.wfile.write(file.read((stop - start) // 2))
                self.wfile.flush()
                files.closing.wait(60)
                self.close_connection = True
                return
            file.seek(start)
            while start < stop:
                self.wfile.write(file.read(min(PIECE, stop - start)))
                start += PIECE
                files.sent += PIECE

    def _describe(self) -> None:
        """Describe a dataset, or list its files."""
        if not self.path.startswith(f"/api/datasets/{self.files.hub}"):
            self._empty(404)
            return
        paths = sorted(path for path in self.files.folder.iterdir() if path.is_file())
        listing: object = [
            {
                "type": "file",
                "path": path.name,
                "size": path.stat().st_size,
                "oid": f"{zlib.crc32(path.read_bytes()):040x}",
            }
            for path in paths
        ]
        if "/tree/" not in self.path:
            listing = {"id": self.files.hub, "sha": COMMIT, "private": False, "tags": [], "siblings": []}
        content = json.dumps(listing).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int) -> None:
        if self.files.reason is None or self.command == "HEAD":
            self._empty(status)
            return
        code, message = self.files.reason
        content = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _empty(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextlib.contextmanager
def s3_server(bucket: str, folder: Path) -> Iterator[dict[str, str]]:
    """Serve the files of a folder as a bucket; yield the environment that a client needs."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    client = boto3.client(
        "s3", endpoint_url=environment["AWS_ENDPOINT_URL"], aws_access_key_id="test", aws_secret_access_key="test",
        region_name="us-east-1",
    )  # fmt: skip
    try:
        client.create_bucket(Bucket=bucket)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            client.put_object(Bucket=bucket, Key=path.relative_to(folder).as_posix(), Body=path.read_bytes())
        client.close()
        yield environment
    finally:
        server.stop()


@contextlib.contextmanager
def only_known_keys(endpoint: str) -> Iterator[None]:
    """Let moto refuse access keys that it did not issue."""

    def allow(requests: str) -> None:
        url, plain = f"{endpoint}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        with urllib.request.urlopen(urllib.request.Request(url, requests.encode(), plain, method="POST")) as response:
            response.read()

    allow("0")
    try:
        yield
    finally:
        allow("inf")


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Encode an image as PNG."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write_shards(folder: Path, images: int = 200, shards: int = 4) -> list[Path]:
    """Write handwritten digits as tar shards, train-0000.tar and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    source, paths = digits(), []
    for shard in range(shards):
        path = folder / f"train-{shard:04}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(shard, images, shards):
                content = {"png": png(source.images[number]), "cls": str(int(source.labels[number])).encode()}
                for suffix, data in content.items():
                    entry = tarfile.TarInfo(f"{number:05}.{suffix}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
        os.utime(path, (time.time() - 3600,) * 2)
        paths.append(path)
    return paths


@contextlib.contextmanager
def hub_server(folder: Path, name: str) -> Iterator[str]:
    """Serve the files of a folder as a dataset of a small Hugging Face Hub; yield its endpoint."""
    with FileServer(folder).running() as server:
        server.hub = name
        yield server.url
