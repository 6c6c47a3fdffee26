"""The clients of the server benchmark: each sends an image, waits for the response and sends the next.

    python benchmarks/serve_clients.py URL CLIENTS SECONDS     one process of clients; prints what it saw as JSON

Clients send prepared bytes over connections that stay open, so that they cost little. With many clients, several
processes share them, because one process would be the limit.
"""

import asyncio
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import numpy as np
from PIL import Image

IMAGES = 16
PATIENCE = 120.0


class Pass(NamedTuple):
    """The result of one run."""

    rate: float
    median: float
    p95: float
    cpu: float
    """CPU seconds per request, of the server and all its processes."""
    outcomes: Counter[str]


def load(place: str, clients: int, seconds: float, server: int, processes: int = 1) -> Pass:
    """Keep clients busy for some seconds; wait for requests in flight. `server` is its process number."""
    before = cpu_seconds(server)
    shares = [clients // processes + (number < clients % processes) for number in range(processes)]
    commands = [[sys.executable, __file__, place, str(share), str(seconds)] for share in shares if share]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    seen = [json.loads(process.communicate()[0]) for process in started]
    spent = sorted(time for each in seen for time in each["spent"])
    outcomes = sum((Counter(each["outcomes"]) for each in seen), Counter[str]())
    if not spent:
        sys.exit(f"{place} completed no request: {dict(outcomes)}")
    rate = sum(len(each["spent"]) / each["taken"] for each in seen)
    cost = (cpu_seconds(server) - before) / len(spent)
    return Pass(rate, statistics.median(spent), spent[int(0.95 * (len(spent) - 1))], cost, outcomes)


async def keep_busy(place: str, clients: int, seconds: float) -> dict[str, object]:
    """Keep this process's clients busy; return the seconds of each request and the outcomes."""
    requests = [encoded(place, photo) for photo in photographs()]
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
    return {"spent": spent, "outcomes": outcomes, "taken": time.perf_counter() - start}


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


def photographs() -> list[bytes]:
    """Draw smooth images of 500×375 pixels, which compress like photos."""
    generator = np.random.default_rng(1)
    made = []
    for _ in range(IMAGES):
        coarse = generator.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


def cpu_seconds(process: int) -> float:
    """Return the CPU time so far of a process and its descendants; 0 if the system does not report it."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(status.parent.name)
        parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])

    def belongs(number: int) -> bool:
        while number not in (0, process):
            number = parents.get(number, 0)
        return number == process

    return sum(spent for number, spent in ticks.items() if belongs(number)) / float(os.sysconf("SC_CLK_TCK"))


def main() -> None:
    """Be one process of clients."""
    place, clients, seconds = sys.argv[1:]
    print(json.dumps(asyncio.run(keep_busy(place, int(clients), float(seconds)))))


if __name__ == "__main__":
    main()
