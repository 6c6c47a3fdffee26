"""The stage of a service (starting, ready, stopping), its unfinished requests, and its Prometheus metrics.

On shutdown, fully received requests have a grace period to finish. Requests whose body is still arriving are refused
at once, because the client may never finish sending.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from vitrail.serving.http_errors import HttpError

Stage = Literal["starting", "ready", "stopping"]
STOPPING = "the service is stopping and does not accept new requests"


class Lifecycle:
    """The stage of a service and the requests it has accepted."""

    def __init__(self) -> None:
        self.stage: Stage = "starting"
        self.accepted = 0
        """Accepted inference requests that have not finished."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._arriving, self._working = _Interruptible(), _Interruptible()

    def check(self) -> None:
        """Raise 503 unless the service is ready."""
        if self.stage == "starting":
            raise HttpError(503, "the models are warming up; try again soon", retry_after=1, reason="starting")
        if self.stage == "stopping":
            raise HttpError(503, STOPPING, retry_after=5, reason="stopping")

    @asynccontextmanager
    async def accepted_request(self) -> AsyncIterator[None]:
        """Track a request; it fails with 503 if it has not finished when the grace period expires."""
        self.check()
        self.accepted += 1
        self._idle.clear()
        try:
            async with self._working.until_interrupted("the service stopped before the request finished"):
                yield
        finally:
            self.accepted -= 1
            if not self.accepted:
                self._idle.set()

    @asynccontextmanager
    async def arriving_body(self) -> AsyncIterator[None]:
        """Track a body being read; it is refused if the service stops before all of it has arrived."""
        async with self._arriving.until_interrupted(STOPPING):
            yield

    def refuse_arriving(self) -> None:
        """Refuse every request whose body is still arriving."""
        self._arriving.interrupt()

    def refuse_unfinished(self) -> None:
        """Refuse every request that has not finished."""
        self._working.interrupt()

    async def idle(self, seconds: float) -> bool:
        """Wait until every accepted request has finished; return False on timeout."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True


class _Interruptible:
    """Scopes that can all be interrupted from outside."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._interrupted = False

    @asynccontextmanager
    async def until_interrupted(self, message: str) -> AsyncIterator[None]:
        """Run the body; raise `HttpError` if interrupted."""
        scope = asyncio.timeout(0 if self._interrupted else None)
        self._scopes.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise HttpError(503, message, retry_after=5, reason="stopping") from None
        finally:
            self._scopes.discard(scope)

    def interrupt(self) -> None:
        self._interrupted = True
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())


# ── metrics ──

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Counters:
    """The metrics of one service, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        registry = self.registry
        self.requests = Counter("vitrail_requests", "HTTP requests", ("route", "status"), registry=registry)
        self.request_seconds = Histogram(
            "vitrail_request_seconds", "Request latency", ("route",), buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge("vitrail_requests_in_flight", "Requests in progress", registry=registry)
        self.images = Counter("vitrail_images", "Images processed", ("model", "task"), registry=registry)
        self.refused = Counter("vitrail_refused", "Refused requests by reason", ("reason",), registry=registry)
        self.batch_size = Histogram(
            "vitrail_batch_size", "Images per batch", ("model",), buckets=_SIZES, registry=registry
        )
        self.compute_seconds = Histogram(
            "vitrail_compute_seconds", "Compute time per batch", ("model",), buckets=_SECONDS, registry=registry
        )
        self.waiting = Gauge("vitrail_queue_images", "Queued images", ("model",), registry=registry)
        self.cancelled = Counter(
            "vitrail_cancelled", "Images cancelled before their result", ("model",), registry=registry
        )
        self.reloads = Counter("vitrail_reloads", "Model reloads", ("outcome",), registry=registry)
        self.ready = Gauge("vitrail_ready", "1 if the service is ready", registry=registry)
