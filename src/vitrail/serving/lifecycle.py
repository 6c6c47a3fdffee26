"""The stage of a service (starting, ready, stopping) and its unfinished requests.

On shutdown, fully received requests have a grace period to finish. Requests whose body is still arriving are refused
at once, because the client may never finish sending.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

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
