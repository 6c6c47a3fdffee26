"""Startup, reload and shutdown of a server under load: no accepted request is lost."""

import asyncio
import contextlib
import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.commands import PLAN
from tests.support.live_server import Running, connect, image, read_all, save_tiny, sent, server, wait_until

import vitrail
from vitrail.__main__ import main
from vitrail.errors import CheckpointError, ConfigError, Diverged
from vitrail.runtime import autocast
from vitrail.serving.http_errors import HttpError
from vitrail.serving.lifecycle import Lifecycle
from vitrail.serving.run import serve
from vitrail.serving.settings import NamedSource, Settings

PNG = {"content-type": "image/png"}


async def load(
    url: str, clients: int, during: Callable[[], object], *, until_gone: bool
) -> tuple[Counter[str], list[str]]:
    """Run clients while something happens; return the outcome of every request, and the predictions."""
    outcomes: Counter[str] = Counter()
    messages: list[str] = []
    over = asyncio.Event()

    async def keep_asking(client: httpx.AsyncClient) -> None:
        while not over.is_set():
            try:
                response = await client.post("/v1/predict", content=image(), headers=PNG)
            except httpx.ConnectError:
                outcomes["gone"] += 1  # the server is gone: nothing was accepted
                return
            except httpx.HTTPError as error:
                outcomes[f"lost: {error!r}"] += 1
                return
            outcomes[str(response.status_code)] += 1
            if response.status_code == 503:
                return  # 503 with Retry-After
            if response.status_code == 200:
                messages.append(response.json()["results"][0]["classes"][0]["name"])

    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=clients)) as client:
        tasks = [asyncio.create_task(keep_asking(client)) for _ in range(clients)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(during)
        if not until_gone:
            await asyncio.sleep(0.2)
            over.set()
        await asyncio.gather(*tasks)
    return outcomes, messages


@pytest.mark.slow
def test_reload_and_stop_under_load_lose_nothing(tmp_path: Path) -> None:
    bundle = save_tiny(tmp_path / "m")
    with server(str(bundle)) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        first = client.get("/v1/models").json()["models"][0]["digest"]

        def swap() -> None:
            save_tiny(bundle, seed=1)
            assert client.post("/v1/models/reload").json() == {"reloaded": ["m"]}

        outcomes, output = asyncio.run(load(running.url, 8, swap, until_gone=False))
        assert set(outcomes) == {"200"}, outcomes
        assert (output[0], output[-1]) == ("cat", "dog")  # predictions of the old and the new model
        second = client.get("/v1/models").json()["models"][0]["digest"]
        assert second != first
        response = sent(client, image()).text

        damage(bundle)
        refused = client.post("/v1/models/reload?model=m")
        assert refused.status_code == 409
        assert "keep serving" in refused.json()["error"]
        assert str(tmp_path) not in refused.text
        assert sent(client, image()).text == response

        save_tiny(bundle, seed=2)
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: client.get("/v1/models").json()["models"][0]["digest"] not in (first, second))
        running.process.send_signal(signal.SIGHUP)

        outcomes, _ = asyncio.run(load(running.url, 8, lambda: stop(running), until_gone=True))
        assert set(outcomes) <= {"200", "503", "gone"}, outcomes
        assert outcomes["200"] > 0
        assert outcomes["503"] + outcomes["gone"] == 8
        assert running.process.wait(20) == 0


