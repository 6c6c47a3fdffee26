"""Server throughput: `vitrail serve` vs. a plain FastAPI + timm server.

    python benchmarks/serve.py

All servers alternate in one run, with the same weights (a Ti/16 at 224 with random weights) and the same JPEGs; 64
clients each send one image, wait for the response and send the next. The plain server opens the upload with Pillow,
applies timm's own transform and calls the model, one image at a time; it has two variants, as in FastAPI's tutorial
(`async def`) and in FastAPI's thread pool (`def`). Ratios compare runs of the same turn. If other programs share the
machine, look at the CPU time per request, which hardly depends on them. Ours runs in float32 and with its default
precision; if that can be bf16, the plain servers also run under autocast for a fair comparison. Clients send prepared
bytes, so that they cost little. Then ours is overloaded, to count requests without a response. The time from the
command to the first response is reported, too.
"""

import argparse
import asyncio
import contextlib
import io
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import httpx
import torch
from PIL import Image
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.peers import import_peer

import vitrail
from vitrail import Bundle, Preprocess
from vitrail.runtime import faster_in_bf16

CLIENTS, SECONDS, TURNS, IMAGES = 64, 8.0, 3, 16
PATIENCE = 120.0


class Pass(NamedTuple):
    """The result of one run."""

    rate: float
    median: float
    p95: float
    cpu: float
    """CPU seconds per request."""
    outcomes: Counter[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--peer", nargs=4, metavar=("KIND", "PRECISION", "PORT", "BUNDLE"), help="run a peer's server")
    options = parser.parse_args()
    if options.peer:
        run_peer(options.peer[0], options.peer[1], int(options.peer[2]), Path(options.peer[3]))
        return
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "ti16"
        torch.manual_seed(0)
        model = vitrail.create("Ti/16")
        with torch.no_grad():
            cast("nn.Linear", model.head).weight.normal_(std=0.1)
        Bundle(model, Preprocess()).save(bundle)
        compare(bundle, options.clients, options.seconds, options.turns)
        overload(bundle, options.seconds)


def compare(bundle: Path, clients: int, seconds: float, turns: int) -> None:
    photos = photographs()
    with contextlib.ExitStack() as stack:
        ready, url, process = stack.enter_context(ours(bundle, "--precision", "float32"))
        print(f"vitrail serve: first response {ready:.1f} s after the command (target: at most 10 s)")
        places = {"vitrail serve --precision float32": (f"{url}/v1/predict", process)}
        _, url, process = stack.enter_context(ours(bundle))
        places["vitrail serve"] = (f"{url}/v1/predict", process)
        for precision in ("float32", "bf16") if faster_in_bf16(torch.device("cpu")) else ("float32",):
            for kind in ("async def", "def"):
                places[f"FastAPI + timm, {kind}, {precision}"] = stack.enter_context(peer(kind, precision, bundle))
        requests = {name: [encoded(place, photo) for photo in photos] for name, (place, _) in places.items()}
        check_alike(places, photos)
        for name, (place, process) in places.items():
            asyncio.run(load(place, requests[name], clients, 2.0, process))
        settled = httpx.get(f"{url}/v1/models").json()["models"][0]["precision"]
        print(f"default precision of ours: {settled}")
        results: dict[str, list[Pass]] = {name: [] for name in places}
        for _ in range(turns):
            for name, (place, process) in places.items():
                results[name].append(asyncio.run(load(place, requests[name], clients, seconds, process)))
    print(
        f"\n{clients} clients, {turns} turns of {seconds:g} s, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n"
    )
    print(
        "× rate, × p95: how many times the requests/s and the p95 of that server ours has, in float32 / as it settled\n"
    )
    print("| server | requests/s | median ms | p95 ms | CPU ms | × requests/s | × p95 |\n|---|---|---|---|---|---|---|")
    for name, passes in results.items():
        rate, median, p95 = (statistics.median(numbers) for numbers in list(zip(*passes, strict=True))[:3])
        cost = statistics.median(one.cpu for one in passes)
        pairs = [list(zip(results[own], passes, strict=True)) for own in list(results)[:2]]
        faster = " / ".join(f"{statistics.median(a.rate / b.rate for a, b in pair):.2f}" for pair in pairs)
        slower = " / ".join(f"{statistics.median(a.p95 / b.p95 for a, b in pair):.2f}" for pair in pairs)
        times = f"{1000 * median:.0f} | {1000 * p95:.0f} | {1000 * cost:.1f}"
        print(f"| {name} | {rate:.1f} | {times} | {faster} | {slower} |")
        bad = sum((one.outcomes for one in passes), Counter()) - Counter({"200": 10**9})
        if bad:
            print(f"  other responses: {dict(bad)}")


def overload(bundle: Path, seconds: float) -> None:
    with ours(bundle, "--queue", "32") as (_, url, process):
        place = f"{url}/v1/predict"
        requests = [encoded(place, photo) for photo in photographs()]
        one = asyncio.run(load(place, requests, 256, seconds, process))
    lost = {outcome: count for outcome, count in one.outcomes.items() if outcome not in ("200", "503")}
    print(
        f"\noverload: 256 clients on a queue of 32: {one.outcomes['200']} served (p95 {1000 * one.p95:.0f} ms), "
        f"{one.outcomes['503']} rejected with 503, lost: {lost or 'none'}"
    )


# ── clients ──


async def load(place: str, requests: list[bytes], clients: int, seconds: float, process: int) -> Pass:
    """Keep clients busy for some seconds; wait for requests in flight."""
    before = cpu_seconds(process)
    spent: list[float] = []
    outcomes: Counter[str] = Counter()
    start = time.perf_counter()
    end = start + seconds

    async def keep_asking(number: int) -> None:
        connection = Connection(place)
        while time.perf_counter() < end:
            began = time.perf_counter()
            try:
                status = await asyncio.wait_for(connection.ask(requests[number % len(requests)]), PATIENCE)
            except (OSError, EOFError, TimeoutError) as error:
                outcomes[type(error).__name__] += 1
                connection.close()
                continue
            outcomes[str(status)] += 1
            if status == 200:
                spent.append(time.perf_counter() - began)
            else:
                await asyncio.sleep(0.25)  # rejected: retry, sooner than Retry-After says
        connection.close()

    await asyncio.gather(*map(keep_asking, range(clients)))
    taken = time.perf_counter() - start
    ordered = sorted(spent)
    p95, cost = ordered[int(0.95 * (len(ordered) - 1))], (cpu_seconds(process) - before) / len(spent)
    return Pass(len(spent) / taken, statistics.median(spent), p95, cost, outcomes)


class Connection:
    """One client's keep-alive connection."""

    def __init__(self, place: str) -> None:
        self.place = urlsplit(place)
        self.ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> int:
        """Send a request, and return the status once the whole response has arrived."""
        if self.ends is None:
            self.ends = await asyncio.open_connection(self.place.hostname, self.place.port)
        reader, writer = self.ends
        writer.write(request)
        await writer.drain()
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        return int(first.split()[1])

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self.ends is not None:
            self.ends[1].close()
            self.ends = None


def encoded(place: str, photo: bytes) -> bytes:
    """Return the raw bytes of a multipart request with one file."""
    request = httpx.Request("POST", place, files={"image": ("photo.jpg", photo, "image/jpeg")})
    lines = [f"POST {request.url.path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + request.read()


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process so far; 0 if the system does not report it."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def check_alike(places: dict[str, tuple[str, int]], photos: list[bytes]) -> None:
    """Check that all servers return the same predictions."""
    predictions: list[Any] = []
    for place, _ in places.values():
        results = httpx.post(place, files={"image": ("photo.jpg", photos[0], "image/jpeg")}, timeout=PATIENCE).json()[
            "results"
        ]
        predictions.append([row["index"] for row in results[0]["classes"]])
    if any(one[:1] != predictions[0][:1] for one in predictions):
        sys.exit(f"the servers' predictions differ: {predictions}")


def photographs() -> list[bytes]:
    """Draw smooth images of 500×375 pixels, which compress like photos."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(IMAGES):
        coarse = torch.randint(0, 256, (30, 40, 3), dtype=torch.uint8, generator=generator)
        file = io.BytesIO()
        Image.fromarray(coarse.numpy()).resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


# ── servers ──


@contextlib.contextmanager
def ours(bundle: Path, *words: str) -> Iterator[tuple[float, str, int]]:
    command = [sys.executable, "-m", "vitrail", "serve", str(bundle), "--port", "0", "--no-log-requests", *words]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        url = line.split(" at ")[1].strip().rstrip("/")
        httpx.get(f"{url}/readyz").raise_for_status()
        yield time.perf_counter() - began, url, process.pid
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def peer(kind: str, precision: str, bundle: Path) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, __file__, "--peer", kind, precision, str(port), str(bundle)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/openapi.json").raise_for_status()
                break
            except httpx.HTTPError:
                if time.monotonic() > end or process.poll() is not None:
                    sys.exit("the other server does not start; are fastapi and timm installed?")
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/predict", process.pid
    finally:
        process.terminate()
        process.wait(30)


def run_peer(kind: str, precision: str, port: int, bundle: Path) -> None:
    """Run the plain server."""
    import uvicorn
    from fastapi import FastAPI, UploadFile

    timm = import_peer("timm")
    model = timm.create_model(f"local-dir:{bundle}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    app = FastAPI()

    def respond(content: bytes) -> dict[str, Any]:
        pixels = transform(Image.open(io.BytesIO(content)).convert("RGB")).unsqueeze(0)
        in_bf16 = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        with torch.inference_mode(), in_bf16:
            likely = model(pixels).float().softmax(dim=1).topk(5)
        rows = zip(likely.indices[0].tolist(), likely.values[0].tolist(), strict=True)
        return {"results": [{"classes": [{"index": index, "probability": value} for index, value in rows]}]}

    if kind == "async def":

        @app.post("/predict")
        async def predict(image: UploadFile) -> dict[str, Any]:
            return respond(await image.read())

    else:

        @app.post("/predict")
        def predict_in_a_thread(image: UploadFile) -> dict[str, Any]:
            return respond(image.file.read())

    uvicorn.run(app, port=port, log_level="error")


if __name__ == "__main__":
    main()
