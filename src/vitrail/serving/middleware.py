"""Middleware around every request: host checks, request id, token, security headers, access log, error responses.

A malicious page can point its own host name at this machine (DNS rebinding) and read responses of a service without a
token. The browser sends that name as Host, and a page cannot change it; so only known names are accepted.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.errors import VitrailError
from vitrail.serving.http_errors import ClientDisconnected, HttpError, as_http_error, method_not_allowed
from vitrail.serving.lifecycle import Counters, Lifecycle
from vitrail.serving.settings import MEGABYTE, Settings

LOCAL = ("localhost", "127.0.0.1", "::1")
ANY = "*"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/\s]+)(?::\d{1,5})?")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
PUBLIC = ("/", "/healthz", "/readyz", "/samples")
PUBLIC_PREFIXES = ("/assets/", "/samples/")
INFERENCE = ("/v1/predict", "/v1/embed", "/v1/explain")
"""Inference routes: refused while starting or stopping, and finished before shutdown."""
DRAIN_BYTES, DRAIN_SECONDS, STOPPING_DRAIN_SECONDS = 64 * MEGABYTE, 3.0, 0.3
"""How much of a refused body is still read: a client cut off while sending never sees the response."""
CHUNK = 256 * 1024
"""Responses are sent in chunks of this many bytes, so that a client that stops reading is noticed."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("vitrail.serving")


# ── hosts ──


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


# ── middleware ──


