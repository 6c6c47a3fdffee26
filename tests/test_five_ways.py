"""The five ways of docs/architecture.md are those that real calls take."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def ways() -> dict[str, list[str]]:
    """The traced files, from a process of its own: other tests leave logging handlers behind, which would be traced."""
    command = [sys.executable, "-m", "tests.support.five_ways", "--json"]
    done = subprocess.run(command, cwd=PAGE.parents[1], capture_output=True, text=True, check=True)
    files: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return files


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """The sections of the page about a way, by title."""
    parts = re.split(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(
    "title",
    [
        "Image to gradient",
        "Checkpoint to model",
        "Image to prediction",
        "Request to response",
        "Image to explanation",
    ],
)
def test_the_page_names_every_file_of_a_way(title: str, ways: dict[str, list[str]], sections: dict[str, str]) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", sections[title]))
    traced = ways[title]
    assert named == set(traced)
    assert f"{len(traced)} files" in sections[title]


def test_the_page_has_no_other_way(ways: dict[str, list[str]], sections: dict[str, str]) -> None:
    assert list(sections) == list(ways)
