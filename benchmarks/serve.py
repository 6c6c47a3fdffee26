"""Server throughput: `vitrail serve` vs. FastAPI and LitServe with a timm model.

    python benchmarks/serve.py                                              Ti/16 on a CPU, 64 clients
    python benchmarks/serve.py --device cuda --model B/16 --clients 64 512 --client-processes 4 --json rows.json

All servers alternate in one run, with the same weights (random) and the same JPEGs of 500×375; clients each send one
image, wait for the response and send the next. Ratios compare runs of the same turn. If other programs share the
machine, look at the CPU time per request, which hardly depends on them. Ours runs in float32 and with its default
precision, on a GPU also with uploads decoded there; the peers (benchmarks/serve_peers.py) run in float32 and, if bf16
is fast on the device, under autocast for a fair comparison. LitServe (`pip install litserve`) batches, and compiles
the model on a GPU. A server that does not start is reported. Then ours is overloaded, to count requests without a
response. The time from the command to the first response is reported, too.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
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

import httpx
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.serve_clients import PATIENCE, Pass, load, photographs

import vitrail
from vitrail import Bundle, Preprocess
from vitrail.runtime import choose_device, faster_in_bf16

ROOT = Path(__file__).parents[1]
OURS = ("vitrail serve --precision float32", "vitrail serve", "vitrail serve --decode gpu")


class Server(NamedTuple):
    """A running server."""

    place: str
    process: int
    ready: float
    """Seconds from the command to the first response."""


class DidNotStart(Exception):  # noqa: N818 - it is reported, and the others are measured
    """A server did not start."""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "model"
        torch.manual_seed(0)
        model = vitrail.create(options.model)
        with torch.no_grad():
            cast("nn.Linear", model.head).weight.normal_(std=0.1)
        Bundle(model, Preprocess()).save(bundle)
        found = compare(bundle, options)
        if options.overload:
            overload(bundle, options)
    if options.json is not None:
        on_gpu = options.device == "cuda"
        machine = torch.cuda.get_device_name() if on_gpu else "CPU"
        content = {"device": machine, "cores": os.cpu_count(), "torch": torch.__version__, "model": options.model}
        options.json.write_text(json.dumps({**content, "rows": found}, indent=2) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Ti/16", help="a named model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--clients", type=int, nargs="+", default=[64])
    parser.add_argument("--client-processes", type=int, default=1, help="processes that the clients share")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default="", help="a regular expression: which servers")
    parser.add_argument("--litserve-workers", type=int, nargs="+", default=[1])
    parser.add_argument("--no-overload", dest="overload", action="store_false")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    return parser.parse_args()


def commands(bundle: Path, options: argparse.Namespace) -> dict[str, tuple[list[str], str]]:
    """Return the command of each server, without its port, and the path of its route."""
    precisions = ("float32", "bf16") if faster_in_bf16(choose_device(options.device)) else ("float32",)
    own = [sys.executable, "-m", "vitrail", "serve", str(bundle), "--device", options.device, "--no-log-requests"]
    most = str(2 * max(256, *options.clients))  # all clients have one address
    own += ["--connections", most, "--client-connections", most, "--queue", most]
    found = {OURS[0]: ([*own, "--precision", "float32"], "/v1/predict"), OURS[1]: (own, "/v1/predict")}
    if options.device == "cuda":
        found[OURS[2]] = [*own, "--decode", "gpu"], "/v1/predict"
    peer = [sys.executable, "-m", "benchmarks.serve_peers"]
    for precision, kind in itertools.product(precisions, ("async", "thread")):
        words = [*peer, kind, precision, options.device, "PORT", str(bundle)]
        found[f"FastAPI + timm, {kind}, {precision}"] = words, "/predict"
    for workers in options.litserve_workers:
        words = [*peer, "litserve", precisions[-1], options.device, "PORT", str(bundle), "--workers", str(workers)]
        found[f"LitServe + timm, workers: {workers}, {precisions[-1]}"] = words, "/predict"
    return {name: found[name] for name in found if re.search(options.only, name)}


@contextlib.contextmanager
def started(command: list[str], route: str) -> Iterator[Server]:
    """Start a server and wait for its first prediction."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    words = [port if word == "PORT" else word for word in command]
    words += [] if "PORT" in command else ["--port", port]
    place, began = f"http://127.0.0.1:{port}{route}", time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log, cwd=ROOT, start_new_session=True)
        try:
            while not responds(place):
                if time.perf_counter() > began + 3 * PATIENCE or process.poll() is not None:
                    log.seek(0)
                    raise DidNotStart(next(reversed(log.read().strip().splitlines()), "no error message"))
                time.sleep(0.05)
            yield Server(place, process.pid, time.perf_counter() - began)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):  # LitServe's own processes outlive it
                os.killpg(process.pid, signal.SIGKILL)


