"""A server under bounded attacks on the loopback interface: valid requests are still served within a second."""

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import httpx
import pytest
from tests.support.hostile_images import jpeg_of_scans, png_chunk, png_of_zeros
from tests.support.live_server import Running, image, save_tiny, server

pytestmark = pytest.mark.slow

SOON = 2.0
"""Seconds within which a valid request is served during an attack."""
TINY = image("PNG", (8, 8))


class Client:
    """A minimal client with one keep-alive connection."""

    def __init__(self, url: str) -> None:
        self.host, port = url.removeprefix("http://").split(":")
        self.host_line = f"Host: {self.host}:{port}\r\n".encode()
        self.socket = socket.create_connection((self.host, int(port)), timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, line: bytes, body: bytes = b"") -> int:
        """Send a request and return the status."""
        head = b"Content-Type: image/png\r\nContent-Length: %d\r\n" % len(body) if body else b""
        self.socket.sendall(line + b" HTTP/1.1\r\n" + self.host_line + head + b"\r\n" + body)
        output = b""
        while b"\r\n\r\n" not in output:
            output += self._more()
        head, _, rest = output.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(rest) < length:
            rest += self._more()
        return int(head.split()[1])

    def _more(self) -> bytes:
        piece = self.socket.recv(65_536)
        if not piece:
            raise ConnectionError("the server has closed")
        return piece


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("bundles") / "m")


@pytest.fixture(scope="module")
def running(bundle: Path) -> Iterator[Running]:
    with server(str(bundle), "--grace", "3", patience=600) as running:
        yield running


def good(url: str, count: int = 20, pause: float = 0.1) -> list[float]:
    """Send valid requests, each on a new connection; return their latencies."""
    taken = []
    for _ in range(count):
        begun = time.monotonic()
        with Client(url) as client:
            assert client.ask(b"POST /v1/predict", TINY) == 200
        taken.append(time.monotonic() - begun)
        time.sleep(pause)
    return taken


