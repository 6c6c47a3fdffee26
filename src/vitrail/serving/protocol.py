"""uvicorn's HTTP/1.1 protocol with limits per connection: slots, header timeout, event loop time."""

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
"""h11 events (headers, body chunks) parsed per turn, which takes about half a millisecond."""
PAUSE = 0.001
"""Seconds between two turns, left to other connections and compute threads. In chunks of 4 kB a client can still send
60 MB/s."""
ERROR_READ_TIME = 1.0
"""Seconds a rejected client has to read the error."""
MAX_ERROR_READERS = 64
"""Rejected clients that may read their error at the same time; beyond it, connections are closed at once."""


class ReadScheduler:
    """Round-robin over connections with more data than one turn may parse, with pauses in between."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[BoundedProtocol, None] = OrderedDict()
        self._scheduled = False

    def add(self, protocol: "BoundedProtocol") -> None:
        """Queue a connection for another turn."""
        self._waiting[protocol] = None
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(PAUSE, self._next)

    def remove(self, protocol: "BoundedProtocol") -> None:
        """Remove a closed connection."""
        self._waiting.pop(protocol, None)

    def _next(self) -> None:
        self._scheduled = False
        if self._waiting:
            protocol, _ = self._waiting.popitem(last=False)
            protocol.handle_events()
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(PAUSE, self._next)


class Bounds:
    """State shared by all connections of a service."""

    def __init__(self, connections: Connections, head_time: float) -> None:
        self.connections, self.head_time = connections, head_time
        self.scheduler, self.error_readers = ReadScheduler(), 0


class _BoundedReader(h11.Connection):
    """h11's parser, which reports NEED_DATA once its turn is used up."""

    left = EVENTS
    stopped = False

    def next_event(self) -> Any:
        if self.left <= 0:
            self.stopped = True
            return h11.NEED_DATA
        self.left -= 1
        return super().next_event()


class _PausableFlow(FlowControl):
    """Does not resume reading while data is left to parse."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class BoundedProtocol(H11Protocol):
    """One connection."""

    bounds: ClassVar[Bounds]
    """Set in a subclass; uvicorn creates one instance per connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = self._reader = _BoundedReader(h11.SERVER)
        self._rejected = False
        self._timer: asyncio.TimerHandle | None = None
        self._last_timer: asyncio.TimerHandle | None = None

    # ── connection slots ──

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection slot, or reject the client."""
        super().connection_made(transport)
        self.flow = self._flow = _PausableFlow(transport)
        if self.bounds.connections.admit(self, client_key(self.client[0] if self.client else "")):
            self._update_timer()
        else:
            self._reject(503, "too many connections; try again soon", "retry-after: 1")

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the slot."""
        self.bounds.connections.release(self)
        self.bounds.scheduler.remove(self)
        self._stop_timer()
        if self._last_timer is not None:
            self._last_timer.cancel()
        if self._rejected:
            self.bounds.error_readers -= 1
        super().connection_lost(exc)

    def close_idle(self) -> None:
        """Close an idle connection to make space for a new one."""
        self._stop_timer()
        self.transport.close()

    def _reject(self, status: int, message: str, *more: str) -> None:
        """Send an error before any request and stop reading; close at once if too many clients are being rejected."""
        self._rejected = True
        self.bounds.error_readers += 1
        self.bounds.connections.release(self)
        body = json.dumps({"error": message, "request_id": secrets.token_hex(8)}).encode()
        lines = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "connection: close", f"content-length: {len(body)}"
        head = "\r\n".join((*lines, "content-type: application/json", *more, "", ""))
        self.transport.write(head.encode() + body)
        # A client that is still sending would not see the response if the connection were closed at once.
        if self.bounds.error_readers > MAX_ERROR_READERS or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._last_timer = self.loop.call_later(ERROR_READ_TIME, self.transport.abort)

    def on_response_complete(self) -> None:
        """Wait for the next request; if an unread body is still arriving, only briefly."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._last_timer = self.loop.call_later(ERROR_READ_TIME, self.transport.abort)

    def shutdown(self) -> None:
        """Close when the service stops."""
        if self._rejected:
            self.transport.abort()
        else:
            super().shutdown()

    # ── header timeout ──

    def _update_timer(self) -> None:
        """Limit the time from the first byte of a request (or the connect) to the end of its headers."""
        if self._last_timer is not None and self.conn.their_state is not h11.SEND_BODY:
            self._last_timer.cancel()  # the unread body has ended
            self._last_timer = None
        idle = self.conn.their_state is h11.IDLE
        if not idle:
            self._stop_timer()
            self.bounds.connections.work(self)
        elif self._timer is None and (self.cycle is None or self.conn.trailing_data[0]):
            self._timer = self.loop.call_later(self.bounds.head_time, self._on_header_timeout)
        if idle:
            self.bounds.connections.wait(self)

    def _on_header_timeout(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
            message = f"the request headers did not arrive within {self.bounds.head_time:g} s"
            self._reject(408, message)
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ── turns ──

    def data_received(self, data: bytes) -> None:
        """Parse as much of the data as one turn allows."""
        if self._rejected:
            return
        if self._flow.held:  # arrived although reading is paused
            self.transport.pause_reading()
            self.conn.receive_data(data)
        else:
            super().data_received(data)

    def handle_events(self) -> None:
        """Parse one turn's worth of events; pause the client until the next turn if more are left."""
        if self.transport.is_closing() or self._rejected:
            return
        self._reader.left, self._reader.stopped = EVENTS, False
        if self._flow.held:
            self._flow.held = False
            self._flow.resume_reading()
        super().handle_events()
        if self.transport.is_closing():
            return
        self._update_timer()
        if self._reader.stopped:
            self._flow.pause_reading()
            self._flow.held = True
            self.bounds.scheduler.add(self)