def as_json(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an ASCII JSON response; escaping covers client text that is not valid UTF-8."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return Response(body, status, headers, media_type="application/json")


class Middleware:
    """The outermost ASGI layer of the service."""

    def __init__(
        self, app: ASGIApp, routes: set[str], settings: Settings, counters: Counters, lifecycle: Lifecycle
    ) -> None:
        self._app, self._routes = app, routes
        self._settings, self._counters, self._lifecycle = settings, counters, lifecycle
        self._hosts = Hosts(settings.host, settings.allow_hosts)
        self._token = None if settings.token is None else settings.token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":  # WebSockets are not supported
            await send({"type": "websocket.close"})
            return
        await _Exchange(self, scope, receive, send).run()

    def label(self, path: str) -> str:
        """Return the metrics label of a path; unknown paths share one label."""
        return path if path in self._routes else next((p for p in PUBLIC_PREFIXES if path.startswith(p)), "other")

    def check_token(self, path: str, headers: Headers) -> None:
        """Raise 401 unless the request carries the token."""
        if self._token is None or path in PUBLIC or path.startswith(PUBLIC_PREFIXES):
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Constant-time comparison, so that timing reveals nothing about the token.
        matches = hmac.compare_digest(token.strip().encode(), self._token)
        if scheme.lower() != "bearer" or not matches:
            raise HttpError(401, "missing or wrong token: send 'Authorization: Bearer TOKEN'", reason="token")

    def check_site(self, method: str, headers: Headers) -> None:
        """Raise 403 for cross-site browser requests (CSRF); pages cannot forge these headers."""
        if method in ("GET", "HEAD", "OPTIONS"):  # safe methods; another site cannot read the response
            return
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is not None:
            same_site = site in ("same-origin", "none")
        else:  # browsers omit it without TLS, except on localhost
            same_site = origin is None or same_origin(origin, headers.get("host"))
        if not same_site and "*" not in self._settings.origins and origin not in self._settings.origins:
            raise HttpError(403, "cross-site requests are not allowed; add the site with --origins", reason="origin")

    async def call_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it to its route."""
        headers = Headers(scope=scope)
        self._hosts.check(headers.get("host"))
        self.check_token(scope["path"], headers)
        self.check_site(scope["method"], headers)
        if scope["path"] not in INFERENCE or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        async with self._lifecycle.accepted_request():
            await self._app(scope, receive, send)

    def record(self, exchange: "_Exchange") -> None:
        """Count and log a finished request."""
        seconds, route = perf_counter() - exchange.started, self.label(exchange.path)
        self._counters.requests.labels(route, str(exchange.status)).inc()
        self._counters.request_seconds.labels(route).observe(seconds)
        if self._settings.log_requests:
            fields = {
                "request_id": exchange.id,
                "method": exchange.method[:20],
                "path": exchange.path[:200],
                "status": exchange.status,
                "seconds": round(seconds, 4),
                "bytes_in": exchange.received,
                "bytes_out": exchange.sent,
                **({} if exchange.error is None else {"error": exchange.error}),
            }
            _log.info("request", extra={"fields": fields})

    def count_error(self, reason: str) -> None:
        """Count an error response."""
        self._counters.refused.labels(reason).inc()

    @property
    def counters(self) -> Counters:
        """The service's metrics."""
        return self._counters

    @property
    def write_timeout(self) -> float:
        """Seconds a client may stop reading its response."""
        return self._settings.upload_time

    @property
    def stopping(self) -> bool:
        """Whether to close connections after their response."""
        return self._lifecycle.stage == "stopping"


class _Exchange:
    """One request, from its headers to the last byte of the response."""

    def __init__(self, middleware: Middleware, scope: Scope, receive: Receive, send: Send) -> None:
        self._middleware, self._scope, self._receive, self._send = middleware, scope, receive, send
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        self.id = client_id if _ID.fullmatch(client_id) else secrets.token_hex(8)
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.started, self.status, self.received, self.sent = perf_counter(), 0, 0, 0
        self.error: str | None = None
        self._body_ended = "content-length" not in headers and "transfer-encoding" not in headers
        self._expects_continue = "expect" in headers

    async def run(self) -> None:
        self._scope["app"] = self._middleware  # makes the router raise on unknown paths
        with self._middleware.counters.in_flight.track_inprogress():
            try:
                await self._respond()
            except ClientDisconnected as left:
                self.status, self.error = 499, str(left) or "the client disconnected"
        self._middleware.record(self)

    async def _respond(self) -> None:
        try:
            await self._middleware.call_app(self._scope, self.receive, self.send)
        except ClientDisconnected:
            raise
        except Exception as error:
            await self._send_error(self._as_http_error(error))

    def _as_http_error(self, error: Exception) -> HttpError:
        """Map any exception to a status and a message; log unexpected ones with their traceback."""
        if isinstance(error, HttpError):
            return error
        if isinstance(error, VitrailError):
            return as_http_error(error)
        if isinstance(error, HTTPException):
            if error.status_code == 405:
                return method_not_allowed((error.headers or {}).get("Allow", ""))
            return HttpError(error.status_code, "not found" if error.status_code == 404 else "the request failed")
        _log.error("fault", exc_info=error, extra={"fields": {"request_id": self.id, "path": self.path[:200]}})
        return HttpError(500, "internal error; see the service's log", reason="fault")

    async def _send_error(self, error: HttpError) -> None:
        self.error = error.message
        self._middleware.count_error(error.reason)
        if self.status:  # the response has started, so the error cannot be sent
            return
        headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        if error.allow is not None:
            headers["allow"] = error.allow
        response = as_json({"error": error.message, "request_id": self.id}, error.status, headers)
        await response(self._scope, self.receive, self.send)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.received += len(message.get("body", b""))
            self._body_ended = not message.get("more_body", False)
        else:
            self._body_ended = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if not self._body_ended and not self._expects_continue:
                await self._drain()
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.id
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", "no-store")
            if self._middleware.stopping:
                headers["connection"] = "close"
            await self._send_in_time(message)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        for start in range(0, max(len(body), 1), CHUNK):
            chunk = body[start : start + CHUNK]
            await self._send_in_time({**message, "body": chunk, "more_body": more or start + CHUNK < len(body)})
            self.sent += len(chunk)

    async def _send_in_time(self, message: Message) -> None:
        seconds = self._middleware.write_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._send(message)
        except TimeoutError:
            raise ClientDisconnected(f"the client stopped reading its response for {seconds:g} s") from None

    async def _drain(self) -> None:
        """Read the rest of the request body, within limits."""
        before = self.received
        try:
            async with asyncio.timeout(STOPPING_DRAIN_SECONDS if self._middleware.stopping else DRAIN_SECONDS):
                while not self._body_ended and self.received - before < DRAIN_BYTES:
                    await self.receive()
        except TimeoutError:
            return
