"""From the images of a request to its result: decoded in other processes, computed in the model's thread, in time."""

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
from vitrail.serving.operations import ParsedRequest
from vitrail.serving.served_model import ServedModel
from vitrail.serving.settings import Settings

Made = TypeVar("Made")


class RequestHandler:
    """What turns images into results, for all models."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self._settings, self._counters = settings, counters
        self.decoders = Decoders(settings)

    async def answer(
        self, request: Request, served: ServedModel, work_item: ParsedRequest, images: list[bytes], task: str
    ) -> Any:
        """Return a result for each image, in order; what is wrong with the only one is a `HttpError`."""
        work_item.check(served, len(images))
        seats = served.batcher.reserve(len(images), alone=work_item.alone)
        # No failure of one image ends the others; what ends all (the deadline, the client) cancels them.
        client, turn = client_key("" if request.client is None else request.client.host), asyncio.Lock()
        work = asyncio.gather(
            *(
                self._one(served, work_item, self.decoders.decode(image, served.bundle.preprocess, client, turn), slot)
                for image, slot in zip(images, seats, strict=True)
            ),
            return_exceptions=True,
        )
        try:
            found = await within(work, request, self._settings.deadline)
        finally:
            for slot in seats:
                slot.leave()
        results = []
        for made in found:
            if isinstance(made, HttpError) and len(found) > 1 and made.status < 500:
                results.append({"error": made.sentence})
            elif isinstance(made, BaseException):
                raise made
            else:
                results.append(made)
        self._counters.images.labels(served.name, task).inc(len(results))
        return results

    async def _one(
        self, served: ServedModel, work_item: ParsedRequest, decoded: Coroutine[Any, Any, Pixels], slot: QueueSlot
    ) -> Any:
        pixels = await decoded
        try:
            return await served.batcher.ask(work_item, pixels, slot)
        except VitrailError as error:
            raise as_http_error(error) from None


async def within(work: "asyncio.Future[Made]", request: Request, seconds: float) -> Made:
    """Return what becomes of `work`, unless the deadline passes or the client leaves before: then it is cancelled."""
    leaving: asyncio.Future[None] = asyncio.ensure_future(_left(request))
    both: set[asyncio.Future[Any]] = {work, leaving}
    try:
        done, _ = await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if work in done:
            return work.result()
        if leaving in done:
            raise ClientDisconnected
        raise HttpError(504, f"there was no answer within {seconds:g} s; try again later", reason="deadline")
    finally:
        for future in (work, leaving):
            if not future.done():
                future.cancel()
        await _ended(work)


async def _ended(work: Awaitable[Any]) -> None:
    """Wait until what was cancelled has let go of everything."""
    try:
        await work
    except (asyncio.CancelledError, Exception):  # its outcome is known, or nobody's business any more
        return


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
