"""The routes: each one parses a request, runs a model and encodes the response."""

import asyncio
import re
from collections.abc import Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, request_response
from starlette.types import ASGIApp

from vitrail.errors import CheckpointError, VitrailError
from vitrail.serving.batching import QueueSlot
from vitrail.serving.connections import client_key
from vitrail.serving.decoders import Decoders
from vitrail.serving.decoding import Upload
from vitrail.serving.files import page_files, sample_list
from vitrail.serving.http_errors import ClientDisconnected, HttpError, as_http_error, method_not_allowed
from vitrail.serving.lifecycle import Counters, Lifecycle
from vitrail.serving.middleware import Middleware, as_json
from vitrail.serving.model_registry import ModelRegistry, ServedModel
from vitrail.serving.openapi import document
from vitrail.serving.operations import MaskResult, Operation
from vitrail.serving.request import (
    EmbedOptions,
    ExplainOptions,
    Kind,
    PredictOptions,
    Uploads,
    read_options,
    read_request,
)
from vitrail.serving.settings import Settings

T = TypeVar("T")
MASKS_AT_ONCE = 2
"""Masks that are made at the same time: each takes about 12 bytes per pixel of the upload."""


class RequestHandler:
    """Runs requests for all models."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self._settings, self._counters = settings, counters
        self.decoders = Decoders(settings)
        # Threads of its own: large masks must neither take all memory nor keep the others of the service waiting.
        self._masks = ThreadPoolExecutor(MASKS_AT_ONCE, thread_name_prefix="masks")

    async def close(self) -> None:
        """Stop the decoder processes, and make no more masks."""
        await self.decoders.close()
        self._masks.shutdown(wait=False, cancel_futures=True)

    async def handle(
        self, request: Request, served: ServedModel, operation: Operation, images: list[bytes], task: str
    ) -> Any:
        """Return one result per image, in order; an error in a single-image request raises `HttpError`."""
        operation.check(served, len(images))
        slots = served.batcher.reserve(len(images), alone=operation.alone)
        # A failed image does not stop the others; the deadline or a disconnect cancels all of them.
        client, header_lock = client_key("" if request.client is None else request.client.host), asyncio.Lock()
        work = asyncio.gather(
            *(
                self._run_one(
                    served, operation, self.decoders.decode(image, served.bundle.preprocess, client, header_lock), slot
                )
                for image, slot in zip(images, slots, strict=True)
            ),
            return_exceptions=True,
        )
        try:
            outcomes = await within(work, request, self._settings.deadline)
        finally:
            for slot in slots:
                slot.leave()
        results = []
        for outcome in outcomes:
            if isinstance(outcome, HttpError) and len(outcomes) > 1 and outcome.status < 500:
                results.append({"error": outcome.message})
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results.append(outcome)
        self._counters.images.labels(served.name, task).inc(len(results))
        return results

    async def _run_one(
        self, served: ServedModel, operation: Operation, decoded: Coroutine[Any, Any, Upload], slot: QueueSlot
    ) -> Any:
        upload = await decoded
        try:
            result = await served.batcher.submit(operation, upload.pixels, slot)
            if not isinstance(result, MaskResult):
                return result
            # Masks have the size of the upload, so they are not made in the thread of the model.
            return await asyncio.get_running_loop().run_in_executor(self._masks, result.finished, upload.size)
        except VitrailError as error:
            raise as_http_error(error) from None


async def within(work: "asyncio.Future[T]", request: Request, seconds: float) -> T:
    """Await `work`; cancel it if the deadline passes or the client disconnects first."""
    disconnect: asyncio.Future[None] = asyncio.ensure_future(_wait_for_disconnect(request))
    pending: set[asyncio.Future[Any]] = {work, disconnect}
    try:
        done, _ = await asyncio.wait(pending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if work in done:
            return work.result()
        if disconnect in done:
            raise ClientDisconnected
        raise HttpError(504, f"no result within {seconds:g} s; try again later", reason="deadline")
    finally:
        for future in (work, disconnect):
            if not future.done():
                future.cancel()
        await _wait_cancelled(work)


async def _wait_cancelled(work: Awaitable[Any]) -> None:
    """Wait until cancelled work has released its resources."""
    try:
        await work
    except (asyncio.CancelledError, Exception):  # the outcome was already used, or is no longer needed
        return


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ── service ──


class Service:
    """The HTTP service. The constructor opens the bundles; `start` makes it ready."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.counters, self.lifecycle = settings, Counters(), Lifecycle()
        self.registry = ModelRegistry(settings, self.counters)
        self._handler, self._uploads = RequestHandler(settings, self.counters), Uploads(settings)
        self._files = page_files()
        self._document = document(settings)
        self.app = self._build_app()

    async def start(self) -> None:
        """Warm up the models and become ready, unless a stop was requested in the meantime."""
        await self.registry.start()
        if self.lifecycle.stage == "starting":
            self.lifecycle.stage = "ready"
            self.counters.ready.set(1)

    async def start_decoders(self) -> None:
        """Start the decoder processes; otherwise they start with the first images."""
        await self._handler.decoders.start()

    async def stop(self) -> None:
        """Stop the decoder processes and close the models."""
        await self._handler.close()
        await self.registry.close()

    def _build_app(self) -> ASGIApp:
        routes = [
            Route("/v1/predict", self.predict, methods=["POST"]),
            Route("/v1/embed", self.embed, methods=["POST"]),
            Route("/v1/explain", self.explain, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/reload", self.reload, methods=["POST"]),
            Route("/v1/samples", self.model_samples, methods=["GET"]),
            Route("/v1/samples/image", self.model_sample, methods=["GET"]),
            Route("/healthz", self.healthz, methods=["GET"]),
            Route("/readyz", self.readyz, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/samples", self.samples, methods=["GET"]),
        ]
        self.routes = {*(route.path for route in routes), "/"}
        router = Router(routes, redirect_slashes=False, default=request_response(self.file))
        middleware = Middleware(router, self.routes, self.settings, self.counters, self.lifecycle)
        if not self.settings.origins:
            return middleware
        return CORSMiddleware(
            middleware,
            allow_origins=self.settings.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("authorization", "content-type", "x-request-id"),
            expose_headers=("x-request-id", "retry-after"),
        )

    # ── inference ──

    async def predict(self, request: Request) -> Response:
        """Return the most likely classes."""
        return await self._run(request, PredictOptions, "predict")

    async def embed(self, request: Request) -> Response:
        """Return image embeddings."""
        return await self._run(request, EmbedOptions, "embed")

    async def explain(self, request: Request) -> Response:
        """Return explanation maps."""
        return await self._run(request, ExplainOptions, "explain")

    async def _run(self, request: Request, kind: type[Kind], task: str) -> Response:
        self.registry.check_capacity(request.query_params.get("model"), alone=task == "explain")  # before the body
        with self._uploads.reading() as upload:
            async with self.lifecycle.arriving_body():
                parsed = await read_request(request, upload, self.settings)
            options = read_options(kind, parsed.fields)
            with self.registry.use(options.model) as served:
                operation = options.operation()
                results = await self._handler.handle(request, served, operation, parsed.images, task)
        extra: dict[str, str] = {"method": options.method or "relevance"} if isinstance(options, ExplainOptions) else {}
        return as_json({"model": served.name, **extra, "results": results})

    async def models(self, _: Request) -> Response:
        """List the models."""
        return as_json({"models": self.registry.descriptions()})

    async def reload(self, request: Request) -> Response:
        """Reload bundles; if that fails, the old ones keep serving."""
        self.lifecycle.check()
        name = request.query_params.get("model") or None
        self.registry.check_name(name)
        try:
            names = await self.registry.reload(name)
        except CheckpointError as error:
            raise HttpError(409, str(error), reason="reload") from None
        return as_json({"reloaded": names})

    # Training images need the token, like the model itself; the page's built-in samples do not.

    async def model_samples(self, request: Request) -> Response:
        """List the sample images that a model's training run saved."""
        with self.registry.use(request.query_params.get("model") or None) as served:
            samples = [{"name": sample.label, "number": number} for number, sample in enumerate(served.samples)]
            return as_json({"model": served.name, "samples": samples})

    async def model_sample(self, request: Request) -> Response:
        """Return one of these images."""
        number = request.query_params.get("number", "")
        with self.registry.use(request.query_params.get("model") or None) as served:
            if not re.fullmatch("[0-9]{1,6}", number) or int(number) >= len(served.samples):
                raise HttpError(404, "no sample has this number; /v1/samples lists the samples of a model")
            return Response(served.samples[int(number)].content, media_type="image/jpeg")

    # ── service ──

    async def healthz(self, _: Request) -> Response:
        """Liveness probe: the process responds."""
        return as_json({"status": "alive"})

    async def readyz(self, _: Request) -> Response:
        """Readiness probe: the models are warm and the queues are not backed up."""
        self.lifecycle.check()
        waited = max(self._handler.decoders.waiting(), self.registry.waiting())
        if waited > self.settings.deadline / 2:
            raise HttpError(503, f"images have been waiting for {waited:.0f} s", retry_after=1, reason="full")
        return as_json({"status": "ready"})

    async def metrics(self, _: Request) -> Response:
        """Return the metrics in Prometheus text format."""
        return Response(generate_latest(self.counters.registry), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, _: Request) -> Response:
        """Return the OpenAPI document."""
        return as_json(self._document)

    # ── the page ──

    async def samples(self, _: Request) -> Response:
        """List the sample images."""
        return as_json({"samples": sample_list(self._files)})

    async def file(self, request: Request) -> Response:
        """Return a static file of the page."""
        static = self._files.get(request.scope["path"])
        if static is None:
            raise HttpError(404, "not found")
        if request.method not in ("GET", "HEAD"):
            raise method_not_allowed("GET, HEAD")
        headers = {"cache-control": "no-cache", "etag": static.etag}
        if request.headers.get("if-none-match") == static.etag:
            return Response(status_code=304, headers=headers)
        return Response(static.content, headers=headers, media_type=static.media_type)
