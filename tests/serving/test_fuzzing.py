"""Fuzzing: requests generated from the OpenAPI document, and thousands of malformed uploads."""

import json
import os
import random
import signal
import socket
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, errors, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.support.live_server import Running, image, save_tiny, sent, server

from vitrail.serving.app import Service
from vitrail.serving.openapi import document
from vitrail.serving.settings import Settings

UPLOADS = 2000
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*jsonschema.*")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    bundle = save_tiny(tmp_path_factory.mktemp("bundles") / "m")
    with server(str(bundle), "--no-log-requests", "--body-limit", "4", "--pixel-limit", "2", patience=900) as running:
        yield running


# ── the OpenAPI document ──


def test_the_openapi_document_lists_every_route(tmp_path: Path) -> None:
    service_settings = Settings(models=[str(save_tiny(tmp_path / "m"))], device="cpu")
    described = document(service_settings)
    assert described == json.loads(json.dumps(described))
    paths = set(described["paths"])
    routes = set(Service(service_settings).routes)
    assert paths == routes - {"/", "/openapi.json"}


@pytest.mark.slow
def test_fuzzing_the_openapi_document(running: Running) -> None:
    """Valid and invalid requests get a documented response, never a 5xx."""
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    outcomes: Counter[str] = Counter()

    for operation in schema.get_all_operations():
        result = operation.ok()
        if result.path == "/v1/models/reload":
            continue  # reads files; tested elsewhere

        @settings(
            max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate],
            database=None,
        )  # fmt: skip
        def check(case: schemathesis.Case) -> None:
            response = case.call(timeout=30)
            outcomes[f"{case.path} {response.status_code}"] += 1
            assert response.status_code < 500, response.text
            case.validate_response(
                response, checks=[response_schema_conformance, status_code_conformance, content_type_conformance]
            )
            if response.status_code >= 400 and response.headers.get("content-type") == "application/json":
                assert set(json.loads(response.text)) == {"error", "request_id"}

        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            try:
                strategy = result.as_strategy(generation_mode=mode)
            except Exception:  # no invalid request exists without parameters
                continue
            _run_strategy(strategy, check)
    for path in ("/v1/predict", "/v1/embed", "/v1/explain"):
        assert sum(count for outcome, count in outcomes.items() if outcome.startswith(path)) > 100, outcomes
    assert running.process.poll() is None


def _run_strategy(strategy: SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    try:
        given(strategy)(check)()
    except errors.Unsatisfiable:
        return


# ── uploads ──


def resident(process: int) -> int:
    """Return the resident memory of a process in megabytes."""
    for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024
    raise AssertionError("no VmRSS")


def png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


BOMB = png(1400, 1400, zlib.compress(bytes(1400 * (1400 * 3 + 1))))
LIES = png(60_000, 60_000, zlib.compress(bytes(50_000_000)))


def malformed(chance: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """Return a request that is malformed in one of many ways."""
    kind = chance.choice(["JPEG", "PNG", "WEBP", "GIF", "BMP"])
    good = image(kind, (chance.randint(1, 80), chance.randint(1, 80)), seed=chance.randint(0, 9))
    path = chance.choice(["/v1/predict", "/v1/embed", "/v1/explain?method=rollout", "/v1/explain"])
    image_type, coded = {"content-type": f"image/{kind.lower()}"}, {"content-type": "application/json"}
    form = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
    flipped = bytearray(good)
    for _ in range(chance.randint(1, 20)):
        flipped[chance.randrange(len(flipped))] = chance.randrange(256)
    return path, *chance.choice(
        [
            (good[: chance.randrange(len(good))], image_type),
            (bytes(flipped), image_type),
            (chance.randbytes(chance.randint(0, 3000)), image_type),
            (good[:4] + chance.randbytes(500), image_type),
            (BOMB, image_type),
            (LIES, image_type),
            (part + good[: chance.randrange(len(good))] + b"\r\n--b--\r\n", form),
            (part + good, form),
            (chance.randbytes(300), form),
            (part.replace(b"name", chance.randbytes(4)) + good + b"\r\n--b--\r\n", form),
            (json.dumps({"images": [chance.choice(["", "AAAA", "%", "x" * 999, 7, None])]}).encode(), coded),
            (b'{"images": ' + b"[" * chance.randint(1, 5000), coded),
            (b'{"top": 1' + b"0" * chance.randint(1, 5000) + b', "images": ["AAAA"]}', coded),
            (bytes(5_000_000), image_type),
            (good, {"content-type": chance.choice(["text/html", "image/", "é", "a" * 5000, "multipart/form-data"])}),
            (good, {**image_type, "x-long": "y" * chance.choice([1000, 60_000, 200_000])}),
            (good, {**image_type, "content-encoding": "gzip"}),
            (good, {**image_type, "authorization": "Bearer " + "z" * 5000}),
        ]
    )


@pytest.mark.slow
def test_malformed_uploads_do_no_harm(running: Running) -> None:
    chance = random.Random(7)
    requests = [malformed(chance) for _ in range(UPLOADS)]
    outcomes: Counter[str] = Counter()
    with httpx.Client(base_url=running.url, timeout=60) as client, ThreadPoolExecutor(8) as pool:

        def send(request: tuple[str, bytes, dict[str, str]]) -> str:
            path, body, headers = request
            raw = [(name.encode(), value.encode("utf-8")) for name, value in headers.items()]
            try:
                return str(client.post(path, content=body, headers=raw).status_code)
            except httpx.TransportError as error:  # overlong headers close the connection
                return f"closed: {type(error).__name__}"

        outcomes.update(pool.map(send, requests[:400]))
        settled = resident(running.process.pid)  # memory is stable after the first hundreds
        outcomes.update(pool.map(send, requests[400:]))
        assert sent(client, image()).status_code == 200
    half_requests(running.url)
    assert running.process.poll() is None
    assert not [outcome for outcome in outcomes if outcome.startswith("5")], outcomes
    assert {"200", "400", "413", "415", "422"} <= set(outcomes), outcomes
    assert sum(count for outcome, count in outcomes.items() if outcome.startswith("closed")) < UPLOADS / 10
    assert resident(running.process.pid) < settled + 100, (settled, resident(running.process.pid))
    assert not [line for line in running.log if "Traceback" in line or '"fault"' in line]


def half_requests(url: str) -> None:
    """Send invalid or incomplete HTTP, and disconnect."""
    host, port = url.removeprefix("http://").split(":")
    for message in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 100000\r\n\r\n\x89PNG",
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET " + b"/a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(message)
    with httpx.Client(base_url=url, timeout=30) as client:
        assert client.get("/healthz").status_code == 200


@pytest.mark.slow
def test_overload_gets_503_and_loses_nothing(tmp_path: Path) -> None:
    bundle = save_tiny(tmp_path / "m")
    with server(str(bundle), "--queue", "4", "--batch", "1", "--no-log-requests") as running:
        limits = httpx.Limits(max_connections=64)
        with httpx.Client(base_url=running.url, timeout=60, limits=limits) as client, ThreadPoolExecutor(64) as pool:
            outcomes = Counter(pool.map(lambda n: sent(client, image(seed=n)).status_code, range(1000)))
        assert set(outcomes) == {200, 503}
        assert sum(outcomes.values()) == 1000
        os.kill(running.process.pid, signal.SIGTERM)
        assert running.process.wait(20) == 0
