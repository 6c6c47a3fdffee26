"""The command line, run as a person runs it."""

import json
import os
import subprocess
import sys

import pytest

import vitrail


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.run(
        [sys.executable, "-m", "vitrail", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"vitrail {vitrail.__version__}")


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("models", "--help"), ()])
def test_help(words: tuple[str, ...]) -> None:
    done = run(*words)
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
    for words in ("1 × 3 × 224 × 224", "1 × 196 × 768", "1 × 197 × 192", "1 × 3 × 197 × 197", "1 × 1000"):
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
def test_mistakes_get_one_sentence_and_exit_code_2(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_reader_that_leaves_early_is_no_fault() -> None:
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
