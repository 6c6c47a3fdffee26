"""The routes: each reads a request, asks a model, and writes what it says."""

import re

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, request_response
from starlette.types import ASGIApp

from vitrail.errors import CheckpointError
from vitrail.serving.counters import Counters
from vitrail.serving.files import page_files, sample_list
from vitrail.serving.handler import RequestHandler
from vitrail.serving.http_errors import HttpError
from vitrail.serving.lifecycle import Lifecycle
from vitrail.serving.middleware import Middleware, as_json
from vitrail.serving.model_registry import ModelRegistry
from vitrail.serving.openapi import document
from vitrail.serving.options import EmbedOptions, ExplainOptions, PredictOptions
from vitrail.serving.request_body import Kind, Uploads, read_options, read_request
from vitrail.serving.settings import Settings


class Service:
    """The HTTP service: bundles are opened when it is made, and answer once it was started."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.counters, self.lifecycle = settings, Counters(), Lifecycle()
        self.registry = ModelRegistry(settings, self.counters)
        self._answerer, self._uploads = RequestHandler(settings, self.counters), Uploads(settings)
        self._files = page_files()
        self._document = document(settings)
        self.app = self._made_app()

    async def start(self) -> None:
        """Warm the models up; then the service is ready, unless it has been asked to stop meanwhile."""
        await self.registry.start()
        if self.lifecycle.stage == "starting":
            self.lifecycle.stage = "ready"
            self.counters.ready.set(1)

    async def start_decoders(self) -> None:
        """Start the processes that decode; without it, they start with the first images."""
        await self._answerer.decoders.start()

    async def stop(self) -> None:
        """Let go of the models, and end what still decodes."""
        await self._answerer.decoders.close()
        await self.registry.close()

    def _made_app(self) -> ASGIApp:
        routes = [
            Route("/v1/predict", self.predict, methods=["POST"]),
            Route("/v1/embed", self.embed, methods=["POST"]),
            Route("/v1/explain", self.explain, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/reload", self.reload, methods=["POST"]),
            Route("/v1/samples", self.own_samples, methods=["GET"]),
            Route("/v1/samples/image", self.own_sample, methods=["GET"]),
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

    # ── models at work ──

    async def predict(self, request: Request) -> Response:
        """Say which classes are likely."""
        return await self._asked(request, PredictOptions, "predict")

    async def embed(self, request: Request) -> Response:
        """Give the features of images."""
        return await self._asked(request, EmbedOptions, "embed")

    async def explain(self, request: Request) -> Response:
        """Show where a model looks."""
        return await self._asked(request, ExplainOptions, "explain")

    async def _asked(self, request: Request, kind: type[Kind], task: str) -> Response:
        self.registry.check_room(request.query_params.get("model"), alone=task == "explain")  # before anything is read
        with self._uploads.reading() as upload:
            async with self.lifecycle.arriving_body():
                asked = await read_request(request, upload, self.settings)
            options = read_options(kind, asked.fields)
            with self.registry.use(options.model) as served:
                work_item = options.work_item()
                results = await self._answerer.answer(request, served, work_item, asked.images, task)
        said: dict[str, str] = {"method": options.method or "relevance"} if isinstance(options, ExplainOptions) else {}
        return as_json({"model": served.name, **said, "results": results})

    async def models(self, _: Request) -> Response:
        """List the models."""
        return as_json({"models": self.registry.descriptions()})

    async def reload(self, request: Request) -> Response:
        """Open bundles again; where that fails, the old ones stay."""
        self.lifecycle.check()
        name = request.query_params.get("model") or None
        self.registry.check_name(name)
        try:
            names = await self.registry.reload(name)
        except CheckpointError as error:
            raise HttpError(409, str(error), reason="reload") from None
        return as_json({"reloaded": names})

    # Images of training data are given to whoever may ask the model, not to everybody, as the page's own samples are.

    async def own_samples(self, request: Request) -> Response:
        """List the images that the run of a model kept of its classes."""
        with self.registry.use(request.query_params.get("model") or None) as served:
            samples = [{"name": one.label, "number": number} for number, one in enumerate(served.samples)]
            return as_json({"model": served.name, "samples": samples})

    async def own_sample(self, request: Request) -> Response:
        """Give one of them."""
        number = request.query_params.get("number", "")
        with self.registry.use(request.query_params.get("model") or None) as served:
            if not re.fullmatch("[0-9]{1,6}", number) or int(number) >= len(served.samples):
                raise HttpError(404, "there is no sample of this number; /v1/samples lists those of a model")
            return Response(served.samples[int(number)].content, media_type="image/jpeg")

    # ── the service itself ──

    async def healthz(self, _: Request) -> Response:
        """Say that the process answers."""
        return as_json({"status": "alive"})

    async def readyz(self, _: Request) -> Response:
        """Say whether models answer."""
        self.lifecycle.check()
        waited = max(self._answerer.decoders.waiting(), self.registry.waiting())
        if waited > self.settings.deadline / 2:
            raise HttpError(503, f"images have been waiting for {waited:.0f} s", retry_after=1, reason="full")
        return as_json({"status": "ready"})

    async def metrics(self, _: Request) -> Response:
        """Give the numbers that Prometheus collects."""
        return Response(generate_latest(self.counters.registry), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, _: Request) -> Response:
        """Give the description of this service for programs."""
        return as_json(self._document)

    # ── the page ──

    async def samples(self, _: Request) -> Response:
        """List the sample images."""
        return as_json({"samples": sample_list(self._files)})

    async def file(self, request: Request) -> Response:
        """Give a file of the page."""
        found = self._files.get(request.scope["path"])
        if found is None:
            raise HttpError(404, "there is nothing at this address")
        if request.method not in ("GET", "HEAD"):
            raise HttpError(405, "this address does not take this method", allow="GET, HEAD")
        headers = {"cache-control": "no-cache", "etag": found.tag}
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        return Response(found.content, headers=headers, media_type=found.media_type)
