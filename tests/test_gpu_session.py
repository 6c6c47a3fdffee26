"""benchmarks/gpu_session.py: parts that fail or take too long do not stop the others, and their rows are kept."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import gpu_session
from benchmarks.gpu_session import PARTS, Command, Session, main, name_of, rows_of, run, table

SPAWN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
try:
    time.sleep(60)
finally:
    child.kill()
    child.wait()
    print("children stopped", flush=True)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"


def ended(code: str, tmp_path: Path, seconds: float = 30) -> tuple[str, str]:
    log = tmp_path / "log"
    how = run(Command("part", [sys.executable, "-c", code], seconds), log, seconds)
    return how.partition(", ")[0], log.read_text()


def test_how_commands_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended("print('one'); print('two')", tmp_path) == ("done", "one\ntwo\n")
    assert ended("raise SystemExit(3)", tmp_path) == ("failed with exit code 3", "")
    monkeypatch.setattr(gpu_session, "PATIENCE", 0.5)
    started = time.monotonic()
    assert ended(STUBBORN, tmp_path, 2) == ("stopped after 2 s", "on\n")
    assert time.monotonic() - started < 20


def test_a_stopped_command_stops_its_children(tmp_path: Path) -> None:
    how, log = ended(SPAWN, tmp_path, 3)
    assert how == "stopped after 3 s"
    child, *rest = log.split("\n")
    assert "children stopped" in rest
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)


def test_rows_of_every_format(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    assert rows_of(None) == rows_of(file) == []
    rows: list[dict[str, object]] = [
        {"name": "a", "images_per_second": 1234.5},
        {"server": "b", "clients": 64, "p95_ms": 3},
    ]
    for content in ({"rows": rows, "torch": "2"}, {"results": rows}):
        file.write_text(json.dumps(content, indent=2))
        assert rows_of(file) == rows
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"name": "cut o')
    assert rows_of(file) == rows
    file.write_text(json.dumps(rows[0]) + "\n")
    assert rows_of(file) == rows[:1]
    file.write_text('{"rows": [{"na')
    assert rows_of(file) == []
    assert name_of({"task": "train", "model": "S/16", "library": "timm", "batch": 3}) == "train, S/16, timm"
    missing: dict[str, object] = {"task": "t", "missing": "no module"}
    lines = table([{"part": "x", **row} for row in [*rows, missing]]).splitlines()
    assert lines[2:] == [
        "| x | a | images_per_second 1,234 |", "| x | b, 64 clients | p95_ms 3 |", "| x | t | no module |",
    ]  # fmt: skip


@pytest.mark.slow
def test_programs_have_the_options_that_they_get(tmp_path: Path) -> None:
    asked: dict[str, set[str]] = {}
    for tiny in (False, True):
        commands = [command for part in PARTS.values() for command in part(Session(tmp_path, tmp_path, "cpu", tiny))]
        assert len({command.name for command in commands}) == len(commands) > len(PARTS)
        for command in commands:
            if command.words[1].endswith(".py"):
                asked.setdefault(command.words[1], set()).update(word for word in command.words if word[:2] == "--")
    assert len(asked) == 5
    helps = {program: [sys.executable, program, "--help"] for program in asked}
    running = {name: subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for name, words in helps.items()}
    for program, process in running.items():
        known = set(process.communicate()[0].replace(",", " ").replace("[", " ").split())
        assert asked[program] <= known, program


@pytest.mark.slow
def test_a_tiny_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    words = [str(tmp_path / "photos"), str(tmp_path / "results"), "resident", "--tiny", "--device", "cpu"]
    for more in ([], ["--minutes", "0"]):
        monkeypatch.setattr(sys, "argv", ["gpu_session.py", *words, *more])
        main()
    (row,) = [json.loads(line) for line in (tmp_path / "results" / "rows.jsonl").read_text().splitlines()]
    assert (row["part"], row["images"]) == ("resident", 500)
    assert row["images_per_second"] > 0
    output = capfd.readouterr().out
    assert "resident: done" in output
    assert "resident: not started, the time is up" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [(["nowhere", "results"], "give a folder with .jpg files"), (["a", "b", "speed"], "'speed' is not a part")],
)
def test_mistakes(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_session.py", *words])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
