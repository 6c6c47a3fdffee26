"""The command line, end to end."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support import forked_commands
from tests.support.commands import run_command
from tests.support.peers import scramble

import vitrail

ENVIRONMENT = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}


def run_fresh(*words: str) -> subprocess.CompletedProcess[str]:
    """Run as a user does, with a fresh Python."""
    command = [sys.executable, "-m", "vitrail", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=120)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return forked_commands.run(*words, environment=ENVIRONMENT)


def test_version() -> None:
    done = run_fresh("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"vitrail {vitrail.__version__}")


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("models", "--help"), ()])
def test_help(words: tuple[str, ...]) -> None:
    done = run_fresh(*words)
    assert "Usage: " in done.stdout + done.stderr
    assert "models" in done.stdout + done.stderr


def test_models_lists_every_variant() -> None:
    done = run("models")
    assert done.returncode == 0, done.stderr
    assert "vit_base_patch16_224      B/16         86,567,656     197   35.13" in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("vit_")]) == 16


def test_models_as_json() -> None:
    rows = json.loads(run("models", "--json").stdout)
    assert {row["paper"] for row in rows} >= {"Ti/16", "R50+L/32"}
    assert rows[0] == {
        "name": "vit_tiny_patch16_224",
        "paper": "Ti/16",
        "parameters": 5717416,
        "tokens": 197,
        "flops": 2507366400,
    }


def test_one_model_in_detail() -> None:
    done = run("models", "Ti/16")
    assert done.returncode == 0, done.stderr
    for words in ("1 × 3 × 224 × 224", "1 × 192 × 14 × 14", "1 × 197 × 192", "1 × 3 × 197 × 197", "1 × 1000"):
        assert words in done.stdout
    report = json.loads(run("models", "Ti/16", "--json").stdout)
    assert report["config"]["width"] == 192
    assert [stage["shape"] for stage in report["stages"]][-1] == [1, 1000]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("models", "B/17"), "no model is called 'B/17'; did you mean 'B/16'?"),
        (("models", "vit_base_patch16_225"), "image height 225 is not a multiple of patch height 16"),
        (("modles",), "No such command 'modles'"),
        (("models", "--jsn"), "No such option: --jsn"),
    ],
)
def test_user_errors_print_one_sentence_and_exit_with_2(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_serve_lists_the_missing_packages_and_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    done = run_command(monkeypatch, capsys, "serve", "bundle")
    assert done.code == 2
    assert done.err == (
        "vitrail: vitrail serve needs packages that are not installed (starlette, uvicorn, prometheus_client, "
        "python_multipart); install them with pip install 'vitrail[serve]'\n"
    )


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error() -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m vitrail models Ti/16 --json | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""


@pytest.mark.parametrize("words", [("models",), ("models", "Ti/16", "--json"), ("--help",)])
@pytest.mark.slow
def test_every_command_exits_quietly_when_its_reader_leaves(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "vitrail", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [("models",), ("models", "Ti/16", "--json")])
@pytest.mark.slow
def test_a_full_disk_behind_stdout_is_named(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "vitrail", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 2
    words_wanted = "stdout could not be written: No space left on device; free some space, or write elsewhere"
    assert done.stderr.strip() == f"vitrail: {words_wanted}"


# ── checkpoints ──

HEADS = ("--override", "heads=1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = vitrail.create(
        vitrail.ViTConfig(image_size=(32, 32), patch_size=(8, 8), width=64, depth=2, heads=1, classes=3)
    )
    scramble(model)
    torch.save(model.state_dict(), folder / "vit.pth")
    return folder / "vit.pth"


def test_inspect(checkpoint: Path) -> None:
    done = run("inspect", str(checkpoint), *HEADS, "--tensors")
    assert done.returncode == 0, done.stderr
    for words in (
        "timm",
        "2 blocks of width 64 with 1 head",
        "32×32, 3 channels, patches of 8×8",
        "none of the named sizes",
        "32 of 32 tensors, 0.1",
        "blocks.1.mlp.fc2.weight",
    ):
        assert words in done.stdout
    assert "note: the class names are unknown" in done.stdout
    report = json.loads(run("inspect", str(checkpoint), *HEADS, "--json").stdout)
    assert report["config"]["width"] == 64
    assert len(report["tensors"]) == 32


def test_inspect_finds_broken_tensors(checkpoint: Path, tmp_path: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)
    state["blocks.0.mlp.fc1.weight"][0, :3] = float("nan")
    state["head.weight"].zero_()
    torch.save(state, tmp_path / "broken.pth")
    done = run("inspect", str(tmp_path / "broken.pth"), *HEADS)
    assert "note: blocks.0.mlp.fc1.weight has 3 values that are not finite" in done.stdout
    assert "note: head.weight is all zero" in done.stdout
    refused = run("convert", str(tmp_path / "broken.pth"), str(tmp_path / "out"), *HEADS)
    assert refused.returncode == 2
    assert "not finite, so nothing was written" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_convert(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    changed = ("--image-size", "48", "--classes", "5", *HEADS)
    done = run("convert", str(checkpoint), str(target), "--to", "transformers", *changed)
    assert done.returncode == 0, done.stderr
    assert "transformers, 40 tensors" in done.stdout
    assert "head reset 3 -> 5" in done.stdout
    assert "position 4x4 -> 6x6 by timm" in done.stdout
    assert json.loads((target / "config.json").read_text())["image_size"] == 48
    again = run("convert", str(checkpoint), str(target), "--to", "transformers", *HEADS)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "onnx"), "no format is called 'onnx'"),
        (("--to", "google"), "would differ slightly: activation='gelu'"),
        (("--image-size", "big"), "'big' is not a size; write 384"),
        (("--image-size", "33"), "not a multiple of patch"),
        (("--override", "heads=7"), "7 heads do not divide"),
        (("--position", "cubic"), "no resampling method 'cubic'"),
    ],
)
def test_impossible_conversions(words: tuple[str, ...], message: str, checkpoint: Path, tmp_path: Path) -> None:
    extra = ("--image-size", "64") if words[0] == "--position" else ()
    done = run("convert", str(checkpoint), str(tmp_path / "out.npz"), *HEADS, *words, *extra)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1, "only the error"
    assert list(tmp_path.iterdir()) == []


# ── disk errors ──


def run_limited(setup: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that first drops privileges or sets limits."""
    return forked_commands.run(*words, code=f"{setup}\n{forked_commands.COMMAND}")