@pytest.mark.slow
def test_auto_precision_logs_its_choice(tmp_path: Path) -> None:
    with server(str(save_tiny(tmp_path / "m")), "--precision", "auto") as running:
        with httpx.Client(base_url=running.url, timeout=60) as client:
            first = sent(client, image()).json()
            for _ in range(65):  # bf16 is tried on 64, if the CPU is faster with it
                sent(client, image())
            last, now = sent(client, image()).json(), client.get("/v1/models").json()["models"][0]["precision"]
        stop(running)
        running.process.wait(20)
        reasons = [json.loads(line)["why"] for line in running.log if '"event": "precision"' in line]
    assert [why.split(":")[0] for why in reasons] == [now]
    names = [[known["name"] for known in message["results"][0]["classes"]] for message in (first, last)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_embeddings_use_the_requested_precision(tmp_path: Path) -> None:
    bundle, content = vitrail.load(save_tiny(tmp_path / "m")), image()
    with server(str(tmp_path / "m"), "--precision", "bf16") as running:
        with httpx.Client(base_url=running.url, timeout=60) as client:
            response = client.post("/v1/embed", files={"image": content}).json()
        stop(running)
    result = np.array(response["results"][0]["embedding"])
    pixels = bundle.preprocess(Image.open(io.BytesIO(content)))[None]
    with torch.no_grad():
        exact = bundle.model.features(pixels).pooled[0].numpy()
        with autocast(torch.device("cpu"), "bf16"):
            rounded = bundle.model.features(pixels).pooled[0].float().numpy()
    # Batch size and number of threads may change the order of sums.
    assert np.abs(result - rounded).max() < 0.2 * np.abs(result - exact).max()


HEAD = b"POST /v1/predict HTTP/1.1\r\nHost: HOST\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_arriving_requests_are_refused_before_complete_ones() -> None:
    async def run() -> list[str]:
        lifecycle, messages = Lifecycle(), list[str]()
        lifecycle.stage = "ready"

        async def request(name: str, *, arrives: bool) -> None:
            try:
                async with lifecycle.accepted_request():
                    async with lifecycle.arriving_body():
                        await asyncio.sleep(0 if arrives else 60)
                    await asyncio.sleep(60)
            except HttpError as error:
                messages.append(f"{name}: {error.status} {error.message}")

        tasks = [asyncio.create_task(request(name, arrives=name == "whole")) for name in ("whole", "part")]
        await asyncio.sleep(0.01)
        lifecycle.stage = "stopping"
        lifecycle.refuse_arriving()
        assert not await lifecycle.idle(0.05)
        messages.append(f"{lifecycle.accepted} left")
        lifecycle.refuse_unfinished()
        assert await lifecycle.idle(5)
        await asyncio.gather(*tasks)
        await request("late", arrives=True)
        return messages

    assert asyncio.run(run()) == [
        "part: 503 the service is stopping and does not accept new requests",
        "1 left",
        "whole: 503 the service stopped before the request finished",
        "late: 503 the service is stopping and does not accept new requests",
    ]


@pytest.mark.slow
def test_endless_bodies_do_not_delay_shutdown(tmp_path: Path) -> None:
    with server(str(save_tiny(tmp_path / "m")), "--grace", "20") as running:
        over = threading.Event()

        def flood() -> None:
            with connect(running, HEAD) as connection, contextlib.suppress(ConnectionError):
                connection.settimeout(0.5)
                while not over.is_set():
                    with contextlib.suppress(TimeoutError):  # the server throttles the client
                        connection.send(b"1\r\nx\r\n" * 1000)

        floods = [threading.Thread(target=flood) for _ in range(3)]
        for thread in floods:
            thread.start()
        silent, half = connect(running, HEAD), connect(running, b"GET /healthz HTTP/1.1\r\nHost: HO")
        wait_until(lambda: uploading(running) == 4)
        begun = time.monotonic()
        stop(running)
        try:
            assert running.process.wait(15) == 0
            assert time.monotonic() - begun < 12  # without waiting for the grace period
        finally:
            over.set()
        response = read_all(silent)
        assert response.startswith(b"HTTP/1.1 503 ")
        assert b"the service is stopping" in response
        assert read_all(half) == b""
        for thread in floods:
            thread.join()
    assert not [line for line in running.log if "Traceback" in line or '"level": "error"' in line]


@pytest.mark.slow
def test_the_grace_period_is_for_complete_requests(tmp_path: Path) -> None:
    # Batches gather for 4 s: the grace period is longer, or shorter.
    whole = HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(image())) + image()
    for grace, status in ((20, b"200"), (0.5, b"503")):
        with server(str(save_tiny(tmp_path / "m")), "--grace", str(grace), "--wait", "4000") as running:
            connection = connect(running, whole)
            wait_until(lambda running=running: 'vitrail_queue_images{model="m"} 1.0' in metrics(running))
            stop(running)
            assert running.process.wait(15) == 0
            assert read_all(connection).split(b" ", 2)[1] == status
        assert not [line for line in running.log if "Traceback" in line or '"level": "error"' in line]


def metrics(running: Running) -> str:
    return httpx.get(f"{running.url}/metrics").text


def uploading(running: Running) -> int:
    """Return the number of requests in flight, besides this one."""
    (line,) = (line for line in metrics(running).splitlines() if line.startswith("vitrail_requests_in_flight "))
    return int(float(line.split()[1])) - 1


