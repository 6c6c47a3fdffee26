"""Where a service stands between its start and its end, and how many requests it still owes an answer."""

import asyncio
from typing import Literal

from vitrail.serving.refusal import Refusal

Stage = Literal["starting", "ready", "stopping"]


class Life:
    """The stage of a service, and what it has accepted."""

    def __init__(self) -> None:
        self.stage: Stage = "starting"
        self.accepted = 0
        """Requests for models that were let in and are not answered yet."""
        self._idle = asyncio.Event()
        self._idle.set()

    def check(self) -> None:
        """Refuse new work where there is none to be taken."""
        if self.stage == "starting":
            raise Refusal(503, "the models are being warmed up; try again soon", retry_after=1, reason="starting")
        if self.stage == "stopping":
            raise Refusal(503, "the service is stopping and takes no new work", retry_after=5, reason="stopping")

    def enter(self) -> None:
        """Take a request in."""
        self.check()
        self.accepted += 1
        self._idle.clear()

    def leave(self) -> None:
        """See a request off."""
        self.accepted -= 1
        if not self.accepted:
            self._idle.set()

    async def idle(self, seconds: float) -> bool:
        """Wait until every accepted request has its answer; say whether that was in time."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True
