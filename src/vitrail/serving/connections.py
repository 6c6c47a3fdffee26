"""How many connections there may be, in all and for one client, and which one gives way where there are too many.

A connection without a request under way (its head has not arrived, or it is kept for later) costs its client nothing,
so hundreds are held by whoever means harm. Where there is no room left, the one of these that has waited longest is
closed for a new one; only where every connection has a request under way is the new one told to come again.
"""

import ipaddress
import logging
import os
from collections import OrderedDict
from time import monotonic
from typing import Protocol

from vitrail.serving.counters import Counters

RESERVED = 64
"""File descriptors for what else is opened: bundles that are reloaded, decoders, connections about to give way."""
FEWEST = 8
TELL_EVERY = 10.0
"""Seconds between two lines of the log about the same trouble."""
_log = logging.getLogger("vitrail.serving")


def client_key(host: str) -> str:
    """Return what counts as one client: an address, or of IPv6 the 64 bits that one network is given."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:  # as a service bound to :: sees the clients of IPv4
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class Connection(Protocol):
    """What is counted here."""

    def give_way(self) -> None:
        """Close, because others need the place."""


class Connections:
    """All connections of a service."""

    def __init__(self, most: int, most_of_one: int, counters: Counters) -> None:
        self.most, self.most_of_one = most, min(most, most_of_one)
        self._counters = counters
        self._open: dict[Connection, str] = {}
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._of: dict[str, int] = {}

    def admit(self, connection: Connection, client: str) -> bool:
        """Count a new connection, for which another may have to give way; False where there is no room at all."""
        crowded = self._of.get(client, 0) >= self.most_of_one
        if crowded or len(self._open) >= self.most:
            oldest = next((one for one in self._waiting if not crowded or self._open[one] == client), None)
            told.warn("too many connections", client=client, open=len(self._open))
            if oldest is None:
                self._counters.refused.labels("connections").inc()
                return False
            self._counters.refused.labels("idle").inc()
            self.release(oldest)
            oldest.give_way()
        self._open[connection] = client
        self._of[client] = self._of.get(client, 0) + 1
        self.wait(connection)
        return True

    def wait(self, connection: Connection) -> None:
        """Note that a connection has no request under way."""
        if connection in self._open and connection not in self._waiting:
            self._waiting[connection] = None

    def work(self, connection: Connection) -> None:
        """Note that a connection has a request under way."""
        self._waiting.pop(connection, None)

    def release(self, connection: Connection) -> None:
        """Forget a connection; again is no harm."""
        client = self._open.pop(connection, None)
        self._waiting.pop(connection, None)
        if client is not None:
            self._of[client] -= 1
            if not self._of[client]:
                del self._of[client]


class Told:
    """What the log was told lately: trouble that comes ten thousand times is one line in ten seconds, with a count."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}

    def warn(self, what: str, **fields: object) -> None:
        """Write a warning, unless the same one was written just now."""
        more = self.due(what)
        if more is not None:
            _log.warning(what, extra={"fields": {**fields, **({"not_logged_before": more} if more else {})}})

    def due(self, what: str) -> int | None:
        """Return how often something was not told since it was told last; None where it is not to be told again yet."""
        now = monotonic()
        last, silent = self._last.get(what, (-TELL_EVERY, 0))
        if now - last < TELL_EVERY:
            self._last[what] = last, silent + 1
            return None
        if len(self._last) > 1000:  # messages may have anything in them
            self._last.clear()
        self._last[what] = now, 0
        return silent


told = Told()


class RateLimitFilter(logging.Filter):
    """Lets a library's complaint pass once in ten seconds."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record is written."""
        return told.due(f"{record.name}: {record.msg}") is not None


def room_for(wanted: int) -> int:
    """Return for how many connections there are file descriptors, after asking the system for more."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 32
    needed = wanted + used + RESERVED
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return wanted
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    room = max(FEWEST, min(wanted, allowed - used - RESERVED))
    if room < wanted:
        _log.warning("few file descriptors", extra={"fields": {"connections": room, "wanted": wanted}})
    return room
