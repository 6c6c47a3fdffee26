"""Turn the images of a request into results: decoded in other processes, computed in the model's thread."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from vitrail.data.sources.source import Pixels
from vitrail.errors import VitrailError
from vitrail.serving.batching import QueueSlot
from vitrail.serving.connections import client_key
from vitrail.serving.counters import Counters
from vitrail.serving.decoders import Decoders
from vitrail.serving.http_errors import ClientDisconnected, HttpError, as_http_error
from vitrail.serving.operations import Operation
from vitrail.serving.served_model import ServedModel
from vitrail.serving.settings import Settings

T = TypeVar("T")


class RequestHandler:
    """Runs requests for all models."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self._settings, self._counters = settings, counters
        self.decoders = Decoders(settings)

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
        self, served: ServedModel, operation: Operation, decoded: Coroutine[Any, Any, Pixels], slot: QueueSlot
    ) -> Any:
        pixels = await decoded
        try:
            return await served.batcher.submit(operation, pixels, slot)
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
