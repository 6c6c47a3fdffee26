"""What every request passes: its id, the token, headers that keep browsers safe, one line in the log, plain errors."""

import asyncio
import hmac
import json
import logging
import re
import secrets
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.errors import VitrailError
from vitrail.serving.counters import Counters
from vitrail.serving.hosts import Hosts, same_origin
from vitrail.serving.http_errors import ClientDisconnected, HttpError, as_http_error
from vitrail.serving.lifecycle import Lifecycle
from vitrail.serving.settings import MEGABYTE, Settings

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
OPEN = ("/", "/healthz", "/readyz", "/samples")
OPEN_BELOW = ("/assets/", "/samples/")
WORK = ("/v1/predict", "/v1/embed", "/v1/explain")
"""What a service that starts or stops does not take, and what it finishes before it ends."""
DRAINED, DRAIN_SECONDS, STOPPING_DRAIN_SECONDS = 64 * MEGABYTE, 3.0, 0.3
"""How much of a refused body is still read: a client that is cut off while it sends never sees the answer."""
PIECE = 256 * 1024
"""An answer is handed on in pieces of so many bytes, so that what a client does not take is seen, and not piled up."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MESSAGES = {404: "there is nothing at this address", 405: "this address does not take this method"}
_log = logging.getLogger("vitrail.serving")


def as_json(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with JSON in ASCII, which holds any text that a client sent, also what UTF-8 does not."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return Response(body, status, headers, media_type="application/json")


class Middleware:
    """The outermost part of the service."""

    def __init__(
        self, inside: ASGIApp, routes: set[str], settings: Settings, counters: Counters, lifecycle: Lifecycle
    ) -> None:
        self._inside, self._routes = inside, routes
        self._settings, self._counters, self._lifecycle = settings, counters, lifecycle
        self._hosts = Hosts(settings.host, settings.allow_hosts)
        self._token = None if settings.token is None else settings.token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # no WebSockets here
            await send({"type": "websocket.close"})
            return
        await _Visit(self, scope, receive, send).take_place()

    def label(self, path: str) -> str:
        """Return what the metrics call an address: one of few words, whatever a client asks for."""
        return path if path in self._routes else next((p for p in OPEN_BELOW if path.startswith(p)), "other")

    def check_token(self, path: str, headers: Headers) -> None:
        """Refuse whoever does not know the token."""
        if self._token is None or path in OPEN or path.startswith(OPEN_BELOW):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Compared in constant time, so that the time taken says nothing about how much was right.
        right = hmac.compare_digest(given.strip().encode(), self._token)
        if scheme.lower() != "bearer" or not right:
            raise HttpError(401, "this service wants a token: send 'Authorization: Bearer TOKEN'", reason="token")

    def check_site(self, method: str, headers: Headers) -> None:
        """Refuse what a page of another site makes a reader's browser send; a browser says so, and pages cannot lie."""
        if method in ("GET", "HEAD", "OPTIONS"):  # changes nothing, and another site's page cannot read the response
            return
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is not None:
            own = site in ("same-origin", "none")
        else:  # browsers leave it away where there is neither TLS nor localhost
            own = origin is None or same_origin(origin, headers.get("host"))
        if not own and "*" not in self._settings.origins and origin not in self._settings.origins:
            raise HttpError(
                403, "pages of other sites may not use this service; --origins allows them", reason="origin"
            )

    async def inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through to its route."""
        headers = Headers(scope=scope)
        self._hosts.check(headers.get("host"))
        self.check_token(scope["path"], headers)
        self.check_site(scope["method"], headers)
        if scope["path"] not in WORK or scope["method"] != "POST":
            await self._inside(scope, receive, send)
            return
        async with self._lifecycle.accepted_request():
            await self._inside(scope, receive, send)

    def record(self, visit: "_Visit") -> None:
        """Count a request and write its line."""
        seconds, route = perf_counter() - visit.started, self.label(visit.path)
        self._counters.requests.labels(route, str(visit.status)).inc()
        self._counters.request_seconds.labels(route).observe(seconds)
        if self._settings.log_requests:
            said = {
                "request_id": visit.id,
                "method": visit.method[:20],
                "path": visit.path[:200],
                "status": visit.status,
                "seconds": round(seconds, 4),
                "bytes_in": visit.received,
                "bytes_out": visit.sent,
                **({} if visit.error is None else {"error": visit.error}),
            }
            _log.info("request", extra={"fields": said})

    def refused(self, reason: str) -> None:
        """Count a refusal."""
        self._counters.refused.labels(reason).inc()

    @property
    def counters(self) -> Counters:
        """What is counted."""
        return self._counters

    @property
    def patience(self) -> float:
        """Seconds for which a client may take nothing of its answer."""
        return self._settings.upload_time

    @property
    def stopping(self) -> bool:
        """Whether connections are not to be kept."""
        return self._lifecycle.stage == "stopping"


class _Visit:
    """One request, from its head to the last byte of its answer."""

    def __init__(self, middleware: Middleware, scope: Scope, receive: Receive, send: Send) -> None:
        self._middleware, self._scope, self._receive, self._send = middleware, scope, receive, send
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        self.id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.started, self.status, self.received, self.sent = perf_counter(), 0, 0, 0
        self.error: str | None = None
        self._body_ended = "content-length" not in headers and "transfer-encoding" not in headers
        self._waits_to_send = "expect" in headers

    async def take_place(self) -> None:
        self._scope["app"] = self._middleware  # the router then raises what is not found
        with self._middleware.counters.in_flight.track_inprogress():
            try:
                await self._answer()
            except ClientDisconnected as left:
                self.status, self.error = 499, str(left) or "the client left"
        self._middleware.record(self)

    async def _answer(self) -> None:
        try:
            await self._middleware.inside(self._scope, self.receive, self.send)
        except ClientDisconnected:
            raise
        except Exception as error:
            await self._say(self._refusal(error))

    def _refusal(self, error: Exception) -> HttpError:
        """Make of anything a status and a sentence; what we did not foresee goes to the log with its traceback."""
        if isinstance(error, HttpError):
            return error
        if isinstance(error, VitrailError):
            return as_http_error(error)
        if isinstance(error, HTTPException):
            sentence = _MESSAGES.get(error.status_code, "the request cannot be answered")
            return HttpError(error.status_code, sentence, allow=(error.headers or {}).get("Allow"))
        _log.error("fault", exc_info=error, extra={"fields": {"request_id": self.id, "path": self.path[:200]}})
        return HttpError(500, "this is a fault of the service, and its log has the details", reason="fault")

    async def _say(self, refusal: HttpError) -> None:
        self.error = refusal.sentence
        self._middleware.refused(refusal.reason)
        if self.status:  # the answer has begun, so there is no place left to say it
            return
        headers = {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
        if refusal.status == 401:
            headers["www-authenticate"] = "Bearer"
        if refusal.allow is not None:
            headers["allow"] = refusal.allow
        response = as_json({"error": refusal.sentence, "request_id": self.id}, refusal.status, headers)
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
            if not self._body_ended and not self._waits_to_send:
                await self._drain()
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.id
            for name, value in SAFE.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", "no-store")
            if self._middleware.stopping:
                headers["connection"] = "close"
            await self._hand_on(message)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        for start in range(0, max(len(body), 1), PIECE):
            piece = body[start : start + PIECE]
            await self._hand_on({**message, "body": piece, "more_body": more or start + PIECE < len(body)})
            self.sent += len(piece)

    async def _hand_on(self, message: Message) -> None:
        seconds = self._middleware.patience
        try:
            async with asyncio.timeout(seconds):
                await self._send(message)
        except TimeoutError:
            raise ClientDisconnected(f"the client took nothing of its answer for {seconds:g} s") from None

    async def _drain(self) -> None:
        """Read what the client still sends, within limits."""
        before = self.received
        try:
            async with asyncio.timeout(STOPPING_DRAIN_SECONDS if self._middleware.stopping else DRAIN_SECONDS):
                while not self._body_ended and self.received - before < DRAINED:
                    await self.receive()
        except TimeoutError:
            return
