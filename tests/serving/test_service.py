"""The service in this process: token, CORS, full queues, deadlines, disconnects."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.live_server import image, save_tiny
from tests.support.service_in_process import PNG, settings_for, with_client

from vitrail.data.sources.source import Pixels
from vitrail.explanations.request import ExplanationRequest
from vitrail.serving.app import Service
from vitrail.serving.batching import BATCHES, Batcher
from vitrail.serving.http_errors import HttpError
from vitrail.serving.lifecycle import Counters
from vitrail.serving.operations import Explain, Predict
from vitrail.serving.settings import Settings


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("bundles") / "m")


class Gate:
    """A compute function that blocks until it is released."""

    def __init__(self, compute: Callable[[Any, Sequence[Pixels]], Sequence[Any]]) -> None:
        self.compute, self.open, self.sizes = compute, threading.Event(), list[int]()

    def __call__(self, operation: Any, images: Sequence[Pixels]) -> Sequence[Any]:
        self.sizes.append(len(images))
        assert self.open.wait(20)
        return self.compute(operation, images)


def gated(service: Service) -> Gate:
    with service.registry.use(None) as served:
        gate = Gate(served.run)
        served.batcher._compute = gate
    return gate


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


# ── access ──


def test_the_token(bundle: Path) -> None:
    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic sesame"},
            {"authorization": "sesame"},
        ):
            for method, path in (
                ("POST", "/v1/predict"),
                ("GET", "/v1/models"),
                ("POST", "/v1/models/reload"),
                ("GET", "/metrics"),
            ):
                response = await client.request(method, path, headers=headers, content=image())
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"].startswith("missing or wrong token: send ")
        for path in ("/", "/healthz", "/readyz", "/samples"):
            assert (await client.get(path)).status_code == 200
        right = {"authorization": "Bearer sesame"}
        assert (await client.post("/v1/predict", content=image(), headers={**right, **PNG})).status_code == 200
        assert (await client.get("/v1/models", headers=right)).status_code == 200

    with_client(settings_for(bundle, token="sesame"), ask)


def test_other_origins_need_to_be_allowed(bundle: Path) -> None:
    target = {"origin": "https://example.org", "access-control-request-method": "POST"}

    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        allowed = bool(service.settings.origins)
        before = await client.options("/v1/predict", headers=target)
        assert (before.status_code == 200) == allowed
        for origin, expected in (("https://example.org", allowed), ("https://evil.example", False)):
            response = await client.get("/healthz", headers={"origin": origin})
            assert ("access-control-allow-origin" in response.headers) == expected

    with_client(settings_for(bundle, origins=("https://example.org",), token="t"), ask)
    with_client(settings_for(bundle), ask)


# ── overload, deadlines, disconnects ──


def test_a_full_queue_refuses_and_loses_nothing(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        gate = gated(service)

        async def one() -> httpx.Response:
            return await client.post("/v1/predict", content=image(), headers=PNG)

        first = asyncio.create_task(one())
        await until(lambda: gate.sizes == [1])
        more = [asyncio.create_task(one()) for _ in range(10)]
        await until(lambda: sum(task.done() for task in more) == 6)
        refused = [task.result() for task in more if task.done()]
        assert {response.status_code for response in refused} == {503}
        assert {response.headers["retry-after"] for response in refused} == {"1"}
        gate.open.set()
        responses = [await first, *[await task for task in more]]
        assert sorted(response.status_code for response in responses) == [200] * 5 + [503] * 6
        assert sum(gate.sizes) == 5  # refused requests were not computed
        many = await client.post("/v1/predict", files=[("image", image())] * 5)
        assert many.status_code == 413
        with service.registry.use(None) as served:
            assert served.batcher.taken == 0

    with_client(settings_for(bundle, queue=4, wait=0), ask)


def test_the_deadline(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        await service.start_decoders()
        await client.post("/v1/predict", content=image(), headers=PNG)  # start a decoder first
        gate = gated(service)
        late = await client.post("/v1/predict", files=[("image", image())] * 3)
        assert late.status_code == 504
        assert "within 1 s" in late.json()["error"]
        gate.open.set()
        assert (await client.post("/v1/predict", content=image(), headers=PNG)).status_code == 200
        # Only the image that was already running was computed.
        assert sum(gate.sizes) == 2
        with service.registry.use(None) as served:
            assert served.batcher.taken == 0

    with_client(settings_for(bundle, batch=1, deadline=1), ask)


def test_disconnected_clients_are_not_computed(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        gate = gated(service)
        first = asyncio.create_task(client.post("/v1/predict", content=image(), headers=PNG))
        await until(lambda: gate.sizes == [1])
        await leave(service, lambda: taken(service) == 1)
        assert taken(service) == 0
        gate.open.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/predict", content=image(), headers=PNG)).status_code == 200
        assert gate.sizes == [1, 1]

    with_client(settings_for(bundle), ask)


def taken(service: Service) -> int:
    with service.registry.use(None) as served:
        return served.batcher.taken


async def leave(service: Service, once: Callable[[], bool]) -> None:
    """Send a request and disconnect once a condition holds."""
    messages = [{"type": "http.request", "body": image(), "more_body": False}]
    responses: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await until(once)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        responses.append(message)

    headers = [(b"content-type", b"image/png"), (b"content-length", b"1")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/predict", "raw_path": b"/v1/predict", "query_string": b"",
        "headers": headers, "http_version": "1.1", "scheme": "http", "client": None, "server": None, "root_path": "",
    }  # fmt: skip
    await service.app(scope, receive, send)
    assert responses == []


def test_before_ready_and_after_stopping(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        for stage, words in (("starting", "warming up"), ("stopping", "stopping")):
            service.lifecycle.stage = stage  # type: ignore[assignment]
            for method, path in (("GET", "/readyz"), ("POST", "/v1/predict"), ("POST", "/v1/models/reload")):
                response = await client.request(method, path, content=image(), headers=PNG)
                assert response.status_code == 503
                assert words in response.json()["error"]
                assert int(response.headers["retry-after"]) > 0
            assert (await client.get("/healthz")).status_code == 200
        assert response.headers["connection"] == "close"

    with_client(settings_for(bundle), ask)


def test_a_replaced_model_is_freed(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        with service.registry.use(None) as served:
            old = weakref.ref(served)
        del served
        assert (await client.post("/v1/models/reload")).status_code == 200
        assert (await client.post("/v1/predict", content=image(), headers=PNG)).status_code == 200
        await until(lambda: old() is None)

    with_client(settings_for(bundle), ask)


def test_concurrent_reloads_share_one(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        responses = await asyncio.gather(*(client.post("/v1/models/reload") for _ in range(20)))
        assert {(response.status_code, response.text) for response in responses} == {(200, '{"reloaded":["m"]}')}
        assert service.counters.reloads.labels("done")._value.get() <= 2  # the running one, and one more
        assert (await client.post("/v1/models/reload?model=m")).status_code == 200

    with_client(settings_for(bundle), ask)


def test_reload_one_model_or_all(bundle: Path) -> None:
    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        for query, names in (("", ["m", "second"]), ("?model=", ["m", "second"]), ("?model=second", ["second"])):
            assert (await client.post(f"/v1/models/reload{query}")).json() == {"reloaded": names}
        assert (await client.post("/v1/models/reload?model=third")).status_code == 422

    with_client(Settings(models=[str(bundle), f"second={bundle}"], device="cpu", allow_hosts=("service",)), ask)


def test_the_total_upload_limit(bundle: Path) -> None:
    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/predict", content=bytes(200_000), headers=PNG)
        assert response.status_code == 503
        assert (await client.post("/v1/predict", content=image(), headers=PNG)).status_code == 200

    with_client(settings_for(bundle, uploads_limit=0.1), ask)


def test_an_internal_error_shows_no_traceback(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        with service.registry.use(None) as served:
            served.batcher._compute = lambda operation, images: 1 / 0  # type: ignore[assignment,return-value]
        response = await client.post("/v1/predict", content=image(), headers=PNG)
        assert response.status_code == 500
        assert response.json()["error"] == "internal error; see the service's log"
        assert "division" not in response.text

    with_client(settings_for(bundle), ask)


# ── batching ──


def test_only_equal_operations_share_a_batch() -> None:
    async def run() -> None:
        calls: list[tuple[Any, int]] = []

        def compute(operation: Any, images: Sequence[Pixels]) -> list[int]:
            calls.append((operation, len(images)))
            return [int(image[0, 0, 0]) for image in images]

        batcher = Batcher("m", compute, batch=4, wait=0.05, queue=100, counters=Counters())
        batcher.start()
        operations = [Predict(1), Predict(1), Predict(2), Predict(1), Predict(2)] * 2
        pixels = [np.full((1, 1, 3), number, np.uint8) for number in range(len(operations))]
        slots = batcher.reserve(len(operations))
        result = await asyncio.gather(*map(batcher.submit, operations, pixels, slots))
        assert result == list(range(10))  # every image gets its own result
        assert calls == [(Predict(1), 4), (Predict(2), 4), (Predict(1), 2)]
        assert batcher.taken == 0
        await batcher.close()

    asyncio.run(run())


def test_explanations_run_one_at_a_time() -> None:
    async def run() -> None:
        sizes: list[int] = []

        def compute(_: Any, images: Sequence[Pixels]) -> Sequence[Pixels]:
            sizes.append(len(images))
            return images

        batcher = Batcher("m", compute, batch=4, wait=10, queue=100, counters=Counters())
        batcher.start()
        operation = Explain(ExplanationRequest("rollout"))
        await asyncio.gather(
            *(batcher.submit(operation, np.zeros((1, 1, 3), np.uint8), slot) for slot in batcher.reserve(3))
        )
        assert sizes == [1, 1, 1]
        with pytest.raises(HttpError, match="the queue holds 100"):
            batcher.reserve(101)
        await batcher.close()

    asyncio.run(run())


def order_of(before: Sequence[Any], waiting: Sequence[Any], batch: int) -> list[tuple[str, int]]:
    """Submit operations, more of them while the first runs; return what ran, in order."""

    async def run() -> list[tuple[str, int]]:
        computed, gate = list[tuple[str, int]](), threading.Event()

        def compute(operation: Any, images: Sequence[Pixels]) -> Sequence[Pixels]:
            computed.append((type(operation).__name__, len(images)))
            assert gate.wait(20)
            return images

        batcher = Batcher("m", compute, batch=batch, wait=0, queue=100, counters=Counters())
        batcher.start()

        def ask(operation: Any) -> asyncio.Task[Any]:
            (slot,) = batcher.reserve(1, alone=operation.alone)
            return asyncio.create_task(batcher.submit(operation, np.zeros((1, 1, 3), np.uint8), slot))

        tasks = [ask(operation) for operation in before]
        await until(lambda: len(computed) == 1)
        tasks += [ask(operation) for operation in waiting]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)
        assert batcher.taken == 0
        await batcher.close()
        return computed

    return asyncio.run(run())


def test_predictions_run_before_the_next_explanation() -> None:
    explain, predict = Explain(ExplanationRequest("rollout")), Predict(1)
    order = order_of([explain] * 10, [explain] * 5 + [predict] * 6, batch=4)
    assert order == [("Explain", 1), ("Predict", 4), ("Predict", 2), *[("Explain", 1)] * 14]


def test_an_explanation_has_its_turn_among_many_predictions() -> None:
    explain, predict = Explain(ExplanationRequest("rollout")), Predict(1)
    order = [kind for kind, _ in order_of([predict], [explain] * 2 + [predict] * 20, batch=1)]
    assert order == ["Predict"] * (1 + BATCHES) + ["Explain"] + ["Predict"] * BATCHES + ["Explain"] + ["Predict"] * 4


def test_many_explanations_are_refused_and_predictions_are_not(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        gate = gated(service)

        def send(path: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post(path, content=image(), headers=PNG))

        first = send("/v1/explain")
        await until(lambda: gate.sizes == [1])
        more = [send("/v1/explain") for _ in range(2)]  # of eight slots, two are for explanations
        await until(lambda: taken(service) == 2)
        refused = await send("/v1/explain")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "too many explanations in the queue" in refused.json()["error"]
        predicted = [send("/v1/predict") for _ in range(8)]
        await until(lambda: taken(service) == 10)
        gate.open.set()
        assert {(await task).status_code for task in (first, *more, *predicted)} == {200}

    with_client(settings_for(bundle, queue=8), ask)
