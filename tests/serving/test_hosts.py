"""Host and Origin checks: DNS rebinding and cross-site requests are rejected."""

import socket
from pathlib import Path

import httpx
import pytest
from tests.support.live_server import image, save_tiny
from tests.support.service_in_process import PNG, settings_for, with_client

from vitrail.errors import ConfigError
from vitrail.serving.app import Service
from vitrail.serving.http_errors import HttpError
from vitrail.serving.middleware import Hosts


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("bundles") / "m")


def allows(hosts: Hosts, host: str | None) -> bool:
    try:
        hosts.check(host)
    except HttpError as refusal:
        return refusal.status != 403
    return True


def test_only_localhost_and_the_bound_address_are_allowed_by_default() -> None:
    hosts = Hosts("192.168.1.5", ())
    for host in ("localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "[::1]:8000", "192.168.1.5:80", None):
        assert allows(hosts, host)
    for host in (
        "evil.example",
        "evil.example:8000",
        "",
        "localhost.evil.example",
        "192.168.1.6",
        "a@localhost",
        "[x]",
    ):
        assert not allows(hosts, host)
    for bound in ("0.0.0.0", "::", "0", "::0"):
        everywhere = Hosts(bound, ("vitrail.example",))
        for host in ("10.1.2.3:8000", "[fe80::1]", "vitrail.example", "localhost", socket.gethostname()):
            assert allows(everywhere, host)
        assert not allows(everywhere, "evil.example")
    assert allows(Hosts("127.0.0.1", ("*",)), "evil.example")


def test_another_host_is_refused_everywhere(bundle: Path) -> None:
    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        for method, path in (("GET", "/"), ("GET", "/v1/models"), ("POST", "/v1/predict"), ("GET", "/metrics")):
            headers = {"host": "rebound.example", **PNG}
            response = await client.request(method, path, headers=headers, content=image())
            assert response.status_code == 403
            assert "--allow-host" in response.json()["error"]
        assert (await client.get("/", headers={"host": "localhost:8000"})).status_code == 200

    with_client(settings_for(bundle, allow_hosts=()), ask)


def test_a_foreign_origin_is_rejected_without_fetch_metadata(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        own = bool(service.settings.origins)
        for path in ("/v1/models/reload", "/v1/predict"):
            for origin, allowed in (
                ("http://evil.example", False),
                ("null", False),
                ("http://localhost:9999", False),  # another service on the same machine
                ("http://localhost:8000", True),
                ("https://example.org", own),
            ):
                headers = {"host": "localhost:8000", "origin": origin, **PNG}
                response = await client.post(path, headers=headers, content=image())
                assert response.status_code == (200 if allowed else 403), (path, origin)
        assert (await client.post("/v1/models/reload")).status_code == 200  # not a browser

    with_client(settings_for(bundle), ask)
    with_client(settings_for(bundle, origins=("https://example.org",)), ask)


def test_a_host_is_written_without_port_or_path(bundle: Path) -> None:
    for wrong in ("https://example.org", "example.org:80", "a/b"):
        with pytest.raises(ConfigError, match="is not a host name"):
            settings_for(bundle, allow_hosts=(wrong,))