def damage(bundle: Path) -> None:
    """Truncate the weights in place, like an interrupted copy."""
    weights = bundle / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def stop(running: Running) -> None:
    running.process.send_signal(signal.SIGTERM)


# ── startup errors ──


def test_a_port_in_use_and_a_missing_bundle_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = save_tiny(tmp_path / "m")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, message in (
            ([str(bundle), "--port", str(port)], f"port {port} of 127.0.0.1 cannot be used (address already in use)"),
            ([str(tmp_path / "nothing"), "--port", "0"], "nothing"),
            ([str(bundle), "--port", "0", "--batch", "0"], "batch is 0"),
            ([str(bundle), "--port", "0", "--formats", "jpeg,exe"], "formats"),
            ([str(bundle), f"m={bundle}"], "two models are named 'm'"),
            ([str(bundle), "--token-file", str(tmp_path / "no")], "the token cannot be read"),
            ([str(bundle), "--host", "no.such.host.invalid"], "is not an address of this machine"),
            ([str(bundle), "--port", "0", "--host", "192.0.2.1"], "'192.0.2.1' is not an address of this machine"),
            ([str(bundle), "--origins", "example.org/path"], "is not an origin"),
        ):
            monkeypatch.setattr(sys, "argv", ["vitrail", "serve", *words])
            with pytest.raises(SystemExit) as ended:
                main()
            output = capsys.readouterr()
            assert ended.value.code == 2, words
            last = output.err.strip().splitlines()[-1]
            assert last.startswith("vitrail: "), output.err
            assert message in last
            assert "Traceback" not in output.err


@pytest.mark.slow
def test_it_starts_with_stdout_closed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vitrail", "serve", str(save_tiny(tmp_path / "m")), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        log = [process.stderr.readline()]
        while '"event": "ready"' not in log[-1]:
            log.append(process.stderr.readline())
            assert log[-1], log
        process.terminate()
        plan = next(line for line in map(json.loads, log) if line["event"] == "plan")
        log += process.stderr.readlines()
    assert "Traceback" not in "".join(log)
    assert plan["model"] == "m"
    assert PLAN.fullmatch(plan["plan"])


def test_a_corrupt_bundle_does_not_start(tmp_path: Path) -> None:
    bundle = save_tiny(tmp_path / "m")
    damage(bundle)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt"):
        serve(Settings(models=[str(bundle)], port=0))


def test_a_model_with_non_finite_output_does_not_start(tmp_path: Path) -> None:
    bundle = vitrail.load(save_tiny(tmp_path / "m"))
    with torch.no_grad():
        bundle.model.head.weight.fill_(float("nan"))
    bundle.save(tmp_path / "m", overwrite=True)
    with pytest.raises(Diverged, match="the model's output is not finite"):
        serve(Settings(models=[str(tmp_path / "m")], port=0, device="cpu"))


# ── names and printing ──


def test_names(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    shutil.copy(save_tiny(tmp_path / "m") / "model.safetensors", tmp_path / "B_16.safetensors")
    words = [
        "runs/pets-1a2b3c/best",
        "digits=runs/x/best",
        str(tmp_path / "B_16.safetensors"),
        "hf:org/vit@main",
        "my model/",
    ]
    names = [named.name for named in Settings(models=[*words, str(tmp_path / "a=b")]).models]
    assert names == ["pets-1a2b3c", "digits", "B_16", "vit", "my-model", "a-b"]
    assert Settings(models="digits=runs/x/best").models[0].source == "runs/x/best"
    for bad in ("=x", "a b=x", "-a=x", "a" * 65 + "=x"):
        with pytest.raises(ConfigError, match="is not a valid model name"):
            Settings(models=[bad])


def test_every_way_to_name_models() -> None:
    pets = NamedSource("pets", "runs/pets/best")
    for models in (pets, [pets], ("pets=runs/pets/best",), "pets=runs/pets/best", "runs/pets/best", Path(pets.source)):
        assert Settings(models=models).models == (pets,)


def test_the_token_is_never_printed() -> None:
    settings = Settings(models=["m"], token="open-sesame")
    assert settings.redacted()["token"] == "set"
    for message in (repr(settings), str(settings), settings.to_json(), str(settings.redacted())):
        assert "open-sesame" not in message
    for wrong in ("", "two words", "é"):
        with pytest.raises(ConfigError, match="the token must be printable ASCII"):
            Settings(models=["m"], token=wrong)
