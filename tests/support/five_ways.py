"""The five ways through the code, traced: which source files a real call enters, in which order.

    python -m tests.support.five_ways         # print the files and the number of functions of each way

image -> gradient: one training step, from the request for a batch to its gradients, before clipping and the update.
checkpoint -> model: `load` of a timm file. image -> prediction, image -> explanation: a call with a model that is
already open. request -> response: one POST to a service that has started; its decoder processes are not traced.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail.models.vit import ViT
from vitrail.serving.app import Service
from vitrail.serving.settings import Settings

SOURCE = Path(vitrail.__file__).parent
TINY = ["model.width=16", "model.depth=1", "model.heads=1", "model.patch_size=4", "model.stem=conv", "batch=64",
        "steps=3", "evaluations=1"]  # fmt: skip


class Way(NamedTuple):
    """What a call enters."""

    files: list[str]
    """Relative to the package, in the order of the first call."""
    functions: int


class Tracer:
    """Records the functions of the package that run while it is on, in every thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            self.calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    @contextlib.contextmanager
    def tracing(self, *, on: bool = True) -> Iterator[None]:
        """Trace this thread, and threads that start now."""
        threading.setprofile(self)
        sys.setprofile(self)
        self.on = on
        try:
            yield
        finally:
            self.on = False
            sys.setprofile(None)
            threading.setprofile(None)

    def way(self) -> Way:
        """Return what was recorded."""
        named = [(Path(file).relative_to(SOURCE).as_posix(), function) for file, function in self.calls]
        return Way(list(dict.fromkeys(file for file, _ in named)), len(set(named)))


def traced(call: Callable[[], object]) -> Way:
    """Trace a call."""
    tracer = Tracer()
    with tracer.tracing():
        call()
    return tracer.way()


def image_to_gradient(folder: Path) -> Way:
    """Trace a training step from the request for a batch to its gradients, and the loop that requests it."""
    tracer = Tracer()
    with tracer.tracing():
        vitrail.train("digits", changes=TINY, folder=folder / "run", device="cpu", workers=0, quiet=True)
    names = [(Path(file).name, function) for file, function in tracer.calls]
    clipped = [place for place, (_, function) in enumerate(names) if function == "clip_gradients"]
    read = next(place for place, (file, _) in enumerate(names) if file == "batches.py" and place > clipped[0])
    loop = next(call for call in tracer.calls if call[1] == "take_steps")  # it runs when the step begins
    tracer.calls = [loop, *tracer.calls[read : clipped[1]]]
    return tracer.way()


def checkpoint_to_model(folder: Path) -> Way:
    """Trace `load` of a file that timm could have written."""
    torch.save(ViT(vitrail.variant_config("Ti/16")).state_dict(), folder / "vit_tiny_patch16_224.pth")
    return traced(lambda: vitrail.load(folder / "vit_tiny_patch16_224.pth"))


def image_to_prediction(bundle: Path, image: Path) -> Way:
    """Trace a prediction with an open model."""
    classifier = vitrail.Classifier(bundle, device="cpu")
    classifier(image)
    return traced(lambda: classifier(image))


def image_to_explanation(bundle: Path, image: Path) -> Way:
    """Trace an explanation with an open model."""
    opened = vitrail.load(bundle)
    vitrail.explain(opened, image, device="cpu")
    return traced(lambda: vitrail.explain(opened, image, device="cpu"))


def request_to_response(bundle: Path, image: Path) -> Way:
    """Trace a request to a service that has started."""
    tracer = Tracer()

    async def run() -> None:
        settings = Settings(models=[str(bundle)], device="cpu", precision="float32", allow_hosts=("service",))
        service = Service(settings)
        await service.start()
        transport = httpx.ASGITransport(app=service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            ask = {"content": image.read_bytes(), "headers": {"content-type": "image/png"}}
            await client.post("/v1/predict", **ask)
            tracer.on = True
            await client.post("/v1/predict", **ask)
            tracer.on = False
        await service.stop()

    with tracer.tracing(on=False):
        asyncio.run(run())
    return tracer.way()


def five_ways(folder: Path) -> dict[str, Way]:
    """Return the five ways."""
    image = folder / "image.png"
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(image)
    gradient = image_to_gradient(folder)
    bundle = folder / "run" / "best"
    return {
        "Image to gradient": gradient,
        "Checkpoint to model": checkpoint_to_model(folder),
        "Image to prediction": image_to_prediction(bundle, image),
        "Request to response": request_to_response(bundle, image),
        "Image to explanation": image_to_explanation(bundle, image),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        ways = five_ways(Path(place))
    if "--json" in sys.argv:
        print(json.dumps({name: way.files for name, way in ways.items()}))
    else:
        for name, way in ways.items():
            print(f"{name}: {len(way.files)} files, {way.functions} functions")
            print(f"  {' '.join(way.files)}")
