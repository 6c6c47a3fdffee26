"""The models of a service by their names, each of which can be replaced while it is in use."""

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
    """All models that are served."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        """Open every bundle; one that cannot be opened is an error."""
        self._settings, self._counters = settings, counters
        self._sources = {named.name: named for named in settings.models}
        self._served = {named.name: self._opened(named) for named in settings.models}
        self._one_at_a_time = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._due: dict[str | None, asyncio.Task[list[str]]] = {}
        """Reloads that were asked for and have not begun."""

    async def start(self) -> None:
        """Warm every model up and begin to answer."""
        async with self._one_at_a_time:  # a reload that is asked for meanwhile comes after
            for served in list(self._served.values()):
                await asyncio.to_thread(served.warm_up)
                self._put(served)

    async def close(self) -> None:
        """Answer what waits, then end."""
        await asyncio.gather(*(served.batcher.close() for served in self._served.values()), *self._leaving)

    @contextmanager
    def use(self, name: str | None) -> Iterator[ServedModel]:
        """Give the model of a name, which stays as it is until it is let go of; without a name, the first."""
        served = self._served[self.check_name(name)]
        served.users += 1
        try:
            yield served
        finally:
            served.users -= 1
            if served.users == 0 and self._served.get(served.name) is not served:
                self._retire(served)

    def check_name(self, name: str | None) -> str:
        """Return the name of the model that is meant."""
        if name is None:
            return next(iter(self._served))
        if name not in self._served:
            near = suggest(name, self._served) or f"; there is {', '.join(self._served)}"
            raise ConfigError(f"no model is called {name[:80]!r}{near}")
        return name

    def check_room(self, name: str | None, *, alone: bool) -> None:
        """Refuse at once what there is no room for; a name that is not known yet is judged later."""
        served = self._served.get(name or next(iter(self._served)))
        if served is not None:
            served.batcher.check_room(1, alone=alone)

    def waiting(self) -> float:
        """Return for how many seconds the oldest image of any model has been waiting."""
        return max(served.batcher.waiting() for served in self._served.values())

    def descriptions(self) -> list[dict[str, Any]]:
        """Say what each model is."""
        first = next(iter(self._served))
        return [{**served.description, "default": name == first} for name, served in self._served.items()]

    async def reload(self, name: str | None = None) -> list[str]:
        """Open a bundle again, or all of them, and put them in the place of the old ones: all, or where one fails none.

        Requests that have begun are answered by the model with which they began.
        """
        # One that has not begun will open what is there by then, so whoever asks meanwhile need not have their own.
        due = self._due.get(name)
        if due is None:
            due = self._due[name] = asyncio.get_running_loop().create_task(self._reload(name))
        return await asyncio.shield(due)

    async def _reload(self, name: str | None) -> list[str]:
        async with self._one_at_a_time:
            del self._due[name]
            names = list(self._served) if name is None else [self.check_name(name)]
            try:
                fresh = [await asyncio.to_thread(self._opened_warm, self._sources[one]) for one in names]
            except Exception as error:  # a file that is being copied can be damaged in any way
                self._counters.reloads.labels("failed").inc()
                _log.warning("reload failed", exc_info=None if isinstance(error, VitrailError) else error)
                raise CheckpointError(self._said(error)) from None
            for served in fresh:
                old = self._served[served.name]
                self._put(served)
                if old.users == 0:
                    self._retire(old)
            self._counters.reloads.labels("done").inc()
            return names

    def _said(self, error: Exception) -> str:
        """Say what went wrong without saying where on this machine the bundle lies."""
        why = str(error) if isinstance(error, VitrailError) else "it cannot be opened"
        for named in self._sources.values():
            for place in (os.path.abspath(named.source), named.source):
                why = why.replace(place, named.name)
        return f"nothing was reloaded, and the models that were there keep serving: {why}"

    def _put(self, served: ServedModel) -> None:
        served.batcher.start()
        self._served[served.name] = served
        self._counters.waiting.labels(served.name).set_function(lambda: self._served[served.name].batcher.taken)

    def _retire(self, served: ServedModel) -> None:
        task = asyncio.get_running_loop().create_task(served.batcher.close())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _opened(self, named: NamedSource) -> ServedModel:
        return ServedModel(named, self._settings, self._counters)

    def _opened_warm(self, named: NamedSource) -> ServedModel:
        served = self._opened(named)
        served.warm_up()
        return served
