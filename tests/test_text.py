"""Text from files cannot control the terminal: class names, file names, messages."""

import ast
import json
import os
import pty
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.support.live_server import save_tiny

import vitrail
from vitrail.__main__ import main
from vitrail.text import printable

EVIL = "\x1b]0;owned\x07\x1b[2Jcat\x9b31m"
TEXT = st.text('\x00\x07\t\n\r\x1b\x7f\x85\x9b\u202e\u2066\u2028 aé猫😀[]"\\\\')
CLI = Path(vitrail.__file__).parent / "cli"


@settings(deadline=None)
@given(TEXT)
def test_printable_escapes_control_characters(text: str) -> None:
    made = printable(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or "\u202a" <= c <= "\u202e" for c in made)
    assert printable(made) == made
    assert "\n" not in printable(text, line=True)
    if text.isascii() and text.isprintable():
        assert made == text


@settings(deadline=None)
@given(TEXT)
def test_json_stays_valid(text: str) -> None:
    assert json.loads(printable(json.dumps([text], ensure_ascii=False))) == [text]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "m", classes=(EVIL, f"dog{EVIL}", "bird"))


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["vitrail", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    """Run a command with its output on a terminal, and return that output."""
    master, slave = pty.openpty()
    read: list[bytes] = []

    def listen() -> None:
        try:
            while piece := os.read(master, 65_536):
                read.append(piece)
        except OSError:  # the other end is closed
            return

    listener = threading.Thread(target=listen)
    listener.start()
    with os.fdopen(slave, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("NO_COLOR", "1")
        run(patch, *words)
    listener.join(10)
    os.close(master)
    return b"".join(read).decode()


def test_predictions_on_a_terminal_are_safe_and_in_a_file_exact(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "x\x1b[31m.png"
    Image.new("RGB", (8, 8)).save(image)
    command = ("predict", bundle, image, "--top", 3, "--device", "cpu", "-q", "--workers", 0)
    for more in ((), ("--format", "csv"), ("--format", "jsonl"), ("--format", "table")):
        output = on_a_terminal(monkeypatch, *command, *more)
        assert "cat" in output
        assert "\x1b" not in output
        assert "\x9b" not in output
        assert "\x07" not in output
    assert run(monkeypatch, *command, "--output", tmp_path / "rows.jsonl") == 0
    row = json.loads((tmp_path / "rows.jsonl").read_text(encoding="utf-8"))
    assert EVIL in row["classes"]
    assert run(monkeypatch, *command, "--output", tmp_path / "rows.csv") == 0
    assert EVIL in (tmp_path / "rows.csv").read_text(encoding="utf-8")


def test_tables_and_errors_are_safe(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in (EVIL, f"dog{EVIL}", "bird"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (number, len(label), 9)).save(tmp_path / "data" / label / f"{number}.png")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    for words in (
        ("eval", bundle, tmp_path / "data", "--device", "cpu", "--workers", 0),
        ("check", tmp_path / "data", "--workers", 0),
        ("inspect", bundle),
        ("inspect", tmp_path / f"nothing{EVIL}"),
        ("train", tmp_path / f"nothing{EVIL}"),
    ):
        run(monkeypatch, *words)
        output = "".join(capsys.readouterr())
        assert output
        assert not {"\x1b", "\x9b", "\x07"} & set(output), words


def test_commands_print_through_one_function() -> None:
    for path in sorted(CLI.glob("*.py")):
        if path.name == "output.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "typer.echo", "typer.secho"), f"{path.name}:{node.lineno}: use echo"
