"""Options for Ray, the division of a cluster, and clusters that cannot be used."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import RunCommand
from tests.support.prediction_jobs import tiny_bundle, tiny_images

from vitrail import ConfigError, RayOptions
from vitrail.inference import ray_cluster
from vitrail.inference.ray_cluster import Node, Placement, place_workers


@pytest.mark.parametrize(
    ("nodes", "workers", "device", "placed"),
    [
        ([Node(2, 0)], None, "auto", Placement(1, 2, 0, "cpu")),
        ([Node(2, 0)], 2, "auto", Placement(2, 1, 0, "cpu")),
        ([Node(64, 0)], None, "cpu", Placement(8, 8, 0, "cpu")),
        ([Node(4, 0)] * 3, 2, "auto", Placement(2, 4, 0, "cpu")),  # 12 CPUs, but no machine has 6
        ([Node(16, 1), Node(16, 1)], None, "auto", Placement(2, 16, 1, "cuda")),
        ([Node(96, 8), Node(8, 0)], None, "cuda", Placement(8, 12, 1, "cuda")),
        ([Node(96, 8)], 4, "auto", Placement(4, 24, 1, "cuda")),
        ([Node(96, 8)], 4, "cpu", Placement(4, 24, 0, "cpu")),
        ([Node(4, 8)], None, "cuda", Placement(8, 0, 1, "cuda")),
    ],
)
def test_a_cluster_is_divided(nodes: list[Node], workers: int | None, device: str, placed: Placement) -> None:
    assert place_workers(nodes, workers, device) == placed


@pytest.mark.parametrize(
    ("workers", "device", "message"),
    [
        (3, "auto", r"has 2 CPUs, too few for 3 workers; use --ray-workers 2"),
        (1, "cuda", "has no GPU; use --device cpu"),
        (1, "cuda:1", "Ray assigns the GPUs, so the device cannot be cuda:1"),
    ],
)
def test_a_cluster_that_is_too_small(workers: int, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_workers([Node(2, 0)], workers, device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RayOptions(workers=0), "ray workers is 0"),
        (RayOptions(chunk=0), "chunk is 0"),
        (RayOptions("the cluster"), "'the cluster' is not the address of a Ray cluster; use local, auto, host:6379"),
    ],
)
def test_options_are_checked(options: RayOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.check()


def test_without_ray_the_error_names_the_package(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    tiny_bundle().save(tmp_path / "bundle")
    tiny_images(tmp_path / "images", 1)
    for command in ("predict", "embed"):
        done = run(command, "bundle", "images", "--output", "out", "--ray", "local")
        assert done.code == 2
        assert done.err == "vitrail: Ray is not installed, or incomplete: pip install 'vitrail[ray]'\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ray-workers", 2), "--ray-workers and --chunk need a cluster; add --ray local or its address"),
        (("--ray", "local"), "written to a folder of Parquet files; name it with --output"),
        (("--ray", "local", "-o", "out", "--format", "csv"), "written to a folder of Parquet files"),
    ],
)
def test_options_that_do_not_fit_ray(run: RunCommand, tmp_path: Path, words: tuple[object, ...], message: str) -> None:
    tiny_bundle().save(tmp_path / "bundle")
    tiny_images(tmp_path / "images", 1)
    done = run("predict", "bundle", "images", *words)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert message in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_cluster_that_cannot_be_reached(run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, and nothing is written, whether nothing or something else listens at the address."""
    monkeypatch.setattr(ray_cluster, "SECONDS", 8)
    monkeypatch.setattr(ray_cluster, "HEALTH_SECONDS", 8)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tiny_bundle().save(tmp_path / "bundle")
    tiny_images(tmp_path / "images", 1)
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        silent, closed = (f"127.0.0.1:{some.getsockname()[1]}" for some in (other, unused))
        for address in (closed, f"ray://{closed}", silent):
            done = run("predict", "bundle", "images", "--output", "out", "--ray", address)
            assert (done.code, done.err.count("\n")) == (2, 1)
            assert f"the Ray cluster at {address} cannot be reached" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_cluster_with_a_token(tmp_path: Path) -> None:
    """A cluster that `ray start` has started, by its address: without its token one sentence, with it rows."""
    tiny_bundle().save(tmp_path / "bundle")
    tiny_images(tmp_path / "images", 3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    # Without a token that another test or the user may have left; its sockets need a short path.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "1"]
    start += ["--node-ip-address", "127.0.0.1", "--port", address.rpartition(":")[2], "--include-dashboard", "false"]
    words = [sys.executable, "-m", "vitrail", "predict", "bundle", "images", "-o", "out", "--device", "cpu"]
    words += ["--ray", address]

    def predict(more: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=tmp_path, env={**environment, **more}, capture_output=True, text=True, check=False, timeout=300
        )

    with subprocess.Popen(start, env={**environment, **token}, stdout=subprocess.PIPE, text=True) as head:
        try:
            assert head.stdout is not None
            assert any("Ray runtime started" in line for line in head.stdout)
            refused, done = predict({}), predict(token)
        finally:
            head.terminate()
    assert refused.returncode == 2, refused.stderr
    assert f"the Ray cluster at {address} requires its authentication token; set RAY_AUTH_MODE=token" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "part-000000.parquet").is_file()
