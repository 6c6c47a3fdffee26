"""Limits of the service: request size, response size, cross-site requests, slow readers."""

import asyncio
import io
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from starlette.responses import Response
from tests.support.live_server import image, save_tiny
from tests.support.service_in_process import PNG, settings_for, with_client
from torch import Tensor

from vitrail import Preprocess
from vitrail.__main__ import main
from vitrail.data.sources.source import Pixels
from vitrail.errors import ConfigError
from vitrail.serving import operations, run
from vitrail.serving.app import Service
from vitrail.serving.decoding import decode_upload
from vitrail.serving.http_errors import HttpError
from vitrail.serving.lifecycle import Counters, Lifecycle
from vitrail.serving.middleware import CHUNK, Middleware
from vitrail.serving.model_registry import ServedModel


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("bundles") / "m")


def test_requests_that_are_slow_to_parse_are_refused(bundle: Path) -> None:
    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        json = {"content-type": "application/json"}
        for body in (b'{"images": [' + b"{}," * 300_000 + b"{}]}", b'{"a":[' + b"[]," * 300_000 + b"[]]}"):
            response = await client.post("/v1/predict", content=body, headers=json)
            assert response.status_code == 400
            assert "too many values" in response.json()["error"]
        many = "&".join(f"t{number}=" for number in range(60))
        for path, body in ((f"/v1/predict?{many}", b'{"images": ["AA=="]}'), ("/v1/predict", long_name())):
            response = await client.post(path, content=body, headers=json)
            assert response.status_code == 422
            assert "/openapi.json" in response.json()["error"]

    with_client(settings_for(bundle), ask)


def long_name() -> bytes:
    return b'{"images": ["AA=="], "' + b"topx" * 1000 + b'": 3}'


def test_a_narrow_image_is_refused_before_resizing() -> None:
    file = io.BytesIO()
    Image.new("RGB", (1, 2000)).save(file, "PNG")  # 85 bytes; resized to the model's width: 100 million pixels
    with pytest.raises(HttpError, match="224×448,000") as refused:
        decode_upload(file.getvalue(), Preprocess(size=(224, 224), resize="cover"), ("png",), 50_000_000)
    assert refused.value.status == 413
    assert decode_upload(file.getvalue(), Preprocess(size=(224, 224)), ("png",), 50_000_000).pixels.shape == (
        224,
        224,
        3,
    )


