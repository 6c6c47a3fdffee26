"""Decoder processes: timeouts, fairness between clients, and a decoder reserved for small images."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import torch
from tests.support.hostile_images import jpeg_of_scans, png_of_zeros
from tests.support.live_server import image, save_tiny
from tests.support.service_in_process import PNG, settings_for, with_client

import vitrail.serving.decoders
from vitrail import Preprocess
from vitrail.data import structure
from vitrail.serving.app import Service
from vitrail.serving.decoders import Decoders, default_decoders
from vitrail.serving.decoding import check_upload
from vitrail.serving.fair_queue import FairQueue
from vitrail.serving.http_errors import HttpError
from vitrail.serving.settings import Settings

PREPROCESS = Preprocess(size=(16, 16))


def with_decoders(ask: Callable[[Decoders], Awaitable[None]], **changes: object) -> None:
    async def run() -> None:
        decoders = Decoders(Settings(models=["m"], **changes))
        try:
            await decoders.start()
            await ask(decoders)
        finally:
            await decoders.close()

    asyncio.run(run())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("bundles") / "m")


def test_clients_and_their_requests_take_turns() -> None:
    turns: FairQueue[str] = FairQueue()
    for job in ("a1", "a2", "a3"):
        turns.add("greedy", 1, job)
    turns.add("greedy", 2, "b1")
    turns.add("modest", 3, "c1")
    taken = [turns.take(lambda _: True) for _ in range(6)]
    assert [result and result[1] for result in taken] == ["a1", "c1", "b1", "a2", "a3", None]
    turns.add("greedy", 1, "x")
    assert turns.take(lambda client: client != "greedy") is None
    assert list(turns) == ["x"]


@pytest.mark.slow
def test_a_slow_decoder_is_killed_and_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = jpeg_of_scans(5000)
    monkeypatch.setattr(structure, "JPEG_WORK", 2**40)
    monkeypatch.setattr(structure, "JPEG_SCANS", 10_000)  # only here: the decoder process would reject it too

    async def ask(decoders: Decoders) -> None:
        process = decoders._idle[0].process
        os.kill(process.pid, 19)  # SIGSTOP: it never finishes
        with pytest.raises(HttpError, match="more than 1 s to decode") as refused:
            await decoders.decode(image(), PREPROCESS, "a", asyncio.Lock())
        assert refused.value.status == 422
        assert process.returncode is not None
        assert (await decoders.decode(image(), PREPROCESS, "a", asyncio.Lock())).pixels.shape == (16, 16, 3)
        with pytest.raises(HttpError, match="more than 100 scans"):
            await decoders.decode(hostile, PREPROCESS, "a", asyncio.Lock())

    with_decoders(ask, decoders=1, decode_time=1)


def test_a_decoder_that_crashes_is_replaced() -> None:
    async def ask(decoders: Decoders) -> None:
        process = decoders._idle[0].process
        asyncio.get_running_loop().call_later(0.1, os.kill, process.pid, 9)
        os.kill(process.pid, 19)
        with pytest.raises(HttpError, match="its decoder failed"):
            await decoders.decode(image(), PREPROCESS, "a", asyncio.Lock())
        assert (await decoders.decode(image(), PREPROCESS, "a", asyncio.Lock())).pixels.shape == (16, 16, 3)

    with_decoders(ask, decoders=1)


def test_a_decoder_killed_while_idle_is_replaced() -> None:
    async def ask(decoders: Decoders) -> None:
        process = decoders._idle[0].process
        process.kill()
        while process.returncode is None:
            await asyncio.sleep(0.01)
        assert (await decoders.decode(image(), PREPROCESS, "a", asyncio.Lock())).pixels.shape == (16, 16, 3)

    with_decoders(ask, decoders=1)


def test_the_working_directory_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "struct", "numpy", "vitrail"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)

    async def ask(decoders: Decoders) -> None:
        assert (await decoders.decode(image(), PREPROCESS, "a", asyncio.Lock())).pixels.shape == (16, 16, 3)

    with_decoders(ask, decoders=1)


def test_headers_of_a_request_are_parsed_with_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, seen = 0, []

    def checked(*arguments: object) -> object:
        seen.append(rounds)
        return check_upload(*arguments)

    monkeypatch.setattr(vitrail.serving.decoders, "check_upload", checked)

    async def ask(decoders: Decoders) -> None:
        nonlocal rounds
        one = asyncio.Lock()
        work = asyncio.gather(*(decoders.decode(image(), PREPROCESS, "a", one) for _ in range(8)))
        while not work.done():
            rounds += 1
            await asyncio.sleep(0)

    with_decoders(ask, decoders=1)
    assert len(set(seen)) == 8


@pytest.mark.slow
def test_large_images_leave_a_decoder_free() -> None:
    large, small = png_of_zeros(4100), image()

    async def ask(decoders: Decoders) -> None:
        await asyncio.gather(*(decoders.decode(small, PREPROCESS, "w", asyncio.Lock()) for n in range(2)))
        begun = time.monotonic()
        one = asyncio.Lock()
        many = [asyncio.create_task(decoders.decode(large, PREPROCESS, "greedy", one)) for _ in range(5)]
        while not decoders._large_active:
            await asyncio.sleep(0)
        assert decoders._large_active.total() == 1
        await asyncio.gather(*(decoders.decode(small, PREPROCESS, "greedy", asyncio.Lock()) for _ in range(3)))
        quick = time.monotonic() - begun
        await asyncio.gather(*many)
        assert quick < (time.monotonic() - begun) / 3  # not queued behind the large ones

    with_decoders(ask, decoders=2)


def test_decoder_memory_is_limited() -> None:
    resource = pytest.importorskip("resource")

    async def ask(decoders: Decoders) -> None:
        process = decoders._idle[0].process
        before = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        await decoders.decode(image(), PREPROCESS, "a", asyncio.Lock())
        limit, _ = resource.prlimit(process.pid, resource.RLIMIT_AS)
        assert abs(limit - before - 512 * 2**20 - 24 * 1_000_000) < 32 * 2**20

    with_decoders(ask, decoders=1, pixel_limit=1)


def test_a_large_request_leaves_slots_for_others(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        with service.registry.use(None) as served:
            served.batcher.reserve(6)
            with pytest.raises(HttpError, match="try again soon"):
                served.batcher.reserve(2)
            slots = [*served.batcher.reserve(1), *served.batcher.reserve(1)]
            with pytest.raises(HttpError, match="try again soon"):
                served.batcher.reserve(1)
            for slot in slots:
                slot.leave()
        assert (await client.get("/readyz")).status_code == 200

    with_client(settings_for(bundle, queue=8), ask)


@pytest.mark.slow
def test_readiness_reports_a_backed_up_queue(bundle: Path) -> None:
    async def ask(service: Service, client: httpx.AsyncClient) -> None:
        decoders = service._handler.decoders
        await decoders.start()
        os.kill(decoders._idle[0].process.pid, 19)
        both = [asyncio.create_task(client.post("/v1/predict", content=image(), headers=PNG)) for _ in range(2)]
        while (response := await client.get("/readyz")).status_code == 200 and not all(one.done() for one in both):
            await asyncio.sleep(0.02)
        assert response.status_code == 503
        assert "have been waiting" in response.json()["error"]
        assert response.headers["retry-after"] == "1"
        assert {(await one).status_code for one in both} == {504}
        assert (await client.get("/readyz")).status_code == 200

    with_client(settings_for(bundle, decoders=1, deadline=2), ask)


def test_a_gpu_leaves_the_cores_to_the_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitrail.serving.decoders, "available_cores", lambda: 16)
    assert default_decoders(torch.device("cuda")) == 15
    assert default_decoders(torch.device("cpu")) == 2  # the model needs the cores
    monkeypatch.setattr(vitrail.serving.decoders, "available_cores", lambda: 1)
    assert default_decoders(torch.device("cuda")) == 2
