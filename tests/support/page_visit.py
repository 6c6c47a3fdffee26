"""Helpers for page tests: a real service in this process, and a real browser."""

import asyncio
import io
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import uvicorn
from PIL import Image

from vitrail import Bundle, Preprocess, ViTConfig
from vitrail.models.vit import ViT
from vitrail.serving.app import Service
from vitrail.serving.settings import NamedSource, Settings

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
WAIT = 10_000


def some_bundle(config: ViTConfig, classes: tuple[str, ...], folder: Path) -> Path:
    """Write a bundle of random weights whose attention is peaked, as in a trained model."""
    torch.manual_seed(5)
    model = ViT(config)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(3)
        if config.depth:
            model.head.weight.mul_(60)
        else:
            model.head.weight.normal_()  # a ResNet starts from zero
    Bundle(model, Preprocess(size=config.image_size), classes=classes).save(folder)
    return folder


@contextmanager
def service(models: dict[str, Path], **changes: Any) -> Iterator[str]:
    """Serve bundles in a thread; yields the URL."""
    named = tuple(NamedSource(name, str(source)) for name, source in models.items())
    made = Service(Settings(models=named, device="cpu", log_requests=False, **changes))
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    place.listen()  # the first connections wait until the models are loaded
    server = uvicorn.Server(uvicorn.Config(made.app, http="h11", ws="none", lifespan="off", log_config=None))

    async def run() -> None:
        await made.start()
        await server.serve(sockets=[place])
        await made.stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield f"http://127.0.0.1:{place.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        place.close()


class Visit(NamedTuple):
    """The open page, its requests and its console errors."""

    page: Any
    requests: list[str]
    complaints: list[str]

    def open(self, address: str) -> None:
        """Load a URL and wait until the page is ready."""
        self.page.goto("about:blank")
        self.page.goto(address)
        self.page.wait_for_selector("body[data-ready]", timeout=WAIT)
        self.settle()

    def go(self, view: str) -> None:
        """Show another view without reloading the page."""
        self.page.mouse.move(0, 0)
        self.page.evaluate(
            """view => {
                delete document.body.dataset.ready; // the page does so, too, but a moment later
                location.hash = `${view}&again=${performance.now()}`;
            }""",
            view,
        )
        self.page.wait_for_selector("body[data-ready]", timeout=WAIT)
        self.settle()

    def settle(self) -> None:
        """Wait until nothing is being fetched or drawn."""
        self.page.wait_for_selector(".panel[aria-busy=true], #pipeline[aria-busy=true]", state="detached", timeout=WAIT)

    def until(self, text: str) -> None:
        """Wait until the URL contains a text; it is updated with a delay."""
        end = time.monotonic() + WAIT / 1000
        while text not in self.hash():
            assert time.monotonic() < end, f"{text} does not come into {self.hash()}"
            self.page.wait_for_timeout(20)

    def part(self, name: str, panel: int = 0) -> Any:
        """Return an element of a panel by its data-part."""
        return self.page.locator(".panel").nth(panel).locator(f"[data-part={name}]")

    def pixels(self, panel: int = 0) -> str:
        """Return a downscaled copy of the canvas."""
        result: str = self.part("canvas", panel).evaluate(
            """canvas => {
                const small = Object.assign(document.createElement("canvas"), { width: 48, height: 48 });
                const context = small.getContext("2d", { willReadFrequently: true });
                context.drawImage(canvas, 0, 0, 48, 48);
                return context.getImageData(0, 0, 48, 48).data.join();
            }"""
        )
        return result

    def inference_requests(self) -> list[str]:
        """Return the inference requests so far."""
        return [url for url in self.requests if "/v1/" in url]

    def hash(self) -> str:
        """Return the URL hash."""
        result: str = self.page.evaluate("location.hash")
        return result

    def over(self, row: int, column: int, grid: tuple[int, int], panel: int = 0) -> None:
        """Move the pointer to the middle of a patch."""
        canvas = self.part("canvas", panel)
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        self.page.mouse.move(
            box["x"] + box["width"] * (column + 0.5) / grid[1], box["y"] + box["height"] * (row + 0.5) / grid[0]
        )


@contextmanager
def visit(browser: Any, viewport: dict[str, int], scheme: str = "light") -> Iterator[Visit]:
    """Open a new window."""
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page = context.new_page()
    seen = Visit(page, [], [])
    page.on("request", lambda one: seen.requests.append(one.url))
    page.on("console", lambda message: seen.complaints.append(message.text))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("dialog", lambda dialog: seen.complaints.append(f"dialog {dialog.message}"))
    try:
        yield seen
    finally:
        context.close()


def image_file(side: int = 48, seed: int = 0) -> bytes:
    """Return a PNG of coloured noise in large squares."""
    pixels = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()
