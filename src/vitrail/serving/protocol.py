"""uvicorn's HTTP/1.1, with bounds on what one connection may take: places, time for a head, turns of the event loop."""

import asyncio
import json
import secrets
from collections import OrderedDict
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from vitrail.serving.connections import Connections, client_key

EVENTS = 25
"""Events (heads, pieces of bodies) that are read in one turn, which takes about half a millisecond."""
BREAK = 0.001
"""Seconds between two turns, for whatever else has arrived and for the threads that compute. In chunks of 4 kB a client
can still send 60 MB in a second."""
FAREWELL = 1.0
"""Seconds in which a client that is turned away may read why."""
FAREWELLS = 64
"""Clients that are told at the same time; more are cut off."""


class Turn:
    """Connections with more to read than one turn allows, which are read one after the other, with breaks."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[BoundedProtocol, None] = OrderedDict()
        self._called = False

    def add(self, protocol: "BoundedProtocol") -> None:
        """Let a connection have another turn, behind the others."""
        self._waiting[protocol] = None
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_later(BREAK, self._next)

    def remove(self, protocol: "BoundedProtocol") -> None:
        """Forget a connection that is closed."""
        self._waiting.pop(protocol, None)

    def _next(self) -> None:
        self._called = False
        if self._waiting:
            protocol, _ = self._waiting.popitem(last=False)
            protocol.handle_events()
        if self._waiting and not self._called:
            self._called = True
            asyncio.get_running_loop().call_later(BREAK, self._next)


class Bounds:
    """What all connections of a service share."""

    def __init__(self, connections: Connections, head_time: float) -> None:
        self.connections, self.head_time = connections, head_time
        self.turn, self.farewells = Turn(), 0


class _BoundedReader(h11.Connection):
    """h11's parser, which claims to need more data when it has read enough for one turn."""

    left = EVENTS
    stopped = False

    def next_event(self) -> Any:
        if self.left <= 0:
            self.stopped = True
            return h11.NEED_DATA
        self.left -= 1
        return super().next_event()


class _HeldFlow(FlowControl):
    """Reads nothing more while there is enough to parse."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class BoundedProtocol(H11Protocol):
    """One connection."""

    bounds: ClassVar[Bounds]
    """Set in a subclass, of which uvicorn makes one for each connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = self._reader = _BoundedReader(h11.SERVER)
        self._turned_away = False
        self._timer: asyncio.TimerHandle | None = None
        self._last_timer: asyncio.TimerHandle | None = None

    # ── places ──

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, or hear that there is none."""
        super().connection_made(transport)
        self.flow = self._flow = _HeldFlow(transport)
        if self.bounds.connections.admit(self, client_key(self.client[0] if self.client else "")):
            self._watch()
        else:
            self._turn_away(503, "there are too many connections; try again soon", "retry-after: 1")

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place."""
        self.bounds.connections.release(self)
        self.bounds.turn.remove(self)
        self._stop_timer()
        if self._last_timer is not None:
            self._last_timer.cancel()
        if self._turned_away:
            self.bounds.farewells -= 1
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Close a connection without a request, because others need its place."""
        self._stop_timer()
        self.transport.close()

    def _turn_away(self, status: int, sentence: str, *more: str) -> None:
        """Answer before anything was asked, and read no more; cut off at once who would be one too many to be told."""
        self._turned_away = True
        self.bounds.farewells += 1
        self.bounds.connections.release(self)
        body = json.dumps({"error": sentence, "request_id": secrets.token_hex(8)}).encode()
        lines = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "connection: close", f"content-length: {len(body)}"
        head = "\r\n".join((*lines, "content-type: application/json", *more, "", ""))
        self.transport.write(head.encode() + body)
        # A client that is still sending would not read an answer on a connection that is closed at once.
        if self.bounds.farewells > FAREWELLS or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._last_timer = self.loop.call_later(FAREWELL, self.transport.abort)

    def on_response_complete(self) -> None:
        """Wait for the next request, or, where a body is still being sent that nobody reads, not for long."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._last_timer = self.loop.call_later(FAREWELL, self.transport.abort)

    def shutdown(self) -> None:
        """Close in order, when the service ends."""
        if self._turned_away:
            self.transport.abort()
        else:
            super().shutdown()

    # ── time for a head ──

    def _watch(self) -> None:
        """Bound the time from the first byte of a request, or from the beginning, to the end of its head."""
        if self._last_timer is not None and self.conn.their_state is not h11.SEND_BODY:
            self._last_timer.cancel()  # the body that nobody reads has come to its end after all
            self._last_timer = None
        waits = self.conn.their_state is h11.IDLE
        if not waits:
            self._stop_timer()
            self.bounds.connections.work(self)
        elif self._timer is None and (self.cycle is None or self.conn.trailing_data[0]):
            self._timer = self.loop.call_later(self.bounds.head_time, self._head_is_late)
        if waits:
            self.bounds.connections.wait(self)

    def _head_is_late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
            sentence = f"the head of the request did not arrive within {self.bounds.head_time:g} s"
            self._turn_away(408, sentence)
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ── turns ──

    def data_received(self, data: bytes) -> None:
        """Read a turn's worth of what has arrived."""
        if self._turned_away:
            return
        if self._flow.held:  # has arrived although reading is paused
            self.transport.pause_reading()
            self.conn.receive_data(data)
        else:
            super().data_received(data)

    def handle_events(self) -> None:
        """Read a turn's worth of events; the rest waits for the next turn, and the client with it."""
        if self.transport.is_closing() or self._turned_away:
            return
        self._reader.left, self._reader.stopped = EVENTS, False
        if self._flow.held:
            self._flow.held = False
            self._flow.resume_reading()
        super().handle_events()
        if self.transport.is_closing():
            return
        self._watch()
        if self._reader.stopped:
            self._flow.pause_reading()
            self._flow.held = True
            self.bounds.turn.add(self)
