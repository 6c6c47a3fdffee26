"""Where a service stands between its start and its end, and how many requests it still owes an answer.

At the end, a request that has arrived whole has a grace to be answered in; one that is still arriving has none, for
whoever sends it may never end.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from vitrail.serving.http_errors import HttpError

Stage = Literal["starting", "ready", "stopping"]
STOPPING = "the service is stopping and takes no new work"


class Lifecycle:
    """The stage of a service, and what it has accepted."""

    def __init__(self) -> None:
        self.stage: Stage = "starting"
        self.accepted = 0
        """Requests for models that were let in and are not answered yet."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._arriving, self._working = _Interruptible(), _Interruptible()

    def check(self) -> None:
        """Refuse new work where there is none to be taken."""
        if self.stage == "starting":
            raise HttpError(503, "the models are being warmed up; try again soon", retry_after=1, reason="starting")
        if self.stage == "stopping":
            raise HttpError(503, STOPPING, retry_after=5, reason="stopping")

    @asynccontextmanager
    async def accepted_request(self) -> AsyncIterator[None]:
        """Take a request in, and see it off; one that is not answered when the grace is over is refused after all."""
        self.check()
        self.accepted += 1
        self._idle.clear()
        try:
            async with self._working.until_interrupted("the service has stopped before there was a result"):
                yield
        finally:
            self.accepted -= 1
            if not self.accepted:
                self._idle.set()

    @asynccontextmanager
    async def arriving_body(self) -> AsyncIterator[None]:
        """Read a body; what has not arrived whole when the service is told to stop is refused."""
        async with self._arriving.until_interrupted(STOPPING):
            yield

    def refuse_arriving(self) -> None:
        """Refuse every request whose body is still arriving."""
        self._arriving.interrupt()

    def refuse_unanswered(self) -> None:
        """Refuse every request that has no answer yet."""
        self._working.interrupt()

    async def idle(self, seconds: float) -> bool:
        """Wait until every accepted request has its answer; say whether that was in time."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True


class _Interruptible:
    """Work that can be ended from outside, once and for all."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._over = False

    @asynccontextmanager
    async def until_interrupted(self, sentence: str) -> AsyncIterator[None]:
        """Do something, unless it is interrupted, which is a `HttpError`."""
        scope = asyncio.timeout(0 if self._over else None)
        self._scopes.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise HttpError(503, sentence, retry_after=5, reason="stopping") from None
        finally:
            self._scopes.discard(scope)

    def interrupt(self) -> None:
        self._over = True
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())
