"""Fixtures for the command tests."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.commands import CommandOutput, RunCommand, run_command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run a command in this process, which saves the time for imports."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> CommandOutput:
        return run_command(monkeypatch, capsys, *words, "--workers", "0", "--device", "cpu")

    return command


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder with ten cats and ten dogs."""
    for label in ("cat", "dog"):
        folder = tmp_path / "photos" / label
        folder.mkdir(parents=True)
        for number in range(10):
            noise = np.random.default_rng([number, ord(label[0])]).integers(0, 256, (8, 8), np.uint8)
            Image.fromarray(noise).save(folder / f"{number}.png")
    return tmp_path / "photos"
