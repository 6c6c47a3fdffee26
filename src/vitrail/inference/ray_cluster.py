"""A Ray cluster: connect to one or start one on this machine, and divide its CPUs and GPUs between workers."""

import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from vitrail.errors import ConfigError
from vitrail.models.checks import as_int

LOCAL, AUTO, CLIENT = "local", "auto", "ray://"
SECONDS, HEALTH_SECONDS = 20, 60
"""How long to wait for a connection to a cluster, and for Ray's health check, which on a busy machine takes 10 s to
start."""
CORES = 8
"""CPUs of a worker without a GPU, if there are as many: more threads would share layers instead of batches."""
_ADDRESS = re.compile(r"(?:ray://)?(\[[^\]]+\]|[^:/\s]+):(\d{1,5})")


@dataclass(frozen=True)
class RayOptions:
    """How a bulk job runs on Ray."""

    address: str = LOCAL
    """`local` starts a cluster on this machine, `auto` finds the running one; or an address: `host:6379`, or
    `ray://host:10001` for Ray's client."""
    workers: int | None = None
    """Number of workers; by default one per GPU, or one per eight CPUs."""
    chunk: int | None = None
    """Images per file of the output; by default 4,096."""

    def check(self) -> None:
        """Raise for an invalid option, and if Ray is not installed."""
        for what, number in (("ray workers", self.workers), ("chunk", self.chunk)):
            if number is not None and (as_int(number) is None or number < 1):
                raise ConfigError(f"{what} is {number!r}; it should be a whole number, 1 or more")
        if self.address not in (LOCAL, AUTO) and _ADDRESS.fullmatch(self.address) is None:
            raise ConfigError(
                f"{self.address!r} is not the address of a Ray cluster; use local, auto, host:6379 or ray://host:10001"
            )
        _import_ray()


def _import_ray() -> Any:
    # Ray reads these when it starts: no usage statistics, no warning about a later version, no log of its core on
    # stderr. An error that matters is raised, too.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.data
    except ImportError:
        raise ConfigError("Ray is not installed, or incomplete: pip install 'vitrail[ray]'") from None
    return ray


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster; a connection that already exists is used and kept."""
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    _check_reachable(address)
    try:
        ray.init(
            address=address,
            include_dashboard=False if address == LOCAL else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises a plain Exception if a machine is too busy to start it in time
        raise _unreachable(address, str(error)) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise if nothing responds at an address; Ray itself would wait for minutes and then end the process."""
    matched = _ADDRESS.fullmatch(address)
    if matched is None:
        return
    try:
        socket.create_connection((matched[1].strip("[]"), int(matched[2])), timeout=SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, getattr(error, "strerror", None) or str(error)) from None
    if address.startswith(CLIENT):
        return  # Ray's client has a timeout of its own
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        checked = subprocess.run(command, capture_output=True, timeout=HEALTH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise _unreachable(address, f"it did not respond like a Ray cluster within {HEALTH_SECONDS} s") from None
    if b"AuthenticationError" in checked.stderr:  # by default, Ray from 2.60 on protects what `ray start` starts
        raise ConfigError(
            f"the Ray cluster at {address} requires its authentication token; set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, as Ray's documentation says"
        )
    if checked.returncode:
        raise _unreachable(address, "what responds there is not a Ray cluster of this version")


def _unreachable(address: str, reason: str) -> ConfigError:
    why = " ".join(reason.split())[:200].rstrip(".")
    if address == LOCAL:
        return ConfigError(f"Ray could not start a cluster on this machine: {why}")
    where = "no running Ray cluster was found" if address == AUTO else f"the Ray cluster at {address} cannot be reached"
    return ConfigError(f"{where} ({why}); start one with `ray start --head`, or use --ray local")


class Node(NamedTuple):
    """A machine of a cluster."""

    cpus: int
    gpus: int


class Placement(NamedTuple):
    """The workers of a job, and what each of them gets."""

    workers: int
    cpus: int
    gpus: int
    device: str


def nodes_of(ray: Any) -> list[Node]:
    """Return the machines of a cluster."""
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(int(some.get("CPU", 0)), int(some.get("GPU", 0))) for some in found]


def place_workers(nodes: Sequence[Node], workers: int | None, device: str) -> Placement:
    """Divide a cluster: a GPU for each worker if there are any, and as many CPUs as every worker can get."""
    gpus, cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise ConfigError(f"with --ray, Ray assigns the GPUs, so the device cannot be {device}; use cuda, cpu or auto")
    if device == "cuda" and not gpus:
        raise ConfigError("the Ray cluster has no GPU; use --device cpu, or add machines with GPUs")
    on_gpu = gpus > 0 and device in ("auto", "cuda")
    most, noun = (gpus, "GPU") if on_gpu else (cpus, "CPU")
    wanted = (gpus if on_gpu else max(1, cpus // CORES)) if workers is None else workers
    if not most:
        raise ConfigError("the Ray cluster has no CPUs for workers; add machines, or start it with --num-cpus")
    if wanted > most:
        raise ConfigError(f"the Ray cluster has {most} {noun}s, too few for {wanted} workers; use --ray-workers {most}")
    for each in range(max(node.cpus for node in nodes), 0, -1):
        if sum(min(node.cpus // each, node.gpus if on_gpu else node.cpus) for node in nodes) >= wanted:
            return Placement(wanted, each, int(on_gpu), "cuda" if on_gpu else "cpu" if device == "auto" else device)
    return Placement(wanted, 0, int(on_gpu), "cuda")  # GPUs on machines with fewer CPUs than GPUs
