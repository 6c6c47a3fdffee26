"""The project uses the field's terms; the words that they replaced do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OTHER_TERMS = {
    r"picture": "image",
    r"verdict": "result",
    r"\b(val|validation|test|train|training) parts?\b": "split",
    r"as a rule": "usually, by default",
    r"begins? again": "restart",
    r"how sure it is": "confidence",
    r"leave away": "leave out",
    r"the way back": "backward pass",
    r"shorter way": "fused path",
    r"longest gradient": "max gradient norm",
    r"into how many parts": "gradient accumulation steps",
    r"\b(shelf|parcel|underway)\b": "registry, packing, pipelined",
}
"""A regular expression for each term to avoid, and what to write instead."""
PLACES = ("src", "docs", "tests", "benchmarks", "examples", "README.md", "CONTRIBUTING.md", "SECURITY.md")
SUFFIXES = {".py", ".md", ".js", ".css", ".html", ".toml", ".json", ".svg"}


def files() -> list[Path]:
    result = [
        path for place in PLACES for path in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))
    ]
    return [
        path
        for path in result
        if path.suffix in SUFFIXES and path != Path(__file__) and "__pycache__" not in path.parts
    ]


@pytest.mark.parametrize("term", OTHER_TERMS)
def test_other_terms_are_absent(term: str) -> None:
    word = re.compile(term, re.IGNORECASE)
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if word.search(line)
    ]
    assert not lines, f"write {OTHER_TERMS[term]}: {lines[:5]}"


def test_the_search_covers_the_project() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in files()}
    assert names == set(PLACES)
    assert len(files()) > 400
