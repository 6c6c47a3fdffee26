"""Host header and origin checks.

A malicious page can point its own host name at this machine (DNS rebinding) and read responses of a service without a
token. The browser sends that name as Host, and a page cannot change it; so only known names are accepted.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable

from vitrail.serving.http_errors import HttpError

LOCAL = ("localhost", "127.0.0.1", "::1")
ANY = "*"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/\s]+)(?::\d{1,5})?")


class Hosts:
    """The accepted host names and addresses."""

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        names = {name.lower().rstrip(".") for name in (*LOCAL, bound, *allowed)}
        self._any = ANY in names
        # Bound to all addresses, accept any IP address as host: only names can be rebound.
        self._any_address = _is_unspecified(bound)
        if self._any_address:
            names.add(socket.gethostname().lower())
        self._names = frozenset(names)

    def check(self, host: str | None) -> None:
        """Raise 403 for another host; a request without Host does not come from a browser."""
        if host is None or self._any:
            return
        match = _HOST.fullmatch(host.strip())
        name = "" if match is None else match[1].strip("[]").lower().rstrip(".")
        if name in self._names or (self._any_address and _is_address(name)):
            return
        raise HttpError(403, f"the host {host[:80]!r} is not allowed; add it with --allow-host", reason="host")


def same_origin(origin: str, host: str | None) -> bool:
    """Return whether a page has the service's host and port; the scheme may differ behind a TLS proxy."""
    scheme, _, authority = origin.partition("://")
    return scheme in ("http", "https") and host is not None and authority.lower() == host.strip().lower()


def _is_unspecified(bound: str) -> bool:
    """Return whether an address means all interfaces, in any notation (0, 0.0.0.0, ::)."""
    try:
        return bound in ("", "0") or ipaddress.ip_address(bound).is_unspecified
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