@contextmanager
def attacked(*attacks: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run attacks in threads until the end of the block."""
    over = threading.Event()
    threads = [threading.Thread(target=attack, args=(over,)) for attack in attacks]
    for thread in threads:
        thread.start()
    time.sleep(1)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def limit(url: str) -> float:
    """Return the latency limit of a valid request: two seconds, or more if this machine is busy."""
    return max(SOON, 5 * max(good(url)))


def memory(process: int) -> int:
    """Return the memory of a process and its children in megabytes."""
    result = 0
    for one in (process, *map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())):
        with suppress(OSError):
            pages = int(Path(f"/proc/{one}/statm").read_text().split()[1])
            result += pages * os.sysconf("SC_PAGE_SIZE") // 2**20
    return result


# ── images ──


def test_small_jpegs_with_thousands_of_scans(running: Running) -> None:
    hostile, fake = jpeg_of_scans(5000), b"\xff\xd8\xff" + bytes(31_000_000)
    outcomes: Counter[int] = Counter()
    within, before, most = limit(running.url), memory(running.process.pid), 0

    def send(content: bytes) -> Callable[[threading.Event], None]:
        def attack(over: threading.Event) -> None:
            with httpx.Client(base_url=running.url, timeout=60) as client:
                while not over.is_set():
                    response = client.post("/v1/predict", content=content, headers={"content-type": "image/jpeg"})
                    outcomes[response.status_code] += 1
                    time.sleep(0.05)

        return attack

    with attacked(send(hostile), send(hostile), send(fake)):
        taken = good(running.url)
        most = memory(running.process.pid)
        assert httpx.get(f"{running.url}/readyz").status_code == 200
    assert max(taken) < within, taken
    assert set(outcomes) == {422}
    assert outcomes[422] > 10
    assert most < before + 500, (before, most)


def test_large_images_in_one_form_and_slow_ones_that_are_allowed(running: Running) -> None:
    large, slow = png_of_zeros(7000), jpeg_of_scans(43)  # 49 million pixels each, and as many scans as pass
    within, before, most = limit(running.url), memory(running.process.pid), 0

    def form(_: threading.Event) -> None:
        with suppress(httpx.HTTPError):
            httpx.post(f"{running.url}/v1/predict", files=[("image", large)] * 64, timeout=15)

    def one(_: threading.Event) -> None:
        with suppress(httpx.HTTPError):
            headers = {"content-type": "image/jpeg"}
            httpx.post(f"{running.url}/v1/predict", content=slow, headers=headers, timeout=15)

    with attacked(form, one, one):
        taken = good(running.url, 30, 0.2)
        most = memory(running.process.pid)
    assert max(taken) < within, taken
    assert most < before + 1500, (before, most)  # one decoder holds the pixels and coefficients of one image


def test_headers_that_take_long_to_read(running: Running) -> None:
    many = png_of_zeros(8, png_chunk(b"teSt") * 4000)  # the maximum allowed
    within = limit(running.url)

    def form(over: threading.Event) -> None:
        while not over.is_set():
            with suppress(httpx.HTTPError):
                httpx.post(f"{running.url}/v1/predict", files=[("image", many)] * 64, timeout=15)

    with attacked(form, form):
        taken = good(running.url)
    assert max(taken) < within, taken


def test_endless_explanations(running: Running) -> None:
    outcomes: Counter[int] = Counter()
    httpx.post(
        f"{running.url}/v1/explain", files={"image": TINY}, timeout=60
    )  # the first one spends a second on imports
    within = limit(running.url)

    def explain(over: threading.Event) -> None:
        with httpx.Client(base_url=running.url, timeout=60) as client:
            while not over.is_set():
                response = client.post("/v1/explain", files=[("image", TINY)] * 16)
                outcomes[response.status_code] += 1

    with attacked(*[explain] * 8):
        taken = good(running.url)
        assert httpx.get(f"{running.url}/readyz").status_code == 200
    assert max(taken) < within, taken
    assert set(outcomes) <= {200, 503}, outcomes
    assert outcomes[503] > 0  # 128 images for 64 slots


# ── bytes ──


def test_bodies_in_chunks_of_one_byte(running: Running) -> None:
    def chunks(over: threading.Event) -> None:
        with Client(running.url) as client:
            head = b"POST /v1/predict HTTP/1.1\r\n" + client.host_line + b"Content-Type: image/png\r\n"
            client.socket.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            client.socket.settimeout(1)
            while not over.is_set():
                with suppress(TimeoutError):  # the server throttles the client, as intended
                    client.socket.send(b"1\r\nx\r\n" * 10_000)

    within = limit(running.url)
    with attacked(chunks, chunks, chunks):
        taken = good(running.url)
    assert max(taken) < within, taken


def test_endless_headers_with_few_file_descriptors(bundle: Path) -> None:
    with server(str(bundle), "--head-time", "3", "--no-log-requests", descriptors=160, patience=200) as running:
        within = limit(running.url)
        held: list[socket.socket] = []
        for _ in range(300):
            client = Client(running.url)
            with suppress(OSError):
                client.socket.sendall(b"GET / HTTP/1.1\r\nX-Never: ")
            held.append(client.socket)
        taken = good(running.url)
        time.sleep(4)
        late = good(running.url, 3)
        for connection in held:
            connection.close()
        assert running.process.poll() is None
        assert max(*taken, *late) < within, taken
        assert sum(map(len, running.log)) < 20_000


# ── many ──


def many(url: str, count: int, line: bytes, body: bytes = b"") -> Counter[str]:
    """Send many tiny requests over eight connections; return the outcomes."""
    outcomes: Counter[str] = Counter()

    def some(number: int) -> None:
        with Client(url) as client:
            try:
                for _ in range(number):
                    outcomes[str(client.ask(line, body))] += 1
            except ConnectionError:
                outcomes["closed"] += 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(some, [count // 8] * 8))
    return outcomes


def test_ten_thousand_tiny_requests_and_memory_over_twenty_thousand(bundle: Path) -> None:
    with server(str(bundle), "--no-log-requests", patience=600) as running:
        assert many(running.url, 2000, b"POST /v1/predict", TINY) == {"200": 2000}
        settled = memory(running.process.pid)
        assert many(running.url, 8000, b"POST /v1/predict", TINY) == {"200": 8000}
        assert many(running.url, 6000, b"GET /healthz") == {"200": 6000}
        assert many(running.url, 2000, b"POST /v1/predict", b"no image") == {"415": 2000}
        assert many(running.url, 2000, b"GET /" + b"x" * 500) == {"404": 2000}
        assert memory(running.process.pid) < settled + 40, (settled, memory(running.process.pid))


def test_reload_and_shutdown_under_load_and_attack(bundle: Path) -> None:
    slow = jpeg_of_scans(43)
    with server(str(bundle), "--no-log-requests", "--grace", "5", patience=200) as running:

        def attack(over: threading.Event) -> None:
            with httpx.Client(base_url=running.url, timeout=30) as client, suppress(httpx.HTTPError):
                while not over.is_set():
                    client.post("/v1/predict", content=slow, headers={"content-type": "image/jpeg"})

        outcomes: Counter[str] = Counter()

        def load(over: threading.Event) -> None:
            while not over.is_set():
                try:
                    with Client(running.url) as client:
                        while not over.is_set():
                            outcomes[str(client.ask(b"POST /v1/predict", TINY))] += 1
                except ConnectionRefusedError:
                    return
                except ConnectionError:  # between two requests, during shutdown
                    outcomes["closed"] += 1

        with attacked(attack, attack, load, load):
            for _ in range(5):
                running.process.send_signal(signal.SIGHUP)
                time.sleep(0.3)
            assert set(outcomes) == {"200"}, outcomes
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(30) == 0
            ended = time.time()
        assert set(outcomes) <= {"200", "503", "closed"}, outcomes
    last = json.loads(running.log[-1])
    assert last["event"] == "stopped"
    minutes, seconds = last["time"].rstrip("Z").split(":")[1:]
    lived = ended % 3600 - (60 * int(minutes) + float(seconds))
    assert lived % 3600 < 2, (ended, last["time"])  # compare with the logged time
    assert len([line for line in running.log if '"reloaded"' in line]) >= 1