def test_the_attention_limit_is_for_all_images_together(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_ATTENTION_BYTES", 2 * 2 * 18**2 * 2)  # two images of this model

    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        for images, status in ((2, 200), (3, 422)):
            files = [("image", image())] * images
            response = await client.post("/v1/explain?method=attention&query=all", files=files)
            assert response.status_code == status
        assert "send fewer images" in response.json()["error"]

    with_client(settings_for(bundle), ask)


def test_a_non_finite_output_does_not_affect_other_images(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        with service.registry.use(None) as served:
            engine = served.engine
            assert engine is not None

            def overflowing(pixels: Tensor) -> Tensor:
                logits = engine(pixels).clone()
                logits[0] = float("inf")
                return logits

            served.engine = overflowing  # type: ignore[assignment]
        both = [client.post("/v1/predict", content=image(seed=seed), headers=PNG) for seed in range(2)]
        responses = await asyncio.gather(*both)
        assert sorted(response.status_code for response in responses) == [200, 500]

    with_client(settings_for(bundle, wait=2000, batch=2), ask)


def test_cross_site_requests_are_refused(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        for site, origin, status in (
            ("cross-site", "https://evil.example", 403),
            ("same-site", "null", 403),
            ("cross-site", "https://example.org", 200),
            ("same-origin", "http://service", 200),
        ):
            headers = {"sec-fetch-site": site, "origin": origin}
            expected = status if service.settings.origins or site == "same-origin" else 403
            assert (await client.post("/v1/models/reload", headers=headers)).status_code == expected
            assert (await client.get("/v1/models", headers=headers)).status_code == 200

    with_client(settings_for(bundle), ask)
    with_client(settings_for(bundle, origins=("https://example.org",)), ask)


def test_405_lists_the_allowed_methods(bundle: Path) -> None:
    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        for method, path, allow in (
            ("GET", "/v1/predict", {"POST"}),
            ("HEAD", "/v1/models/reload", {"POST"}),
            ("PUT", "/v1/models", {"GET", "HEAD"}),
            ("OPTIONS", "/", {"GET", "HEAD"}),
            ("POST", "/assets/main.js", {"GET", "HEAD"}),
        ):
            response = await client.request(method, path)
            assert response.status_code == 405
            assert set(response.headers["allow"].split(", ")) == allow
            if method != "HEAD":
                assert response.json()["error"] == f"method not allowed; use {' or '.join(sorted(allow))}"
        response = await client.post("/v1/predict/", content=image(), headers=PNG)
        assert response.status_code == 404  # unknown path, whatever the method

    with_client(settings_for(bundle), ask)


def test_a_client_that_stops_reading_is_dropped(bundle: Path) -> None:
    content = bytes(1_000_000)
    settings = settings_for(bundle, upload_time=0.2)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}

    async def run() -> None:
        counters = Counters()
        middleware = Middleware(Response(content), {"/"}, settings, counters, Lifecycle())
        pieces: list[bytes] = []

        async def taken(message: Any) -> None:
            if message["type"] == "http.response.body":
                pieces.append(message["body"])

        async def stuck(message: Any) -> None:
            await taken(message)
            if len(pieces) == 2:
                await asyncio.Event().wait()

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        await middleware(scope, receive, taken)
        assert b"".join(pieces) == content
        assert max(map(len, pieces)) <= CHUNK
        pieces.clear()
        async with asyncio.timeout(10):
            await middleware(scope, receive, stuck)
        assert len(pieces) == 2
        assert counters.requests.labels("/", "499")._value.get() == 1

        async def never(_: Any) -> None:
            await asyncio.Event().wait()

        async def refusing(*_: Any) -> None:
            raise HttpError(404, "not found")

        async with asyncio.timeout(10):
            await Middleware(refusing, {"/"}, settings, counters, Lifecycle())(scope, receive, never)
        assert counters.requests.labels("/", "499")._value.get() == 2

    asyncio.run(run())


def test_a_reload_during_warm_up_runs_afterwards(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = ServedModel.warm_up
    slow = [True]

    def first_one_slow(self: ServedModel) -> None:
        if slow.pop() if slow else False:
            time.sleep(0.5)
        warm_up(self)

    monkeypatch.setattr(ServedModel, "warm_up", first_one_slow)

    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        await asyncio.gather(service.start(), service.registry.reload())
        assert (await client.post("/v1/predict", content=image(), headers=PNG)).status_code == 200

    with_client(settings_for(bundle, deadline=3), ask, start=False)


def test_warm_up_runs_in_the_compute_thread(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    response, threads = ServedModel.run, list[str]()

    def recorded(
        self: ServedModel, operation: operations.Operation, images: Sequence[Pixels]
    ) -> list[operations.Result]:
        threads.append(threading.current_thread().name)
        return response(self, operation, images)

    monkeypatch.setattr(ServedModel, "run", recorded)

    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/predict", content=image(), headers=PNG)).status_code == 200

    with_client(settings_for(bundle), ask)
    assert threads == ["compute-m_0"] * 3  # warm-up with one image and several, then the request


def test_sighup_while_loading_does_not_kill_the_process(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []

    def hang_up(_: object) -> None:
        signal.raise_signal(signal.SIGHUP)
        raise ConfigError("far enough")

    monkeypatch.setattr(run, "Service", hang_up)
    before = signal.signal(signal.SIGHUP, lambda number, _: heard.append(number))
    try:
        with pytest.raises(ConfigError, match="far enough"):
            run.serve(settings_for(bundle, port=0))
        assert heard == []
        signal.raise_signal(signal.SIGHUP)
        assert heard == [signal.SIGHUP]  # the previous handler is restored
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["VITRAIL_SERVE_TOKEN", "VITRAIL_SERVE_TOKEN_FILE"])
def test_an_empty_token_variable_is_an_error(
    bundle: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "")
    monkeypatch.setattr(run, "Service", lambda _: pytest.fail("it would serve without a token"))
    monkeypatch.setattr(sys, "argv", ["vitrail", "serve", str(bundle), "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"{name} is empty" in capsys.readouterr().err