def responds(place: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return bool(ask(place).status_code == 200)
    return False


def ask(place: str) -> httpx.Response:
    return httpx.post(place, files={"image": ("photo.jpg", photographs()[0], "image/jpeg")}, timeout=PATIENCE)


def compare(bundle: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all servers in turns; print a table for each number of clients."""
    servers: dict[str, Server] = {}
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        for name, (command, route) in commands(bundle, options).items():
            try:
                servers[name] = stack.enter_context(started(command, route))
            except DidNotStart as error:
                print(f"{name}: does not start: {error}")
                continue
            print(f"{name}: first response {servers[name].ready:.1f} s after the command", flush=True)
        check_alike(servers)
        for clients in options.clients:
            results = measured(servers, clients, options)
            rows += [{"clients": clients, **row} for row in table(results, clients, options)]
    return rows


def check_alike(servers: dict[str, Server]) -> None:
    """Check that all servers return the same prediction."""
    predictions = {
        name: ask(server.place).json()["results"][0]["classes"][0]["index"] for name, server in servers.items()
    }
    if len(set(predictions.values())) > 1:
        sys.exit(f"the servers' predictions differ: {predictions}")


def measured(servers: dict[str, Server], clients: int, options: argparse.Namespace) -> dict[str, list[Pass]]:
    """Return the passes of each server; the first, short ones warm up."""
    results: dict[str, list[Pass]] = {name: [] for name in servers}
    for turn in range(options.turns + 1):
        for name, server in servers.items():
            seconds = options.seconds if turn else 2.0
            one = load(server.place, clients, seconds, server.process, options.client_processes)
            results[name] += [one] if turn else []
    return results


def table(results: dict[str, list[Pass]], clients: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Print a row for each server, and yield it."""
    print(
        f"\n{clients} clients, {options.turns} turns of {options.seconds:g} s, {options.model}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n× rate, × p95: the requests/s and the p95 of ours, in "
        "float32 / by default / decoded on the GPU, as multiples of that server's\n"
    )
    print("| server | requests/s | median ms | p95 ms | CPU ms | × rate | × p95 |\n|---|---|---|---|---|---|---|")
    own = [name for name in OURS if name in results]
    for name, passes in results.items():
        rate, median, p95, cpu = (statistics.median(numbers) for numbers in list(zip(*passes, strict=True))[:4])
        pairs = {each: list(zip(results[each], passes, strict=True)) for each in own}
        faster = {each: statistics.median(a.rate / b.rate for a, b in pair) for each, pair in pairs.items()}
        slower = {each: statistics.median(a.p95 / b.p95 for a, b in pair) for each, pair in pairs.items()}
        shown = [" / ".join(f"{value:.2f}" for value in values.values()) for values in (faster, slower)]
        times = f"{1000 * median:.0f} | {1000 * p95:.0f} | {1000 * cpu:.1f}"
        print(f"| {name} | {rate:.1f} | {times} | {shown[0]} | {shown[1]} |", flush=True)
        bad = sum((one.outcomes for one in passes), Counter[str]()) - Counter({"200": 10**9})
        if bad:
            print(f"  other responses: {dict(bad)}")
        yield {
            "server": name, "requests_per_second": rate, "median_ms": 1000 * median,
            "p95_ms": 1000 * p95, "cpu_ms": 1000 * cpu, "rate_of_ours": faster, "p95_of_ours": slower,
            "other_responses": dict(bad),
        }  # fmt: skip


def overload(bundle: Path, options: argparse.Namespace) -> None:
    """Send more requests than ours can queue, and count those without a response."""
    command, route = commands(bundle, argparse.Namespace(**{**vars(options), "only": f"{OURS[1]}$"}))[OURS[1]]
    with started([*command, "--queue", "32"], route) as server:
        one = load(server.place, 256, options.seconds, server.process, options.client_processes)
    lost = {outcome: count for outcome, count in one.outcomes.items() if outcome not in ("200", "503")}
    print(
        f"\noverload: 256 clients on a queue of 32: {one.outcomes['200']} served (p95 {1000 * one.p95:.0f} ms), "
        f"{one.outcomes['503']} rejected with 503, lost: {lost or 'none'}"
    )


if __name__ == "__main__":
    main()
