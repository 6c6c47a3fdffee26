"""The project uses the field's terms; the words that they replaced do not come back.

The search covers the files of the project, and what users see of it without a file of its own: the help of every
command, and the keys of recipes, configs, results, metrics and HTTP responses.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vitrail import Bundle, Preprocess, ViT, ViTConfig
from vitrail.cli.app import app
from vitrail.data.sources.opening import open_data
from vitrail.data.sources.source import Arrays
from vitrail.serving.openapi import document
from vitrail.serving.settings import Settings
from vitrail.tasks.classification_metrics import classification_metrics
from vitrail.tasks.lookup import CLASSIFICATION
from vitrail.tasks.task import Predictions
from vitrail.training.recipe_files import option_names

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
    r"answer": "prediction, output, response",
    r"\b(goes|go|going)[ _]on\b": "resume",
    r"\bdamaged\b": "corrupt",
    r"\bbeside\b": "next to, compared with",
    r"\bours took\b": "vitrail took",
    r"\bteams?\b": "ranks, distributed",
    r"\bdoors?\b": "middleware, entry point",
    r"\bforgets?\b": "betas, decay",
    r"as far as it is looked at": "cache key",
    r"(images|pictures) a second": "images/s",
    r"what survives a stop": "training state, checkpoint",
}
"""A regular expression for each term to avoid, and what to write instead."""
IN_KEYS = {
    r"\b(parts?|shares?|rooms?|cards?|said|found|wanted|given|known|told|asked)\b": "split, fraction, memory, gpu",
    r"(?<!learning )\brate\b": "lr, learning_rate",
    r"\bprocessor\b": "cpu",
}
"""Terms that are ordinary words in prose, but not in a key."""
PLACES = (
    "src", "docs", "tests", "benchmarks", "examples", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
)  # fmt: skip
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


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """Return the help of the app and of every command."""
    names = [name for name, command in get_command(app).commands.items() if not command.hidden]  # type: ignore[attr-defined]
    wide = {"COLUMNS": "300", "TERM": "dumb"}
    texts = {name: CliRunner().invoke(app, [name, "--help"], env=wide).output for name in names}
    return {"vitrail": CliRunner().invoke(app, ["--help"], env=wide).output} | texts


def keys_of(value: Any) -> Iterator[str]:
    """Yield the keys of a JSON value, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)


def properties_of(schema: Any) -> Iterator[str]:
    """Yield the names of the properties and parameters in an OpenAPI document."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        if "in" in schema and "name" in schema:
            yield schema["name"]
        for inner in schema.values():
            yield from properties_of(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from properties_of(inner)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the keys of the files and responses that users read, by where they are."""
    folder = tmp_path_factory.mktemp("language")
    config = ViTConfig(image_size=16, patch_size=8, width=16, depth=1, heads=1, classes=3)
    Bundle(ViT(config), Preprocess(size=(16, 16)), ("a", "b", "c")).save(folder / "bundle")
    labels = np.arange(12) % 3
    predictions = Predictions(np.full((12, 3), 1 / 3, np.float32), labels, np.arange(12))
    result = classification_metrics(predictions, Arrays(np.zeros((12, 2, 2), np.uint8), labels, ("a", "b", "c")))
    return {
        "recipe": {word for name in option_names() for word in name.split(".")},
        "config.json": set(keys_of(json.loads((folder / "bundle" / "config.json").read_text(encoding="utf-8")))),
        "split.json": set(keys_of(open_data("digits", fraction=0.5).record)),
        "result.json": set(keys_of(result.as_dict())),
        "metrics.jsonl": {CLASSIFICATION.training_metric.key, *CLASSIFICATION.validation(predictions, ("a", "b", "c"))},
        "HTTP": set(properties_of(document(Settings(models=[str(folder / "bundle")])))),
    }


@pytest.mark.parametrize("term", OTHER_TERMS)
def test_other_terms_are_absent_from_the_help(term: str, helps: dict[str, str]) -> None:
    for name, text in helps.items():
        assert not re.search(term, " ".join(text.split()), re.IGNORECASE), f"{name} --help: write {OTHER_TERMS[term]}"


@pytest.mark.parametrize("term", [*OTHER_TERMS, *IN_KEYS])
def test_other_terms_are_absent_from_keys(term: str, keys: dict[str, set[str]]) -> None:
    word = re.compile(term, re.IGNORECASE)
    for place, names in keys.items():
        wrong = [name for name in names if word.search(name.replace("_", " "))]
        assert not wrong, f"{place}: write {(OTHER_TERMS | IN_KEYS)[term]}: {wrong}"


def test_help_and_keys_are_covered(helps: dict[str, str], keys: dict[str, set[str]]) -> None:
    assert {"vitrail", "train", "predict", "serve", "eval"} < helps.keys()
    assert all("Usage: " in text for text in helps.values())
    for place, name in {
        "recipe": "layer_decay",
        "config.json": "provenance",
        "split.json": "counts",
        "result.json": "macro_f1",
        "metrics.jsonl": "val_top1",
        "HTTP": "embedding",
    }.items():
        assert name in keys[place], place


def test_the_search_covers_the_project() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in files()}
    assert names == set(PLACES)
    assert len(files()) > 400
