"""A service in this process, without a socket."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from vitrail.serving.app import Service
from vitrail.serving.settings import Settings

PNG = {"content-type": "image/png"}


def with_client(
    settings: Settings, ask: Callable[[Service, httpx.AsyncClient], Awaitable[None]], *, start: bool = True
) -> None:
    """Start a service, run requests, and stop it."""

    async def run() -> None:
        service = Service(settings)
        if start:
            await service.start()
        transport = httpx.ASGITransport(app=service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            await ask(service, client)
        await service.stop()

    asyncio.run(run())


def settings_for(bundle: Path, **changes: Any) -> Settings:
    return Settings(models=[str(bundle)], device="cpu", **{"allow_hosts": ("service",), **changes})
