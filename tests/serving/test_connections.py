"""Limits per connection: slots, header timeout, event loop time, log lines."""

import json
import logging
import os
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from tests.support.live_server import Running, connect, image, read_all, save_tiny, sent, server, wait_until

from vitrail.serving import connections
from vitrail.serving.connections import Connections, RateLimitedLog, RateLimitFilter, client_key
from vitrail.serving.lifecycle import Counters


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    bundle = save_tiny(tmp_path_factory.mktemp("bundles") / "m")
    options = ("--head-time", "1", "--connections", "12", "--client-connections", "8", "--upload-time", "3")
    with server(str(bundle), *options, patience=300) as running:
        yield running


class Fake:
    """A fake connection that records whether it was closed."""

    def __init__(self) -> None:
        self.gone = False

    def close_idle(self) -> None:
        self.gone = True


def test_the_longest_idle_connection_is_closed() -> None:
    result = Connections(3, 2, Counters())
    first, second, third, fourth = (Fake() for _ in range(4))
    assert result.admit(first, "a")
    assert result.admit(second, "a")
    result.work(first)
    assert result.admit(third, "a")  # limit of two per client: its idle one is closed
    assert [one.gone for one in (first, second, third)] == [False, True, False]
    result.work(third)
    assert not result.admit(fourth, "a")  # both are active
    assert result.admit(fourth, "b")
    result.work(fourth)
    assert not result.admit(Fake(), "c")  # all three are active
    result.release(first)
    result.release(first)
    assert result.admit(Fake(), "c")


def test_an_ipv6_network_is_one_client() -> None:
    assert client_key("2001:db8:1:2:3::4") == client_key("2001:db8:1:2::9") != client_key("2001:db8:1:3::9")
    assert client_key("fe80::1%eth0") == "fe80::/64"
    assert client_key("127.0.0.1") == client_key("::ffff:127.0.0.1") == "127.0.0.1"


def test_repeated_messages_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(connections, "monotonic", lambda: now[0])
    log = RateLimitedLog()
    assert log.due("x") == 0
    assert [log.due("x") for _ in range(1000)] == [None] * 1000
    assert log.due("y") == 0
    now[0] += 11
    assert log.due("x") == 1000
    record = logging.LogRecord("uvicorn", logging.WARNING, "", 0, "only here", (), None)
    assert [RateLimitFilter().filter(record) for _ in range(3)] == [True, False, False]


def test_endless_headers_time_out(running: Running) -> None:
    begun = time.monotonic()
    silent, slow = connect(running), connect(running, b"GET / HTTP/1.1\r\nHost: HOST\r\nX-Slow: ")
    again = connect(running, b"GET /healthz HTTP/1.1\r\nHost: HOST\r\n\r\n")
    wait_until(lambda: b"alive" in again.recv(65_536, socket.MSG_PEEK))
    assert again.recv(65_536).startswith(b"HTTP/1.1 200")
    again.sendall(b"GET /heal")  # the next headers on a keep-alive connection
    response = read_all(slow)
    assert response.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert json.loads(response.partition(b"\r\n\r\n")[2])["error"].endswith("did not arrive within 1 s")
    assert read_all(silent) == b""
    assert read_all(again).startswith(b"HTTP/1.1 408")
    assert 0.5 < time.monotonic() - begun < 10


@pytest.mark.slow
def test_too_many_connections_get_503_at_once(running: Running) -> None:
    body = b"POST /v1/predict HTTP/1.1\r\nHost: HOST\r\nContent-Type: image/png\r\nContent-Length: 9\r\n"
    uploading = [connect(running, body + b"Expect: 100-continue\r\n\r\n") for _ in range(8)]
    assert all(
        connection.recv(65_536).startswith(b"HTTP/1.1 100 ") for connection in uploading
    )  # their headers are read
    response = read_all(connect(running, b"GET /healthz HTTP/1.1\r\nHost: HOST\r\n\r\n"))
    assert response.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nretry-after: 1\r\n" in response
    assert b"too many connections" in response
    assert all(b" 408 " in read_all(connection) for connection in uploading)  # the body did not arrive
    assert httpx.get(f"{running.url}/healthz").status_code == 200


def test_idle_connections_are_closed_for_new_ones(running: Running) -> None:
    waiting = [connect(running, b"GET / HT") for _ in range(30)]
    with httpx.Client(base_url=running.url, timeout=20) as client:
        for _ in range(5):
            assert sent(client, image()).status_code == 200
    for connection in waiting:
        connection.close()
    lines = [line for line in running.log if "too many connections" in line]
    assert 1 <= len(lines) <= 5


@pytest.mark.slow
def test_a_refused_body_is_read_only_for_a_limited_time(running: Running) -> None:
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection = connect(running, head)
    begun = time.monotonic()

    def drip() -> None:
        while time.monotonic() - begun < 20:
            connection.sendall(b"1\r\nx\r\n")
            time.sleep(0.05)

    with connection, pytest.raises(OSError, match=r"reset|Broken pipe"):
        drip()


@pytest.mark.slow
def test_a_refused_body_that_ends_soon_keeps_the_connection(running: Running) -> None:
    with connect(
        running, b"POST /v1/nothing HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n"
    ) as connection:
        wait_until(lambda: b"not found" in connection.recv(65_536, socket.MSG_PEEK))
        assert connection.recv(65_536).startswith(b"HTTP/1.1 404")
        connection.sendall(b"1\r\nx\r\n0\r\n\r\n")
        for pause in (0.0, 1.5):  # the second after the timeout
            time.sleep(pause)
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(lambda: b"alive" in connection.recv(65_536, socket.MSG_PEEK))
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")


def test_a_body_in_one_byte_chunks_is_complete(running: Running) -> None:
    content = image("PNG", (12, 9))
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    head = b"POST /v1/predict HTTP/1.1\r\nHost: HOST\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n"
    connection = connect(running, head + b"\r\n" + chunks + b"0\r\n\r\n" + b"GET /healthz HTTP/1.1\r\nHost: HOST\r\n")
    connection.sendall(b"connection: close\r\n\r\n")
    response = read_all(connection)
    assert response.count(b"HTTP/1.1 200 OK") == 2  # and the pipelined request
    assert b'"classes"' in response


def test_file_descriptors_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: calls.append(pair))
    used = 40
    monkeypatch.setattr(os, "listdir", lambda _: ["x"] * used)
    for soft, hard, room in ((1024, 4096, 512), (256, 4096, 512), (256, 256, 256 - used - connections.RESERVED)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, pair=(soft, hard): pair)
        assert connections.connection_limit(512) == room
    assert calls == [(512 + used + connections.RESERVED, 4096), (256, 256)]


def test_the_log_has_no_internal_errors(running: Running) -> None:
    wait_until(lambda: httpx.get(f"{running.url}/readyz").status_code == 200)
    assert not [line for line in running.log if "Traceback" in line or '"fault"' in line]
