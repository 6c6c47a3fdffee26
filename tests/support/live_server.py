"""A real server in a separate process on the loopback interface, and helpers to send requests."""

import contextlib
import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from PIL import Image
from tests.support import forked_commands

import vitrail
from vitrail import Bundle, Preprocess, ViTConfig


@dataclass
class Running:
    """A ready server."""

    process: forked_commands.Process
    url: str
    log: list[str] = field(default_factory=list)


@contextlib.contextmanager
def server(
    *words: str, environment: dict[str, str] | None = None, patience: float = 120, descriptors: int | None = None
) -> Iterator[Running]:
    """Run `vitrail serve` until the end of the block; the block may stop it earlier.

    In float32 unless the settings say otherwise, so that predictions can be compared exactly.
    """
    few = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors}))\n"
    process = forked_commands.start(
        *("serve", "--precision", "float32", *words, "--port", "0", "--device", "cpu"),
        code=("" if descriptors is None else few) + forked_commands.COMMAND,
        environment={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()))
    watch = threading.Timer(patience, process.kill)
    watch.start()
    reader.start()
    try:
        output = process.stdout.readline()
        assert output.startswith("ready after "), "".join(log)
        yield Running(process, output.split(" at ")[1].strip().rstrip("/"), log)
    finally:
        watch.cancel()
        if process.poll() is None:
            process.terminate()
        process.wait(60)  # twice the default grace period
        reader.join()
        process.stdout.close()
        process.stderr.close()


def save_tiny(folder: Path, *, seed: int = 0, classes: tuple[str, ...] | None = ("cat", "dog", "bird")) -> Path:
    """Write a bundle of a tiny model, which runs in a millisecond; the seed sets its weights."""
    torch.manual_seed(seed)
    model = vitrail.create(ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, classes=3, registers=1))
    with torch.no_grad():
        model.head.weight.normal_()
    Bundle(model.eval(), Preprocess(size=(32, 32)), classes).save(folder, overwrite=True)
    return folder


def image(kind: str = "PNG", size: tuple[int, int] = (40, 30), seed: int = 0) -> bytes:
    """Return an image file of noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=generator)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, kind)
    return file.getvalue()


def sent(client: httpx.Client, content: bytes, path: str = "/v1/predict") -> httpx.Response:
    """Send an image as the body."""
    return client.post(path, content=content, headers={"content-type": "image/png"})


def connect(running: Running, data: bytes = b"") -> socket.socket:
    """Connect and send data, with HOST replaced by the server's host."""
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    if data:
        connection.sendall(data.replace(b"HOST", f"{host}:{port}".encode()))
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def wait_until(condition: object, seconds: float = 10) -> None:
    """Poll until a condition holds."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened in time"
        time.sleep(0.02)
