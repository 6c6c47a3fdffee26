"""Console output of a run: on terminals of any width, without one, and without the optional packages."""

import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support import forked_commands

from vitrail.training.console import RunConsole
from vitrail.training.display import Status, defaults_lines, defaults_table, used_memory
from vitrail.training.plan import ResolvedDefault
from vitrail.training.train import train

CHANGES = ["epochs=1", "evaluations=2", "model.width=32", "model.depth=1", "model.heads=1", "model.patch_size=4"]
CHOICES = [
    ResolvedDefault(
        "model.image_size", (8, 8), "the shorter sides are about 8 pixels, and 48 is enough for so few images"
    ),
    ResolvedDefault("batch", 64, "about 24 steps per epoch of 1,439 images [bold]"),
]


def row(step: int, **more: float) -> dict[str, Any]:
    plain = {"step": step, "steps": 12_000, "epoch": step / 24, "loss": 1.5, "accuracy": 0.625, "images": 512}
    return {**plain, "seconds": 0.09, "waited": 0.03, **more}


def status() -> Status:
    result = Status()
    for step in range(1, 2001):
        result.update(row(step))
    return result


def printed(thing: object, width: int) -> list[str]:
    console = Console(width=width, force_terminal=True, color_system=None, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(thing)
        return [line.rstrip() for line in console.export_text().splitlines()]


# ── notes ──


@pytest.mark.slow
def test_a_busy_cpu_is_noted_once_and_not_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = iter((90.0, 80.0, 70.0))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    words, changes = "this machine is busy", ["steps=1", "evaluations=1", *CHANGES[2:]]
    shared: set[str] = set()
    for name in ("first", "first", "second"):  # the second time it is resumed; the last is another run of a sweep
        train("digits", changes=changes, folder=tmp_path / name, device="cpu", workers=0, printed=shared)
    assert capsys.readouterr().err.count(words) == 1
    assert (tmp_path / "first" / "log.txt").read_text().count(f"note: {words} (load 90.0 on 2 CPUs)") == 1
    assert (tmp_path / "second" / "log.txt").read_text().count(f"note: {words} (load 80.0 on 2 CPUs)") == 1


# ── the two lines ──


def test_status_is_two_lines_on_any_terminal() -> None:
    shown = status()
    for width in range(10, 161):
        lines = printed(shown, width)
        assert len(lines) == 2
        assert max(map(len, lines)) <= width
        assert lines[1].count("loss 1.500") == 1
        if width >= 36:
            assert lines[0].endswith("17%   step 2,000/12,000   20:00 left")


def test_status_at_common_widths() -> None:
    memory = r"[\d.]+ [MG]B"
    wide, usual, narrow = (printed(status(), width)[1] for width in (140, 80, 40))
    full = rf"epoch 83.3   loss 1.500   accuracy 62.5%   4,267 images/s   waiting for data 25%   memory {memory}"
    assert re.fullmatch(full, wide)
    assert re.fullmatch(rf"epoch 83.3   loss 1.500   acc. 62.5%   4,267 images/s   waiting 25%   {memory}", usual)
    assert narrow == "loss 1.500   acc. 62.5%   4,267 images/s"


def test_the_plain_line_has_every_field() -> None:
    line = str(status())
    assert line.startswith(
        "step 2,000/12,000  epoch 83.3  loss 1.500  accuracy 62.5%  4,267 images/s  waiting for data"
    )
    assert line.endswith("20:00 left")
    assert "\n" not in line


def test_the_first_step_does_not_count_for_throughput() -> None:
    shown = Status()
    shown.update(row(1, seconds=60.0))
    assert printed(shown, 140)[0].endswith("step 1/12,000   … left")
    assert "  … images/s  " in str(shown)
    assert shown.waiting_fraction == 0
    shown.update(row(2))
    assert shown.waiting_fraction == pytest.approx(0.25)
    assert "  4,267 images/s  " in str(shown)
    assert str(shown).endswith("24:00 left")
    alone = Status()
    alone.update(row(1, steps=1))
    assert str(alone).endswith("0:00 left")


def test_status_before_the_first_step_is_empty() -> None:
    assert printed(Status(), 80) == []
    assert Status().waiting_fraction == 0


def test_memory_is_the_peak() -> None:
    before = used_memory()
    block = bytearray(os.urandom(1)) * 300_000_000
    while_held = used_memory()
    del block
    slack = 2_000_000  # per-core counters are merged only now and then
    assert used_memory() > while_held - slack > before - 2 * slack
    assert while_held > 300e6


# ── resolved defaults ──


def test_defaults_are_aligned() -> None:
    table = printed(defaults_table(CHOICES), 140)
    assert [line.index(word) for line, word in zip(table, ("reason", "the", "about"), strict=True)] == [27, 27, 27]
    assert defaults_lines(CHOICES)[1] == f"batch             64   {CHOICES[1].reason}"
    narrow = printed(defaults_table(CHOICES), 60)
    assert [line[:16].strip() for line in narrow] == ["default", "model.image_size", "", "", "batch", "", ""][
        : len(narrow)
    ]
    assert max(map(len, narrow)) <= 60


def test_quiet_is_quiet_and_still_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with RunConsole(tmp_path, quiet=True) as screen:
        screen.defaults(CHOICES)
        screen.step(row(1))
        screen.note("a [red]note")
        screen.result("good")
    assert capfd.readouterr() == ("", "")
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert log == [*defaults_lines(CHOICES), "a [red]note", "good"]


# ── whole runs ──


def test_a_run_on_a_terminal(tmp_path: Path) -> None:
    changes = [word for change in CHANGES for word in ("--set", change)]
    command = ["train", "digits", "--run", "run", "--device", "cpu", "--workers", "0"]
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment["TERM"] = "xterm"
    process = forked_commands.start(
        *command, *changes, stdout=theirs, stderr=theirs, folder=tmp_path, environment=environment
    )
    os.close(theirs)
    output = b""
    while chunk := _read(ours):
        output += chunk
    os.close(ours)
    assert process.wait() == 0
    written = re.sub(r"\x1b\[[0-9;]*m", "", output.decode())
    assert re.search(r"step [\d]+/20   \d+:\d\d left", written)
    screen = _screen(written)
    assert (
        max(len(line) for line in screen if not line.startswith(("memory: ", "1,797 ", "note: "))) <= 80
    )  # messages are not wrapped
    assert not any("left" in line for line in screen), "the two lines go when the run ends"
    assert sum("held-out images" in line for line in screen) == 1
    log = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert screen[-1] == "the report is run/report.html"
    assert " ".join(screen[:-1]).endswith(log[-1])
    assert any(re.match(r"batch\s+64\s+about 20 steps", line) for line in screen)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux raises this when the other end is closed
        return b""


def _screen(written: str) -> list[str]:
    """Return the final screen of a terminal that received this output."""
    lines: list[str] = [""]
    at = 0
    for match in re.finditer(r"\x1b\[\??(\d*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)", written):
        count, code, _, newline, text = match.groups()
        if code == "A":
            at -= int(count or 1)
        elif code == "K":
            lines[at] = ""
        elif newline:
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif text:
            lines[at] = text.rstrip()
    while lines[-1] == "":
        lines.pop()
    return lines


@pytest.mark.slow
def test_without_the_extra_optional_files_are_skipped_and_added_later(tmp_path: Path) -> None:
    code = f"""
import sys
for package in ("tensorboard", "pyarrow"):
    sys.modules[package] = None
from vitrail.training.train import train
train("digits", changes={CHANGES!r}, folder={str(tmp_path / "run")!r}, device="cpu", workers=0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    note = "not written: tensorboard, test_predictions.parquet; pip install 'vitrail[train]' adds them"
    assert done.stderr.splitlines().count(note) == 1
    assert "held-out images" in done.stderr.splitlines()[-1]
    files = {"tensorboard", "test_predictions.parquet"}
    assert files.isdisjoint(path.name for path in (tmp_path / "run").iterdir())
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    train("digits", changes=CHANGES, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    assert files <= {path.name for path in (tmp_path / "run").iterdir()}
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_a_run_survives_curves_that_cannot_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "run" / "curves.svg").mkdir(parents=True)
    (tmp_path / "run" / "tensorboard").write_text("in the way")
    (tmp_path / "run" / ".lock").touch()  # a run was here before
    train("digits", changes=CHANGES, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("tensorboard is no longer written: ") == 1
    assert log.count("curves.svg is no longer written: ") == 1
    assert "held-out images" in log.splitlines()[-1]


@pytest.mark.slow
def test_the_result_says_how_long_this_session_waited_for_data(tmp_path: Path) -> None:
    def summary() -> str:
        run = train("digits", changes=CHANGES, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
        return run.summary

    assert re.search(r"; waiting for data \d+%$", summary())
    assert "waiting for data" not in summary()  # the run has finished, so no step is taken


def test_a_checkpoint_that_is_kept_is_called_the_best_only_where_it_is(tmp_path: Path) -> None:
    row = {"step": 9, "best": 9, "val_top1": 0.5, "val_loss": 1.0, "criterion": "accuracy"}
    with RunConsole(tmp_path, quiet=True) as screen:  # also the first one that a resumed run measures
        screen.validation({**row, "highest": False})
        screen.validation({**row, "highest": True})
        screen.validation({**row, "highest": False, "best": 6})
    kept, best, other = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert kept.endswith("(kept: within one standard error)")
    assert best.endswith("(best so far)")
    assert other.endswith("loss 1.000")
