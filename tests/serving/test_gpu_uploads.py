"""Uploads decoded by nvImageCodec, here on the CPU: the responses of decoder processes, and what is left to them."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.jpeg_files import ENDINGS, content_of, jpeg, photo
from tests.support.live_server import save_tiny
from tests.support.service_in_process import settings_for, with_client

from vitrail import Preprocess
from vitrail.data import decoder_choice, gpu_decoding
from vitrail.errors import ConfigError
from vitrail.serving import gpu_uploads
from vitrail.serving.app import Service
from vitrail.serving.decoders import Decoders
from vitrail.serving.gpu_uploads import GpuUploads
from vitrail.serving.http_errors import HttpError
from vitrail.serving.settings import Settings

JPEG = {"content-type": "image/jpeg"}
PREPROCESS = Preprocess(size=(16, 24), resize="cover", interpolation="bicubic")
SMALLER = Preprocess(size=(8, 8))
STRIP = jpeg(photo(8, 300))


@pytest.fixture(autouse=True)
def _decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for a device that decodes."""
    monkeypatch.setattr(decoder_choice, "DEVICES", ("cuda", "cpu"))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that nvImageCodec decodes."""
    sizes: list[int] = []
    together = gpu_uploads.decode_together

    def recorded(decoder: Any, images: Any, **more: Any) -> Any:
        sizes.append(len(images))
        return together(decoder, images, **more)

    monkeypatch.setattr(gpu_uploads, "decode_together", recorded)
    return sizes


def with_decoders(ask: Callable[[Decoders], Awaitable[None]], **changes: Any) -> None:
    async def run() -> None:
        decoders = Decoders(Settings(models=["m"], device="cpu", decoders=1, **changes))
        try:
            await decoders.start()
            await ask(decoders)
        finally:
            await decoders.close()

    asyncio.run(run())


async def outcome(decoders: Decoders, content: bytes, preprocess: Preprocess) -> Any:
    """Return a decoded upload, or its error."""
    try:
        return await decoders.decode(content, preprocess, "client", asyncio.Lock())
    except HttpError as error:
        return error


def test_files_of_every_kind_and_models_of_several_sizes(decoded: list[int]) -> None:
    """Pixels differ by little; files that cannot be used have the same errors."""
    contents = [content_of(ending.name, seed) for seed, ending in enumerate(2 * ENDINGS)] + [STRIP, b""]
    asked = [(content, preprocess) for content in contents for preprocess in (PREPROCESS, SMALLER)]
    outcomes: dict[str, list[Any]] = {}

    def of(decode: str) -> Callable[[Decoders], Awaitable[None]]:
        async def ask(decoders: Decoders) -> None:
            outcomes[decode] = await asyncio.gather(*(outcome(decoders, *one) for one in asked))
            assert decoders.waiting() == 0

        return ask

    for decode in ("cpu", "gpu"):
        with_decoders(of(decode), decode=decode, pixel_limit=0.01)
    # Plain, turned, grey and fully sampled files, and those with something appended.
    assert sum(decoded) == 2 * 2 * 5
    assert max(decoded) > 1
    for one, other, (_, preprocess) in zip(outcomes["gpu"], outcomes["cpu"], asked, strict=True):
        assert isinstance(one, HttpError) == isinstance(other, HttpError)
        if isinstance(one, HttpError):
            assert (one.status, one.message) == (other.status, other.message)
        else:
            assert one.pixels.shape == other.pixels.shape == (*preprocess.size, 3)
            assert np.abs(one.pixels.astype(int) - other.pixels).mean() < 0.5
            assert one.size == other.size
    assert sum(isinstance(one, HttpError) for one in outcomes["gpu"]) > 6


def test_what_fails_is_decoded_by_a_process(decoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    content = jpeg(photo(40, 60))

    async def ask(decoders: Decoders) -> None:
        with monkeypatch.context() as patch:  # one image, and then the whole batch
            patch.setattr(gpu_decoding.GpuDecoder, "decode", lambda self, jpegs: [None] * len(jpegs))
            first = await outcome(decoders, content, PREPROCESS)
        with monkeypatch.context() as patch:
            patch.setattr(gpu_decoding.GpuDecoder, "decode", out_of_memory)
            second = await outcome(decoders, content, PREPROCESS)
        third = await outcome(decoders, content, PREPROCESS)
        assert np.array_equal(first.pixels, second.pixels)
        assert np.abs(first.pixels.astype(int) - third.pixels).mean() < 0.5

    with_decoders(ask, decode="gpu")
    assert decoded == [1, 1, 1]


def out_of_memory(*_: Any) -> Any:
    raise RuntimeError("CUDA out of memory")


def test_clients_take_turns_and_cancelled_uploads_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuUploads, "_dispatch", lambda self: None)  # nothing is decoded
    monkeypatch.setattr(gpu_uploads, "MOST", 4)
    content = jpeg(photo(40, 60))

    async def ask(decoders: Decoders) -> None:
        uploads = decoders._gpu
        assert isinstance(uploads, GpuUploads)
        names = {"greedy": range(6), "modest": range(6, 8)}
        tasks = {
            number: asyncio.create_task(uploads.decode(content + bytes([number]), PREPROCESS, client, client))
            for client, numbers in names.items()
            for number in numbers
        }
        await asyncio.sleep(0.05)
        assert decoders.waiting() >= 0.05
        tasks[0].cancel()
        await asyncio.sleep(0)
        assert [one.content[-1] for one in uploads._next()] == [6, 1, 7, 2]
        assert [one.content[-1] for one in uploads._next()] == [3, 4, 5]
        assert uploads._next() == []
        for task in tasks.values():
            task.cancel()

    async def run() -> None:
        await ask(Decoders(Settings(models=["m"], device="cpu", decode="gpu")))

    asyncio.run(run())


def test_a_service(tmp_path: Path, decoded: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """Predictions of many clients share decoded batches."""
    bundle, responses = save_tiny(tmp_path / "m"), {}
    photos = [jpeg(photo(30 + number, 50, number)) for number in range(12)]

    def of(decode: str) -> Callable[[Service, httpx.AsyncClient], Awaitable[None]]:
        async def ask(_: Service, client: httpx.AsyncClient) -> None:
            made = await asyncio.gather(
                *(client.post("/v1/predict", content=content, headers=JPEG) for content in photos)
            )
            assert {response.status_code for response in made} == {200}
            responses[decode] = [response.json()["results"][0]["classes"] for response in made]

        return ask

    with caplog.at_level(logging.INFO, "vitrail.serving"):
        for decode in ("cpu", "auto"):
            with_client(settings_for(bundle, decode=decode), of(decode))
    assert [one.getMessage() for one in caplog.records if "decoding" in one.getMessage()] == [
        "decoding on the GPU: nvImageCodec is installed"
    ]
    assert sum(decoded) == len(photos) > len(decoded)
    for one, other in zip(responses["auto"], responses["cpu"], strict=True):
        assert {row["index"]: row["probability"] for row in one} == pytest.approx(
            {row["index"]: row["probability"] for row in other}, abs=0.02
        )


def test_where_the_gpu_cannot_decode(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(decoder_choice, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"decode is gpu, but nvImageCodec is not installed .*; use decode"):
        Decoders(Settings(models=["m"], device="cpu", decode="gpu"))
    monkeypatch.setattr(decoder_choice, "DEVICES", ("cuda",))
    with pytest.raises(ConfigError, match="decode is gpu, but the device is cpu, and only a CUDA device decodes"):
        Decoders(Settings(models=["m"], device="cpu", decode="gpu"))
    with caplog.at_level(logging.INFO, "vitrail.serving"):
        assert Decoders(Settings(models=["m"], device="cpu", decode="auto"))._gpu is None
        assert Decoders(Settings(models=["m"], device="cpu"))._gpu is None
    assert [one.getMessage() for one in caplog.records] == [
        "decoding on the CPU: the device is cpu, and only a CUDA device decodes"
    ]
    with pytest.raises(ConfigError, match="decode"):
        Settings(models=["m"], decode=json.loads('"cuda"'))