NOBODY = "import os\nif os.geteuid() == 0: os.setgid(65534); os.setuid(65534)"


def test_a_folder_without_permission(checkpoint: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "vit.pth").write_bytes(checkpoint.read_bytes())
    closed.chmod(0o000)
    try:
        for words in (("inspect", str(closed)), ("inspect", str(closed / "vit.pth"))):
            done = run_limited(NOBODY, *words)
            assert (done.returncode, done.stdout) == (2, "")
            assert "cannot be read: Permission denied" in done.stderr
            assert len(done.stderr.splitlines()) == 1
    finally:
        closed.chmod(0o700)
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o555)
    done = run_limited(f"{NOBODY}", "convert", str(checkpoint), str(kept / "out"), *HEADS)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Permission denied" in done.stderr
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize(
    "form",
    ["bundle", *(pytest.param(form, marks=pytest.mark.slow) for form in ("google", "torchvision", "transformers"))],
)
def test_a_full_disk_leaves_the_target_unchanged(form: str, checkpoint: Path, tmp_path: Path) -> None:
    """A file size limit simulates a full disk: writing fails half-way."""
    target = tmp_path / {"google": "out.npz", "torchvision": "out.pth"}.get(form, "out")
    words = ("convert", str(checkpoint), str(target), "--to", form, "--approximate", "--overwrite", *HEADS)
    assert run(*words).returncode == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    done = run_limited(full, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "could not be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert {path.name for path in tmp_path.iterdir()} == {target.name}
