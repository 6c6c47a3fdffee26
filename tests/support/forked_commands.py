"""Real processes without their imports: `vitrail` commands forked from one process that imported everything once.

A forked command has its own exit code, streams, signals, limits and working directory, as one of `subprocess` has, and
starts in milliseconds instead of seconds. Where the start of Python itself is tested, use `subprocess`.
"""

import atexit
import functools
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; from vitrail.__main__ import main; main()"


class Process:
    """A forked process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, link: socket.socket, stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self._link, self.stdout, self.stderr = link, stdout, stderr
        self.pid = int(self._receive(None))
        self.returncode: int | None = None

    def _receive(self, timeout: float | None) -> bytes:
        self._link.settimeout(timeout)
        return self._link.recv(64)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code, negative for a signal."""
        if self.returncode is None:
            try:
                self.returncode = int(self._receive(timeout))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("vitrail", timeout or 0) from None
            self._link.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code if the process has ended."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Read both streams to their end and wait; a process that takes too long is killed."""
        texts: dict[str, str] = {"stdout": "", "stderr": ""}

        def read(name: str, stream: IO[str]) -> None:
            with stream:
                texts[name] = stream.read()

        streams = [(name, stream) for name in texts if (stream := getattr(self, name)) is not None]
        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in streams]
        for reader in readers:
            reader.start()
        end = time.monotonic() + timeout
        for reader in readers:
            reader.join(max(0, end - time.monotonic()))
        try:
            self.wait(max(0.01, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        for reader in readers:
            reader.join()
        return texts["stdout"], texts["stderr"]


def start(
    *words: object,
    code: str = COMMAND,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    new_session: bool = False,
) -> Process:
    """Start `vitrail` with these words, or other code that reads `sys.argv`; streams are given as to `Popen`."""
    opened: list[int] = []
    streams: dict[str, IO[str] | None] = {"stdout": None, "stderr": None}

    def descriptor(given: int, name: str) -> int:
        if given == subprocess.PIPE:
            read, write = os.pipe()
            streams[name] = open(read, encoding="utf-8")  # noqa: SIM115 - the caller closes it
            opened.append(write)
        elif given == subprocess.DEVNULL:
            opened.append(os.open(os.devnull, os.O_RDWR))
        else:
            return given
        return opened[-1]

    request = {
        "words": ["vitrail", *map(str, words)],
        "code": code,
        "environment": dict(os.environ if environment is None else environment),
        "folder": str(folder or Path.cwd()),
        "new_session": new_session,
        "threads": torch.get_num_threads(),
    }
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    text, body = os.pipe()  # of any length, unlike a datagram
    descriptors = [descriptor(stdin, "stdin"), descriptor(stdout, "stdout"), descriptor(stderr, "stderr")]
    try:
        socket.send_fds(_server(), [b"start"], [*descriptors, theirs.fileno(), text])
        os.close(text)
        with open(body, "w", encoding="utf-8") as file:
            json.dump(request, file)
    finally:
        theirs.close()
        for number in opened:
            os.close(number)
    return Process(ours, streams["stdout"], streams["stderr"])


def run(*words: object, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its output."""
    process = start(*words, **options)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(words, process.wait(), out, err)


def run_ranks(count: int, *words: object, code: str = COMMAND) -> list[subprocess.CompletedProcess[str]]:
    """Run code on several ranks, in the environment that torchrun would give them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
            processes.append(start(*words, code=code, environment={**os.environ, **shared, **own}))
        outputs = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(words, process.wait(), *output)
        for process, output in zip(processes, outputs, strict=True)
    ]


@functools.cache
def _server() -> socket.socket:
    """Start the process that is forked; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tests.support.forked_commands", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


# ── the process that is forked ──


def _next_request(server: socket.socket) -> str:
    """Wait for requests and fork; this function returns in the forked processes only, with the code to execute."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the helpers
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, 16, 5)
        if not message:
            sys.exit()
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    # A helper waits for the command, so that this loop does not need to.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server.close()
    *streams, link, body = descriptors
    with open(body, encoding="utf-8") as file:
        request = json.load(file)
    child = os.fork()
    if child:
        for stream in streams:
            os.close(stream)
        with socket.socket(fileno=link) as reply:
            reply.send(str(child).encode())
            _, status = os.waitpid(child, 0)
            reply.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    os.close(link)
    _become(request, streams)
    code: str = request["code"]
    return code


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Take over the streams, arguments, environment and folder of a request."""
    if request["new_session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in set(streams) - {0, 1, 2}:
        os.close(stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _writer(1, line_buffering=os.isatty(1), errors="strict")
    sys.stderr = _writer(2, line_buffering=True, errors="backslashreplace")
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["words"]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", request["threads"])))


def _writer(number: int, *, line_buffering: bool, errors: str) -> io.TextIOWrapper:
    raw = open(number, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=line_buffering)


def _execute(code: str) -> NoReturn:
    """Execute code and exit as Python does, but without taking all modules apart, which costs a second."""
    status = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        traceback.print_exc()
        status = 120
    os._exit(status)


PRELOADED = (
    "pyarrow.parquet",
    "tensorboard.compat.proto.event_pb2",
    "torch._dynamo",  # the first optimizer imports it
    "vitrail.api",
    "vitrail.checkpoints.inspect",
    "vitrail.cli.app",
    "vitrail.serving.app",
    "vitrail.training.train",
)
"""What commands import on the way."""

if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    _execute(_next_request(socket.socket(fileno=int(sys.argv[1]))))
