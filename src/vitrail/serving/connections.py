"""Connection limits, in total and per client.

An idle connection (no complete headers yet, or kept alive) costs the client nothing, so an attacker can hold hundreds.
At the limit, the connection that has been idle longest is closed for the new one. A new connection is only rejected
when every open one has an active request.
"""

import ipaddress
import logging
import os
from collections import OrderedDict
from time import monotonic
from typing import Protocol

from vitrail.serving.lifecycle import Counters

RESERVED = 64
"""File descriptors reserved for reloads, decoders and connections that are being closed."""
MIN_CONNECTIONS = 8
LOG_INTERVAL = 10.0
"""Seconds between two log lines with the same message."""
_log = logging.getLogger("vitrail.serving")


def client_key(host: str) -> str:
    """Return what identifies a client: the IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:  # IPv4 clients of a socket bound to ::
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class Connection(Protocol):
    """An open connection."""

    def close_idle(self) -> None:
        """Close to make space for a new connection."""


class Connections:
    """All connections of a service."""

    def __init__(self, limit: int, client_limit: int, counters: Counters) -> None:
        self.limit, self.client_limit = limit, min(limit, client_limit)
        self._counters = counters
        self._open: dict[Connection, str] = {}
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        self._per_client: dict[str, int] = {}

    def admit(self, connection: Connection, client: str) -> bool:
        """Register a connection, closing an idle one if needed; return False if it must be rejected."""
        client_full = self._per_client.get(client, 0) >= self.client_limit
        if client_full or len(self._open) >= self.limit:
            oldest = next((idle for idle in self._idle if not client_full or self._open[idle] == client), None)
            rate_limited_log.warn("too many connections", client=client, open=len(self._open))
            if oldest is None:
                self._counters.refused.labels("connections").inc()
                return False
            self._counters.refused.labels("idle").inc()
            self.release(oldest)
            oldest.close_idle()
        self._open[connection] = client
        self._per_client[client] = self._per_client.get(client, 0) + 1
        self.wait(connection)
        return True

    def wait(self, connection: Connection) -> None:
        """Mark a connection as idle."""
        if connection in self._open and connection not in self._idle:
            self._idle[connection] = None

    def work(self, connection: Connection) -> None:
        """Mark a connection as active."""
        self._idle.pop(connection, None)

    def release(self, connection: Connection) -> None:
        """Remove a connection; idempotent."""
        client = self._open.pop(connection, None)
        self._idle.pop(connection, None)
        if client is not None:
            self._per_client[client] -= 1
            if not self._per_client[client]:
                del self._per_client[client]


class RateLimitedLog:
    """Logs each message at most once per interval, with a count of the suppressed ones."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}

    def warn(self, message: str, **fields: object) -> None:
        """Log a warning, unless the same message was logged within the interval."""
        suppressed = self.due(message)
        if suppressed is not None:
            _log.warning(message, extra={"fields": {**fields, **({"suppressed": suppressed} if suppressed else {})}})

    def due(self, message: str) -> int | None:
        """Return how often a message was suppressed since its last line; None if it is still suppressed."""
        now = monotonic()
        last, suppressed = self._last.get(message, (-LOG_INTERVAL, 0))
        if now - last < LOG_INTERVAL:
            self._last[message] = last, suppressed + 1
            return None
        if len(self._last) > 1000:  # clients influence the messages, so bound the table
            self._last.clear()
        self._last[message] = now, 0
        return suppressed


rate_limited_log = RateLimitedLog()


class RateLimitFilter(logging.Filter):
    """Passes each message of a library once per interval."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record."""
        return rate_limited_log.due(f"{record.name}: {record.msg}") is not None


def connection_limit(requested: int) -> int:
    """Return how many connections the file descriptor limit allows, after trying to raise it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return requested
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 32
    needed = requested + used + RESERVED
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return requested
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    limit = max(MIN_CONNECTIONS, min(requested, allowed - used - RESERVED))
    if limit < requested:
        _log.warning("few file descriptors", extra={"fields": {"connections": limit, "requested": requested}})
    return limit
