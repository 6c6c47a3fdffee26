"""Run the service: socket, signals, logging, graceful shutdown."""

import asyncio
import contextlib
import errno
import json
import logging
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any

import uvicorn

from vitrail.errors import ConfigError, VitrailError
from vitrail.serving.app import Service
from vitrail.serving.connections import Connections, RateLimitFilter, connection_limit, rate_limited_log
from vitrail.serving.http_errors import HttpError
from vitrail.serving.protocol import BoundedProtocol, Bounds
from vitrail.serving.settings import Settings

LINGER = 0.5
"""Seconds during which a stopping service still accepts connections and responds with 503."""
FINAL_DRAIN = 0.2
"""Seconds for the last open connections to receive their 503."""
ABORT_AFTER = 2.0
"""Seconds after shutdown before connections that are still reading a response are aborted."""
ACCEPT_BURST = 4
"""Connections accepted per event loop iteration. Closing idle ones to make space takes a few iterations, so some file
descriptors are kept in reserve."""
BACKLOG = 1024
"""Listen backlog of the socket once the service is ready."""
_log = logging.getLogger("vitrail.serving")


def serve(settings: Settings, *, started: float | None = None) -> None:
    """Serve until a signal stops it. `started` is when the program started, to report the startup time."""
    started_at = time.time() if started is None else started
    _configure_logging()
    listener = _bind(settings.host, settings.port)
    with listener, _ignore_sighup():
        _log.info("settings", extra={"fields": {"settings": settings.redacted()}})
        if settings.token is None and settings.host not in ("127.0.0.1", "::1", "localhost"):
            _log.warning("no token is set: anyone who can reach this address can use the models")
        service = Service(settings)
        connections = Connections(connection_limit(settings.connections), settings.client_connections, service.counters)

        class Protocol(BoundedProtocol):
            bounds = Bounds(connections, settings.head_time)

        config = uvicorn.Config(
            service.app,
            http=Protocol,
            proxy_headers=False,  # a local client could otherwise pretend to be many clients
            backlog=ACCEPT_BURST,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
        asyncio.run(_Server(config, service, listener, started_at).run_until_stopped())


class _Server(uvicorn.Server):
    """uvicorn's server, which finishes accepted requests before it stops."""

    def __init__(self, config: uvicorn.Config, service: Service, listener: socket.socket, started_at: float) -> None:
        super().__init__(config)
        self._service, self._listener, self._started_at = service, listener, started_at
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._startup_error: Exception | None = None
        """Why startup failed."""

    async def run_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_log_loop_error)
        self._create_task(self._warm_up())
        if _can_handle_sighup():
            self._loop.add_signal_handler(signal.SIGHUP, lambda: self._create_task(self._reload()))
        await self.serve(sockets=[self._listener])
        await self._service.stop()
        if self._startup_error is not None:
            raise self._startup_error
        _log.info("stopped")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as uvicorn calls it
        """Start a graceful shutdown on SIGTERM or Ctrl-C; a second Ctrl-C exits immediately."""
        if self._service.lifecycle.stage == "stopping" and sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        elif self._loop is not None and self._service.lifecycle.stage != "stopping":
            self._service.lifecycle.stage = "stopping"
            self._loop.call_soon_threadsafe(lambda: self._create_task(self._shut_down_gracefully()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections; abort those that do not read the rest of their response."""
        # uvicorn would cancel the running handlers and log that as an error.
        timer = asyncio.get_running_loop().call_later(ABORT_AFTER, self._abort_connections)
        await super().shutdown(sockets)
        timer.cancel()

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedProtocol):
                connection.transport.abort()

    async def _shut_down_gracefully(self) -> None:
        """Finish accepted requests, refuse new ones, then close."""
        lifecycle = self._service.lifecycle
        self._service.counters.ready.set(0)
        _log.info("stopping", extra={"fields": {"accepted": lifecycle.accepted}})
        lifecycle.refuse_arriving()
        _, in_time = await asyncio.gather(asyncio.sleep(LINGER), lifecycle.idle(self._service.settings.grace))
        if not in_time:
            _log.warning("grace period expired", extra={"fields": {"unfinished": lifecycle.accepted}})
            lifecycle.refuse_unfinished()
        for server in self.servers:  # no new connections; open ones still receive a 503
            server.close()
        await asyncio.sleep(FINAL_DRAIN)
        self.should_exit = True

    async def _warm_up(self) -> None:
        try:
            await asyncio.gather(self._service.start_decoders(), self._service.start())
        except HttpError:  # already logged
            self._startup_error = ConfigError("no decoder process can be started; is there enough memory?")
            self.should_exit = True
            return
        except Exception as error:
            self._startup_error, self.should_exit = error, True
            return
        while not self.started and not self.should_exit:
            await asyncio.sleep(0.005)
        with contextlib.suppress(OSError):  # closed in the meantime
            self._listener.listen(BACKLOG)
        if self._service.lifecycle.stage != "ready":  # stopped in the meantime
            return
        host, port = self._listener.getsockname()[:2]
        address = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        seconds = round(time.time() - self._started_at, 2)
        _log.info("ready", extra={"fields": {"address": address, "seconds": seconds}})
        try:
            print(f"ready after {seconds:g} s at {address}", flush=True)
        except OSError:  # stdout is closed; the log has the same line
            return

    async def _reload(self) -> None:
        try:
            _log.info("reloaded", extra={"fields": {"models": await self._service.registry.reload()}})
        except VitrailError as error:
            _log.error("reload: %s", error)

    def _create_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the event loop only keeps a weak reference
        task.add_done_callback(self._tasks.discard)


def _log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error outside of any request, such as running out of file descriptors; rate-limited."""
    rate_limited_log.warn(str(context.get("message")), error=str(context.get("exception")))


def _can_handle_sighup() -> bool:
    return hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def _ignore_sighup() -> Iterator[None]:
    """Ignore SIGHUP, which would kill the process, while the bundles are loading."""
    if not _can_handle_sighup():
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _bind(host: str, port: int) -> socket.socket:
    """Bind the port before loading the models, so that a port in use fails fast."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise _unknown_host(host) from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _unknown_host(host) from None
        raise ConfigError(
            f"port {port} of {host} cannot be used ({(error.strerror or str(error)).lower()}); choose another with "
            f"--port, or 0 for any free port"
        ) from None
    return listener


def _unknown_host(host: str) -> ConfigError:
    return ConfigError(f"{host!r} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all")


class _JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line, default=str)


def _configure_logging() -> None:
    """Send the service's log and uvicorn's warnings to stderr."""
    ours, others = logging.StreamHandler(sys.stderr), logging.StreamHandler(sys.stderr)
    others.addFilter(RateLimitFilter())  # clients can trigger "Invalid HTTP request received." at will
    for name, level, handler in (
        ("vitrail.serving", logging.INFO, ours),
        ("uvicorn", logging.WARNING, others),
        ("asyncio", logging.WARNING, others),
    ):
        handler.setFormatter(_JsonFormatter())
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
