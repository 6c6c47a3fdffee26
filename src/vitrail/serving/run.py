"""Running the service: the port, the signals, the log, from the start to an orderly end."""

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
from vitrail.serving.connections import Connections, RateLimitFilter, room_for, told
from vitrail.serving.http_errors import HttpError
from vitrail.serving.protocol import BoundedProtocol, Bounds
from vitrail.serving.settings import Settings

LINGER = 0.5
"""Seconds for which a service that stops still says so, instead of being gone at once."""
LAST_WORDS = 0.2
"""Seconds for those who were connected in the last moment to be told."""
CUT_OFF = 2.0
"""Seconds after which connections are cut off that have not taken all of their answer, when everything else is over."""
AT_ONCE = 4
"""Connections that are accepted in one round of the event loop. It takes some rounds until others have given way for
them, so there are file descriptors in reserve."""
QUEUED = 1024
"""Connections that the system holds until they are accepted."""
_log = logging.getLogger("vitrail.serving")


def serve(settings: Settings, *, started: float | None = None) -> None:
    """Serve until a signal asks for an end. `started` is when the program began, for the time it took to be ready."""
    began = time.time() if started is None else started
    _write_log()
    place = _bound(settings.host, settings.port)
    with place, _no_hangup():
        _log.info("settings", extra={"fields": {"settings": settings.shown()}})
        if settings.token is None and settings.host not in ("127.0.0.1", "::1", "localhost"):
            _log.warning("there is no token, so everybody who reaches this address can use the models")
        service = Service(settings)
        connections = Connections(room_for(settings.connections), settings.client_connections, service.counters)

        class Protocol(BoundedProtocol):
            bounds = Bounds(connections, settings.head_time)

        config = uvicorn.Config(
            service.app,
            http=Protocol,
            proxy_headers=False,  # anybody on this machine could claim to be many clients
            backlog=AT_ONCE,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
        asyncio.run(_Server(config, service, place, began).run_to_the_end())


class _Server(uvicorn.Server):
    """uvicorn's server, which ends only when what was accepted has its answer."""

    def __init__(self, config: uvicorn.Config, service: Service, place: socket.socket, began: float) -> None:
        super().__init__(config)
        self._service, self._place, self._began = service, place, began
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: Exception | None = None
        """Why no model answers."""

    async def run_to_the_end(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_tell_fault)
        self._begin(self._warm_up())
        if _has_hangup():
            self._loop.add_signal_handler(signal.SIGHUP, lambda: self._begin(self._reload()))
        await self.serve(sockets=[self._place])
        await self._service.stop()
        if self._fault is not None:
            raise self._fault
        _log.info("stopped")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as uvicorn calls it
        """Ask for an end, on SIGTERM and Ctrl-C; asked again by Ctrl-C, end at once."""
        if self._service.lifecycle.stage == "stopping" and sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        elif self._loop is not None and self._service.lifecycle.stage != "stopping":
            self._service.lifecycle.stage = "stopping"
            self._loop.call_soon_threadsafe(lambda: self._begin(self._wind_down()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections; who does not take what is left of an answer is cut off."""
        # uvicorn would cancel what still answers them, and log that as a fault.
        timer = asyncio.get_running_loop().call_later(CUT_OFF, self._cut_off)
        await super().shutdown(sockets)
        timer.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedProtocol):
                connection.transport.abort()

    async def _wind_down(self) -> None:
        """Finish what was accepted, refuse what comes, then close."""
        lifecycle = self._service.lifecycle
        self._service.counters.ready.set(0)
        _log.info("stopping", extra={"fields": {"accepted": lifecycle.accepted}})
        lifecycle.refuse_arriving()
        _, in_time = await asyncio.gather(asyncio.sleep(LINGER), lifecycle.idle(self._service.settings.grace))
        if not in_time:
            _log.warning("the grace is over", extra={"fields": {"unanswered": lifecycle.accepted}})
            lifecycle.refuse_unanswered()
        for listening in self.servers:  # nobody new; those who are connected still hear that it is over
            listening.close()
        await asyncio.sleep(LAST_WORDS)
        self.should_exit = True

    async def _warm_up(self) -> None:
        try:
            await asyncio.gather(self._service.start_decoders(), self._service.start())
        except HttpError:  # told already; nothing could be answered
            self._fault = ConfigError("no process that decodes images can be started; is there enough memory?")
            self.should_exit = True
            return
        except Exception as error:
            self._fault, self.should_exit = error, True
            return
        while not self.started and not self.should_exit:
            await asyncio.sleep(0.005)
        with contextlib.suppress(OSError):  # closed meanwhile
            self._place.listen(QUEUED)
        if self._service.lifecycle.stage != "ready":  # it has been told to stop meanwhile
            return
        host, port = self._place.getsockname()[:2]
        address = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        seconds = round(time.time() - self._began, 2)
        _log.info("ready", extra={"fields": {"address": address, "seconds": seconds}})
        try:
            print(f"ready after {seconds:g} s at {address}", flush=True)
        except OSError:  # whoever started it does not listen, and the log has said it, too
            return

    async def _reload(self) -> None:
        try:
            _log.info("reloaded", extra={"fields": {"models": await self._service.registry.reload()}})
        except VitrailError as error:
            _log.error("reload: %s", error)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop alone would not keep it alive
        task.add_done_callback(self._tasks.discard)


def _tell_fault(_: asyncio.AbstractEventLoop, fault: dict[str, Any]) -> None:
    """Write what went wrong outside of any request, such as file descriptors that run out, and not too often."""
    told.warn(str(fault.get("message")), error=str(fault.get("exception")))


def _has_hangup() -> bool:
    return hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def _no_hangup() -> Iterator[None]:
    """Let SIGHUP, which would end the process, do nothing while the bundles are being opened anyway."""
    if not _has_hangup():
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _bound(host: str, port: int) -> socket.socket:
    """Take the port, before models are opened for nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise _no_such_host(host) from None
    place = socket.socket(family, socket.SOCK_STREAM)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except OSError as error:
        place.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _no_such_host(host) from None
        raise ConfigError(
            f"port {port} of {host} cannot be used ({(error.strerror or str(error)).lower()}); choose another with "
            f"--port, or 0 for any that is free"
        ) from None
    return place


def _no_such_host(host: str) -> ConfigError:
    return ConfigError(f"no address of this machine is called {host!r}; use 127.0.0.1, or 0.0.0.0 for all")


class _Lines(logging.Formatter):
    """A log record as one line of JSON."""

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


def _write_log() -> None:
    """Write the service's log, and the complaints of uvicorn, to stderr."""
    ours, others = logging.StreamHandler(sys.stderr), logging.StreamHandler(sys.stderr)
    others.addFilter(RateLimitFilter())  # "Invalid HTTP request received." can be had ten thousand times a second
    for name, level, handler in (
        ("vitrail.serving", logging.INFO, ours),
        ("uvicorn", logging.WARNING, others),
        ("asyncio", logging.WARNING, others),
    ):
        handler.setFormatter(_Lines())
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
