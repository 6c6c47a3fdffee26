"""The models of a service by name; each can be reloaded while in use."""

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitrail.errors import CheckpointError, ConfigError, VitrailError, suggest
from vitrail.serving.counters import Counters
from vitrail.serving.served_model import ServedModel
from vitrail.serving.settings import NamedSource, Settings

_log = logging.getLogger("vitrail.serving")


class ModelRegistry:
    """All served models."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        """Open every bundle; raise if one cannot be opened."""
        self._settings, self._counters = settings, counters
        self._sources = {named.name: named for named in settings.models}
        self._served = {named.name: self._open(named) for named in settings.models}
        self._reload_lock = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._pending: dict[str | None, asyncio.Task[list[str]]] = {}
        """Requested reloads that have not started."""

    async def start(self) -> None:
        """Warm up every model and start its batcher."""
        async with self._reload_lock:  # a concurrent reload runs afterwards
            for served in list(self._served.values()):
                await asyncio.to_thread(served.warm_up)
                self._activate(served)

    async def close(self) -> None:
        """Finish the queued images, then close."""
        await asyncio.gather(*(served.batcher.close() for served in self._served.values()), *self._closing)

    @contextmanager
    def use(self, name: str | None) -> Iterator[ServedModel]:
        """Yield the model with this name (default: the first); a reload does not close it while in use."""
        served = self._served[self.check_name(name)]
        served.users += 1
        try:
            yield served
        finally:
            served.users -= 1
            if served.users == 0 and self._served.get(served.name) is not served:
                self._retire(served)

    def check_name(self, name: str | None) -> str:
        """Return the name of an existing model; None means the first."""
        if name is None:
            return next(iter(self._served))
        if name not in self._served:
            near = suggest(name, self._served) or f"; choose from {', '.join(self._served)}"
            raise ConfigError(f"no model is called {name[:80]!r}{near}")
        return name

    def check_capacity(self, name: str | None, *, alone: bool) -> None:
        """Raise early if the queue is full; an unknown name is reported later."""
        served = self._served.get(name or next(iter(self._served)))
        if served is not None:
            served.batcher.check_capacity(1, alone=alone)

    def waiting(self) -> float:
        """Return how many seconds the oldest queued image of any model has waited."""
        return max(served.batcher.waiting() for served in self._served.values())

    def descriptions(self) -> list[dict[str, Any]]:
        """Describe every model."""
        first = next(iter(self._served))
        return [{**served.description, "default": name == first} for name, served in self._served.items()]

    async def reload(self, name: str | None = None) -> list[str]:
        """Reload one bundle, or all of them; if one fails, none is replaced.

        Running requests finish on the old model.
        """
        # A pending reload will read the current files, so concurrent requests share it.
        pending = self._pending.get(name)
        if pending is None:
            pending = self._pending[name] = asyncio.get_running_loop().create_task(self._reload(name))
        return await asyncio.shield(pending)

    async def _reload(self, name: str | None) -> list[str]:
        async with self._reload_lock:
            del self._pending[name]
            names = list(self._served) if name is None else [self.check_name(name)]
            try:
                fresh = [await asyncio.to_thread(self._open_warm, self._sources[name]) for name in names]
            except Exception as error:  # a file that is still being copied can fail in any way
                self._counters.reloads.labels("failed").inc()
                _log.warning("reload failed", exc_info=None if isinstance(error, VitrailError) else error)
                raise CheckpointError(self._error_message(error)) from None
            for served in fresh:
                old = self._served[served.name]
                self._activate(served)
                if old.users == 0:
                    self._retire(old)
            self._counters.reloads.labels("done").inc()
            return names

    def _error_message(self, error: Exception) -> str:
        """Describe an error without revealing where the bundle is on disk."""
        why = str(error) if isinstance(error, VitrailError) else "it cannot be opened"
        for named in self._sources.values():
            for path in (os.path.abspath(named.source), named.source):
                why = why.replace(path, named.name)
        return f"nothing was reloaded, the loaded models keep serving: {why}"

    def _activate(self, served: ServedModel) -> None:
        served.batcher.start()
        self._served[served.name] = served
        self._counters.waiting.labels(served.name).set_function(lambda: self._served[served.name].batcher.taken)

    def _retire(self, served: ServedModel) -> None:
        task = asyncio.get_running_loop().create_task(served.batcher.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _open(self, named: NamedSource) -> ServedModel:
        return ServedModel(named, self._settings, self._counters)

    def _open_warm(self, named: NamedSource) -> ServedModel:
        served = self._open(named)
        served.warm_up()
        return served
