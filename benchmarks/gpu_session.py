"""Run the benchmarks that need a GPU one after the other, and collect their results.

    sh benchmarks/gpu_session.sh PHOTOS RESULTS [PARTS]      see there

decode     nvImageCodec alone, by backends and threads, and torchvision; batches decoded on the CPU and on the GPU
predict    from files to predictions, B/16 and S/16, decoded on the CPU and on the GPU; a timm script
train      from files to gradients, likewise; with images that stay on the device
serve      64 and 512 clients; LitServe and FastAPI with timm
agree      a model trained on crops of the photos; pixels and predictions of 8,000 other crops, decoded both ways
fp8        inference in bf16 and fp8; timm, and timm with torchao's float8
resident   more images on the device than 32 GiB
tests      tests marked gpu: decoding, resident images

Each part is a list of commands. A command that fails, or is stopped at its limit, leaves the rows that it has written.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    "images_per_second", "requests_per_second", "waiting", "run_waiting", "first_s", "p95_ms", "cpu_ms",
    "mean_difference", "largest", "images", "changed", "accuracy", "error", "read_s", "waited_ms",
)  # fmt: skip
"""The values of the table."""
PATIENCE = 15.0
"""Seconds that a program has to stop."""


class Command(NamedTuple):
    """A program with its arguments."""

    name: str
    words: list[str]
    seconds: float
    """After which it is stopped."""
    rows: Path | None = None
    """The JSON file that it writes: an object with rows or results, or a row per line."""


class Session(NamedTuple):
    """What all commands are run with."""

    photos: Path
    results: Path
    device: str
    tiny: bool

    def program(self, name: str, *words: object, seconds: float, part: str, rows: bool = True) -> Command:
        """Return a command that runs a program of benchmarks/, which gets `--json` if it writes rows."""
        file = self.results / f"{part}.json" if rows else None
        given = [*map(str, words), *(["--json", str(file)] if file is not None else [])]
        return Command(part, [sys.executable, str(ROOT / "benchmarks" / name), *given], seconds, file)

    def stages(self, stage: str, folder: Path, *words: object, seconds: float, part: str, rows: bool = True) -> Command:
        """Return a command that runs a stage of decoding_stages.py."""
        more = (stage, folder, "--device", self.device, *words)
        return self.program("decoding_stages.py", *more, seconds=seconds, part=part, rows=rows)

    def made(self, name: str, count: int, *words: object) -> Command:
        """Return a command that makes photos of 500×375."""
        count = 60 if self.tiny else count
        more = ("--make", count, "--from", self.photos, *words)
        return self.stages("photos", self.results / name, *more, seconds=120, part=f"make-{name}", rows=False)


# ── the parts ──


def decode(session: Session) -> Iterator[Command]:
    """Measure decoders, and batches without a model."""
    quick = ("--seconds", 0.2) if session.tiny else ("--seconds", 2.0, "--sweep")
    photos = session.results / "photos"
    yield session.made("photos", 8000)
    yield session.stages("decode", photos, *quick, seconds=150, part="decode")
    yield session.stages("batches", photos, seconds=90, part="batches")


def predict(session: Session) -> Iterator[Command]:
    """Measure from files to predictions."""
    yield _end_to_end(session, "predict", ("B/16", "S/16"), ("cpu", "gpu"), 300, "--images", 30_000)


def train(session: Session) -> Iterator[Command]:
    """Measure from files to gradients."""
    yield _end_to_end(
        session, "train", ("S/16", "B/16"), ("cpu", "gpu", "resident"), 540, "--images", 9900, "--steps", 40
    )


def _end_to_end(
    session: Session, task: str, sizes: tuple[str, ...], decodes: tuple[str, ...], seconds: float, *more: object
) -> Command:
    rows = [f"{task}:{size}" for size in (("tiny",) if session.tiny else sizes)]
    more = ("--tiny", "--images", 96, "--workers", 1) if session.tiny else more
    words = (session.photos, "--only", *rows, "--decode", *decodes, "--device", session.device, *more)
    return session.program("end_to_end.py", *words, seconds=seconds, part=task)


def serve(session: Session) -> Iterator[Command]:
    """Measure servers; torch in float32 is left out, and of FastAPI all but bf16."""
    servers = r"^vitrail serve( --decode gpu)?$|(bf16|LitServe.*)$"
    load = ("--clients", 64, 512, "--client-processes", 6, "--turns", 2, "--seconds", 5, "--litserve-workers", 1, 4)
    small = ("--clients", 2, "--turns", 1, "--seconds", 1, "--model", "Ti/16", "--no-overload")
    words = ("--device", session.device, "--only", servers, *(small if session.tiny else ("--model", "B/16", *load)))
    yield session.program("serve.py", *words, seconds=540, part="serve")


def agree(session: Session) -> Iterator[Command]:
    """Train a model that tells the photos apart by crops of them; compare decoders on other crops."""
    count, bundle = 8000, session.results / "agree-run" / "best"
    yield session.made("crops", count, "--by-photograph")
    yield session.made("other-crops", count, "--by-photograph", "--first", count)
    changes = ["model.image_size=224", "steps=800", "batch=256", "data.test=0", "evaluations=2"]
    changes += ["model.name=S/16"] if not session.tiny else []
    tiny = ["model.image_size=32", "steps=4", "batch=8", "data.test=0", "evaluations=1", "model.depth=1"]
    words = ["train", str(session.results / "crops"), "--run", str(bundle.parent), "--device", session.device]
    words += [word for change in (tiny if session.tiny else changes) for word in ("--set", change)]
    yield Command("agree-train", [sys.executable, "-m", "vitrail", *words], 240)
    others = session.results / "other-crops"
    yield session.stages("agree", others, "--bundle", bundle, seconds=150, part="agree")


def fp8(session: Session) -> Iterator[Command]:
    """Measure inference in fp8."""
    size = ("Ti/16", "--batch", 2, "--seconds", 0) if session.tiny else ("B/16", "--seconds", 3)
    words = ("--sizes", *size, "--tasks", "inference", "--device", session.device)
    wanted = ("--contestants", "vitrail (bf16|fp8)$", "timm compile", "torchao")
    yield session.program("gpu.py", *words, *wanted, seconds=300, part="fp8")


def resident(session: Session) -> Iterator[Command]:
    """Measure images that stay on the device."""
    size = (
        (32, "--images", 500, "--batch", 16, "--repeats", 2)
        if session.tiny
        else (224, "--images", 300_000, "--batch", 512)
    )
    yield session.program(
        "resident.py", "--device", session.device, "--side", *size, seconds=240, part="resident"
    )  # fmt: skip


def tests(session: Session) -> Iterator[Command]:
    """Run the tests of what the other parts measure."""
    files = ("data/test_gpu_decoding_gpu.py", "data/test_resident_gpu.py", "serving/test_served_gpu.py")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "gpu", "-rs"]
    del session
    yield Command("tests", [*words, *(str(ROOT / "tests" / file) for file in files)], 240)


PARTS: dict[str, Callable[[Session], Iterator[Command]]] = {
    "decode": decode, "predict": predict, "train": train, "serve": serve, "agree": agree, "fp8": fp8,
    "resident": resident, "tests": tests,
}  # fmt: skip


# ── running ──


def run(command: Command, log: Path, seconds: float) -> str:
    """Run a command, and return how it ended; its output goes to a file and to the terminal."""
    started, stopped = time.perf_counter(), False

    def stop(*_: object) -> None:
        nonlocal stopped
        with contextlib.suppress(ProcessLookupError):
            if stopped:
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            else:
                process.send_signal(signal.SIGINT)  # so that it stops its servers and workers
        stopped = True
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command.words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True
        ) as process,
    ):
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
        for line in process.stdout or ():
            print(line, end="", flush=True)
            file.write(line)
        code = process.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
    how = f"stopped after {seconds:.0f} s" if stopped else f"failed with exit code {code}" if code else "done"
    return f"{how}, {time.perf_counter() - started:.0f} s"


def rows_of(file: Path | None) -> list[dict[str, Any]]:
    """Return the rows that a command has written."""
    if file is None or not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    with contextlib.suppress(json.JSONDecodeError):
        content = json.loads(text)
        found: list[dict[str, Any]] = content.get("rows", content.get("results", [content]))
        return found
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # of a program that was stopped
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]


def name_of(row: dict[str, Any]) -> str:
    """Name a row of any program."""
    words = [row.get(key) for key in ("task", "model", "size", "library", "server", "name")]
    clients = [f"{row['clients']} clients"] if "clients" in row else []
    return ", ".join([str(word) for word in words if word is not None] + clients)


def table(rows: list[dict[str, Any]]) -> str:
    """Return all rows as a table."""
    lines = ["| part | what | values |", "|---|---|---|"]
    for row in rows:
        values = [f"{name} {row[name]:,.4g}" for name in SHOWN if isinstance(row.get(name), int | float)]
        lines.append(f"| {row['part']} | {name_of(row)} | {row.get('missing') or ', '.join(values)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, nargs="?", help="a folder of JPEGs")
    parser.add_argument("results", type=Path, nargs="?", help="a folder to write to")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; by default all")
    parser.add_argument("--minutes", type=float, default=28.0, help="after which no further command starts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few images, to test the programs")
    parser.add_argument("--list", action="store_true", help="list the parts and their commands")
    options = parser.parse_intermixed_args()
    parts = options.parts or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"{unknown[0]!r} is not a part; choose from {', '.join(PARTS)}")
    if options.list:
        session = Session(Path("PHOTOS"), Path("RESULTS"), options.device, options.tiny)
        for part in parts:
            print(*(f"{part}: {' '.join(command.words[1:])}" for command in PARTS[part](session)), sep="\n")
        return
    if options.results is None or not any(options.photos.rglob("*.jpg")):
        parser.error("give a folder with .jpg files, and a folder for the results")
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    session = Session(options.photos.resolve(), results, options.device, options.tiny)
    end, rows, endings = time.perf_counter() + 60 * options.minutes, list[dict[str, Any]](), list[str]()
    for part in parts:
        for command in PARTS[part](session):
            left = end - time.perf_counter()
            if left < 1:
                endings.append(f"{command.name}: not started, the time is up")
                continue
            print(f"\n── {command.name} ──", flush=True)
            if command.rows is not None:
                command.rows.unlink(missing_ok=True)
            ended = run(command, results / f"{command.name}.log", min(left, command.seconds))
            endings.append(f"{command.name}: {ended}")
            new = [{"part": command.name, **row} for row in rows_of(command.rows)]
            rows += new
            with (results / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
    print(f"\n{table(rows)}\n")
    print("\n".join(endings))


if __name__ == "__main__":
    main()
