"""For which host names the service answers, and from which pages.

A page elsewhere can have its own name point to this machine (DNS rebinding), and then reads whatever a service without
a token says. The browser sends that name as Host, and no page can change it; so only known names are answered.
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
    """The names and addresses for which the service answers."""

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        named = {name.lower().rstrip(".") for name in (*LOCAL, bound, *allowed)}
        self._every = ANY in named
        # Bound to all addresses, it answers for each of them; a name that somebody else can define is no address.
        self._every_address = _is_everywhere(bound)
        if self._every_address:
            named.add(socket.gethostname().lower())
        self._named = frozenset(named)

    def check(self, host: str | None) -> None:
        """Refuse a request for another host; one that names none comes from no browser."""
        if host is None or self._every:
            return
        found = _HOST.fullmatch(host.strip())
        name = "" if found is None else found[1].strip("[]").lower().rstrip(".")
        if name in self._named or (self._every_address and _is_address(name)):
            return
        raise HttpError(
            403, f"this service does not answer for the host {host[:80]!r}; --allow-host allows it", reason="host"
        )


def same_origin(origin: str, host: str | None) -> bool:
    """Say whether a page is the service's own: the same host and port; TLS may end at a proxy before it."""
    scheme, _, place = origin.partition("://")
    return scheme in ("http", "https") and host is not None and place.lower() == host.strip().lower()


def _is_everywhere(bound: str) -> bool:
    """Say whether an address stands for all of the machine; 0 and 0:0:0:0:0:0:0:0 are other ways to write it."""
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
